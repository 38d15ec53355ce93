"""The public definition of DeltaKV: references, latents, selection, and how much of the cache remains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from plugins.config import MethodConfig
from plugins.errors import UserError
from plugins.geometry import Geometry

BITS = (2, 4, 8, 16)
COMPRESSORS = ("linear", "swiglu")
# The step of a uniform quantiser that is best for a Gaussian of standard deviation 1, by bits (Max 1960).
STEPS = {2: 0.9957, 4: 0.3352, 8: 0.0308}


def layer_ratio(reference_bits: int, stride: int, latent_bits: float) -> float:
    """References and latents of a compressed layer, over its fp16 bytes (paper, section 4).

    latent_bits: of a token, over width. Indices, scales, sinks and window are not counted.
    """
    return reference_bits / 16 / stride + latent_bits / 16


def latents_to_text(segments: Iterable[tuple[int, int]]) -> str:
    """((80, 8), (144, 4)) -> "80x8+144x4"; segments of no values are left out."""
    return "+".join(f"{size}x{bits}" for size, bits in segments if size)


@dataclass(frozen=True)
class DeltaKVConfig(MethodConfig):
    """Residual KV cache against similar earlier tokens (DeltaKV, arXiv:2602.08005).

    One vector x is a token's keys before RoPE and its values, all KV heads together: [width], width = 2 * kv_heads *
    head_dim. Reference tokens keep x; any other token keeps the latent z = f(x) - f(m), where m is the mean of the
    `neighbors` references nearest to x among those at or before it, and their indices. It is read as g(z) + m.

    head_dim, kv_heads: sizes of the compressed layers.
    latents: values of z and bits of each, in segments "80x8+144x4+120x2": z is in principal axes, so that
        the first vary most and earn most bits. Every segment has a scale per token. Bits are 2, 4 or 8, in segments
        of multiples of 8 values; "256x16" does not quantise.
    stride: position p is a reference if p < sinks or (p - sinks) % stride == 0.
    neighbors: references per token; at most `sinks`, so that the first tokens find as many.
    reference_bits: 16 (raw), or 8 with one scale per token.
    compressor: f is "linear" (one matrix) or "swiglu" (that matrix plus a SwiGLU of `hidden` units); g is one matrix.
    hidden: units of the SwiGLU; 0 with "linear".
    full_layers: layers that keep an uncompressed cache. One whose successor is compressed observes for those after it
        which tokens to read, when a selection is set.
    select_fraction, select_count: compressed tokens that a decode step reads per layer, as a part of all or as a
        number; 0 and 0: all of them.
    sinks, window, block: the exact part of the cache, in tokens; see `plugins.geometry.Geometry`.

    Raises UserError when a field is out of range.
    """

    METHOD: ClassVar[str] = "deltakv"
    SHAPE: ClassVar[tuple[str, ...]] = ("head_dim", "kv_heads")

    head_dim: int
    kv_heads: int
    latents: str
    stride: int = 10
    neighbors: int = 2
    reference_bits: int = 16
    compressor: str = "linear"
    hidden: int = 0
    full_layers: tuple[int, ...] = (0,)
    select_fraction: float = 0.0
    select_count: int = 0
    sinks: int = 8
    window: int = 128
    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.head_dim, self.kv_heads) < 1:
            raise UserError(f"head_dim={self.head_dim} and kv_heads={self.kv_heads} must be positive")
        self._check_latents()
        if self.stride < 1:
            raise UserError(f"stride={self.stride} must be at least 1")
        if not 1 <= self.neighbors <= self.sinks:
            raise UserError(f"neighbors={self.neighbors} must be from 1 to sinks={self.sinks}")
        if self.reference_bits not in (8, 16):
            raise UserError(f"reference_bits={self.reference_bits} must be 8 or 16")
        if self.compressor not in COMPRESSORS:
            raise UserError(f"compressor={self.compressor} must be {' or '.join(COMPRESSORS)}")
        if (self.compressor == "swiglu") != (self.hidden > 0) or self.hidden < 0:
            raise UserError(f"hidden={self.hidden} must be positive with compressor=swiglu and 0 with linear")
        if self.select_count and self.select_fraction:
            raise UserError(
                f"select_fraction={self.select_fraction} and select_count={self.select_count} are two ways to set "
                "one budget: leave one at 0"
            )

    def _check_latents(self) -> None:
        """Raises UserError."""
        if not re.fullmatch(r"\d+x\d+(\+\d+x\d+)*", self.latents):
            raise UserError(f"latents={self.latents} must be segments of values and bits, like 80x8+144x4+120x2")
        bits = [bits for _, bits in self.segments]
        if wrong := set(bits) - set(BITS):
            raise UserError(f"latents={self.latents}: {min(wrong)} bits must be one of {', '.join(map(str, BITS))}")
        if 16 in bits and len(bits) > 1:
            raise UserError(f"latents={self.latents}: 16 bits stand alone, like {self.latent_dim}x16")
        if any(size < 1 or (size % 8 and bits < 16) for size, bits in self.segments) or self.latent_dim > self.width:
            raise UserError(
                f"latents={self.latents} must be at most {self.width} values (2 x {self.kv_heads} KV heads x head_dim "
                f"{self.head_dim}), in segments of multiples of 8"
            )

    @cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(values, bits) of each part of z."""
        parts = (term.split("x") for term in self.latents.split("+"))
        return tuple((int(size), int(bits)) for size, bits in parts)

    @property
    def latent_dim(self) -> int:
        """Values of z."""
        return sum(size for size, _ in self.segments)

    @property
    def latent_bits(self) -> int:
        """Bits of z, scales not counted."""
        return sum(size * bits for size, bits in self.segments)

    @property
    def width(self) -> int:
        """Length of x."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def selects(self) -> bool:
        """Whether decode steps read only some of the compressed tokens."""
        return self.geometry().selects

    @property
    def scales(self) -> int:
        """Scales per token, one for each segment: 0 where z is not quantised."""
        return 0 if self.segments[0][1] == 16 else len(self.segments)

    def geometry(self) -> Geometry:
        return Geometry(
            sinks=self.sinks,
            window=self.window,
            block=self.block,
            stride=self.stride,
            select_fraction=self.select_fraction,
            select_count=self.select_count,
        )

    def layer_ratio(self) -> float:
        return layer_ratio(self.reference_bits, self.stride, self.latent_bits / self.width)

    def summary(self) -> str:
        """One line: "every 10. token a reference, 2 nearest; latents 80x8+144x4 of 384, linear; full layers 0; ..."."""
        references = f"every {self.stride}. token a reference" + (" in 8 bits" if self.reference_bits == 8 else "")
        layers = self.write_field("full_layers", self.full_layers) or "none"
        if self.select_fraction:
            reads = f"reads {self.select_fraction:g} of the tokens"
        else:
            reads = f"reads {self.select_count} tokens" if self.select_count else "reads all tokens"
        unit = self.compressor + (f" of {self.hidden}" if self.hidden else "")
        return (
            f"{references}, {self.neighbors} nearest; latents {self.latents} of {self.width}, {unit}; "
            f"full layers {layers}; {reads}"
        )

    def faster_on_gpu(self) -> str:
        fewer = min(self.width // 4, 512)
        fast = self.head_dim != 128 or (self.segments == ((self.latent_dim, 4),) and self.latent_dim <= 512)
        return "" if fast else f"--set latents={fewer}x4, which keeps less of the quality"

    @classmethod
    def paper_llama31_8b(cls) -> DeltaKVConfig:
        """The paper's Llama-3.1-8B configuration with int4 latents: ratio 0.293 over 32 layers."""
        return cls(
            head_dim=128,
            kv_heads=8,
            latents="512x4",
            stride=10,
            neighbors=4,
            compressor="swiglu",
            hidden=3072,
            full_layers=(0, 1, 2, 8, 18),
            select_fraction=0.17,
            sinks=8,
            window=128,
            block=128,
        )
