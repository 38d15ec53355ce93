"""The public definition of DeltaKV: references, latents, selection, and how much of the cache remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.config import MethodConfig
from plugins.errors import UserError
from plugins.geometry import Geometry

BITS = (2, 4, 8, 16)
COMPRESSORS = ("linear", "swiglu")
# The step of a uniform quantiser that is best for a Gaussian of standard deviation 1, by bits (Max 1960).
STEPS = {2: 0.9957, 4: 0.3352, 8: 0.0308}


def layer_ratio(reference_bits: int, stride: int, part: float, latent_bits: int) -> float:
    """References and latents of a compressed layer, over its fp16 bytes (paper, section 4).

    part: latent_dim / width. Indices, scales, sinks and window are not counted.
    """
    return reference_bits / 16 / stride + part * latent_bits / 16


@dataclass(frozen=True)
class DeltaKVConfig(MethodConfig):
    """Residual KV cache against similar earlier tokens (DeltaKV, arXiv:2602.08005).

    One vector x is a token's keys before RoPE and its values, all KV heads together: [width], width = 2 * kv_heads *
    head_dim. Reference tokens keep x; any other token keeps the latent z = f(x) - f(m), where m is the mean of the
    `neighbors` references nearest to x among those at or before it, and their indices. It is read as g(z) + m.

    head_dim, kv_heads: sizes of the compressed layers.
    latent_dim: values of z; with latent_bits < 16 a multiple of 8.
    stride: position p is a reference if p < sinks or (p - sinks) % stride == 0.
    neighbors: references per token; at most `sinks`, so that the first tokens find as many.
    latent_bits: 16 (not quantised), 8, 4 or 2 bits per value of z.
    latent_group: values of z that share one scale; 0: the whole token.
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
    latent_dim: int
    stride: int = 10
    neighbors: int = 4
    latent_bits: int = 4
    latent_group: int = 0
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
        if self.latent_bits not in BITS:
            raise UserError(f"latent_bits={self.latent_bits} must be one of {', '.join(map(str, BITS))}")
        step = 1 if self.latent_bits == 16 else 8
        if not 1 <= self.latent_dim <= self.width or self.latent_dim % step:
            raise UserError(
                f"latent_dim={self.latent_dim} must be from {step} to {self.width} (2 x {self.kv_heads} KV heads x "
                f"head_dim {self.head_dim})" + (f" and a multiple of {step}" if step > 1 else "")
            )
        if self.stride < 1:
            raise UserError(f"stride={self.stride} must be at least 1")
        if not 1 <= self.neighbors <= self.sinks:
            raise UserError(f"neighbors={self.neighbors} must be from 1 to sinks={self.sinks}")
        if self.latent_group < 0 or (self.latent_group and self.latent_dim % self.latent_group):
            raise UserError(f"latent_group={self.latent_group} must be 0 or divide latent_dim={self.latent_dim}")
        if self.latent_group and self.latent_bits == 16:
            raise UserError(f"latent_group={self.latent_group} has no meaning with latent_bits=16: leave it 0")
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
        """Scales per latent: 0 where it is not quantised."""
        if self.latent_bits == 16:
            return 0
        return self.latent_dim // self.latent_group if self.latent_group else 1

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
        return layer_ratio(self.reference_bits, self.stride, self.latent_dim / self.width, self.latent_bits)

    def summary(self) -> str:
        """One line: "every 10th token a reference, 4 nearest, latent 256 of 384 in 4 bits, linear, full layers 0"."""
        references = f"every {self.stride}. token a reference" + (" in 8 bits" if self.reference_bits == 8 else "")
        layers = self.write_field("full_layers", self.full_layers) or "none"
        if self.select_fraction:
            reads = f"reads {self.select_fraction:g} of the tokens"
        else:
            reads = f"reads {self.select_count} tokens" if self.select_count else "reads all tokens"
        unit = self.compressor + (f" of {self.hidden}" if self.hidden else "")
        return (
            f"{references}, {self.neighbors} nearest; latent {self.latent_dim} of {self.width} in {self.latent_bits} "
            f"bits, {unit}; full layers {layers}; {reads}"
        )

    @classmethod
    def paper_llama31_8b(cls) -> DeltaKVConfig:
        """The paper's Llama-3.1-8B configuration with int4 latents: ratio 0.293 over 32 layers."""
        return cls(
            head_dim=128,
            kv_heads=8,
            latent_dim=512,
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


Config = DeltaKVConfig
