"""What the kernels' bench times: each row of its table as a configuration, and that configuration as a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt

import numpy as np
import onnx_ir as ir
import torch

from plugins import methods
from plugins.config import MethodConfig
from plugins.contract import ROW_SYMBOLS, row_count
from plugins.deltakv.config import DeltaKVConfig
from plugins.dense import onnx_body as dense
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.intkv.config import Int4Config, Int8Config
from plugins.layer import LayerSpec
from plugins.native.abi import Library
from plugins.native.layer import NativeLayer
from plugins.vqkv.config import VQKVConfig

Make = Callable[[LayerSpec], "MethodConfig | None"]
ROPE_BASE = 500_000.0


@dataclass(frozen=True)
class Case:
    """name: the row of the table. method: as `--method` calls it. make: the configuration for a layer's sizes; None
    stands for an uncompressed layer. observes: an uncompressed layer that selects, for layers configured as `make`
    says. prompts: whether reading a prompt is not the same as in another row.
    """

    name: str
    method: str
    make: Make
    observes: bool = False
    prompts: bool = True


def _deltakv(spec: LayerSpec, **changes: float) -> DeltaKVConfig:
    """About what `--ratio 0.29` came to in the models of docs/comparison.md, scaled to this width: 5/16 of the values
    kept in 8 bits, 9/32 in 4, 5/16 in 2; one reference in 64."""
    width = 2 * spec.num_kv_heads * spec.head_dim
    step = 64 if width >= 1024 else 8
    sizes = [int(width * part) // step * step for part in (5 / 16, 9 / 32, 5 / 16)]
    latents = "+".join(f"{size}x{bits}" for size, bits in zip(sizes, (8, 4, 2), strict=True))
    return DeltaKVConfig(spec.head_dim, spec.num_kv_heads, latents, stride=64, full_layers=(), **changes)


def _int4(spec: LayerSpec, **changes: float) -> DeltaKVConfig:
    """The sizes of DeltaKV's paper: a quarter as many latents as values, all in 4 bits, one reference in 10."""
    latents = f"{spec.num_kv_heads * spec.head_dim // 2}x4"
    return DeltaKVConfig(spec.head_dim, spec.num_kv_heads, latents, full_layers=(), **changes)


def _vqkv(ratio: float, key_space: str) -> Make:
    return lambda spec: VQKVConfig.from_ratio(ratio, spec.head_dim, key_space=key_space)


def _residual(spec: LayerSpec) -> VQKVConfig:
    """The shape of VQKV's paper, stages over the whole vector, with codes of a byte."""
    return VQKVConfig(
        head_dim=spec.head_dim, k_groups=1, v_groups=1, k_stages=(1,) * 56, v_stages=(1,) * 32, key_space="post_rope",
        tables="layer", rotation=False, query_weighting=False, value_weighting=False,
    )  # fmt: skip


CASES = (
    Case("none", "none", lambda spec: None),
    Case("int8", "int8", lambda spec: Int8Config(spec.head_dim)),
    Case("int4", "int4", lambda spec: Int4Config(spec.head_dim)),
    Case("vqkv-0.125-tiles", "vqkv", lambda spec: _vqkv(0.125, "post_rope")(spec).tiled()),
    Case("vqkv-0.172-tiles", "vqkv", lambda spec: _vqkv(0.172, "post_rope")(spec).tiled()),
    Case("vqkv-0.172-post", "vqkv", _vqkv(0.172, "post_rope")),
    Case("vqkv-0.172-pre", "vqkv", _vqkv(0.172, "pre_rope")),
    Case("vqkv-56x1-32x1", "vqkv", _residual),
    Case("deltakv-all", "deltakv", _deltakv),
    Case("deltakv-select-0.17", "deltakv", lambda spec: _deltakv(spec, select_fraction=0.17), prompts=False),
    Case("deltakv-select-2048", "deltakv", lambda spec: _deltakv(spec, select_count=2048), prompts=False),
    Case("deltakv-int4-0.17", "deltakv", lambda spec: _int4(spec, select_fraction=0.17)),
    Case("deltakv-int4-2048", "deltakv", lambda spec: _int4(spec, select_count=2048), prompts=False),
    Case(
        "none-observing-0.17",
        "deltakv",
        lambda spec: _deltakv(spec, select_fraction=0.17),
        observes=True,
        prompts=False,
    ),
    Case(
        "none-observing-2048", "deltakv", lambda spec: _deltakv(spec, select_count=2048), observes=True, prompts=False
    ),
)


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these methods or names and, to compare them with, "none"; all without any.

    Raises UserError for a name that is neither.
    """
    known = dict.fromkeys([case.method for case in CASES] + [case.name for case in CASES])
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--method {unknown[0]}: use some of {', '.join(known)}")
    return [case for case in CASES if not names or case.name in ("none", *names) or case.method in names]


def layer_spec(shape: tuple[int, int, int]) -> LayerSpec:
    heads, queries, dim = shape
    return LayerSpec(0, queries, heads, dim, scale=1 / sqrt(dim), rope=0, rotary_dim=dim)


@cache
def rope(spec: LayerSpec, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [limit, rotary_dim / 2]."""
    half = torch.arange(spec.rotary_dim // 2, dtype=torch.float64)
    angle = torch.arange(limit, dtype=torch.float64)[:, None] * ROPE_BASE ** (-2 * half / spec.rotary_dim)
    return angle.cos().float(), angle.sin().float()


def make_layer(
    case: Case, spec: LayerSpec, library: Library, batch: int, capacity: int, dtype: torch.dtype, device: str = "cuda"
) -> NativeLayer:
    """A layer of a case with random tables and empty states. Raises UserError when the library cannot run it."""
    config = case.make(spec)
    geometry = None if config is None else config.geometry()
    if config is None or case.observes:
        plan, tables = dense.plan(spec, ir.DataType.FLOAT16, geometry), {}
    else:
        plan = methods.onnx_body(case.method).plan(spec, config, ir.DataType.FLOAT16, capacity)
        tables = _tables(case, spec)
    angles = rope(spec, capacity + 1)
    return NativeLayer(library, plan, spec, tables, batch, capacity, geometry, dtype, device, rope=angles)


@cache
def _tables(case: Case, spec: LayerSpec) -> dict[str, np.ndarray]:
    config, codec = case.make(spec), methods.reference(case.method).LayerCodec
    shapes = codec.shapes(config, spec.num_kv_heads)
    return methods.onnx_body(case.method).tables(codec.from_tensors(config, _random(shapes)))


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tables of a size such that what is made of them stays near 1."""
    generator = torch.Generator().manual_seed(0)

    def table(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        inputs = shape[-2] if len(shape) > 1 and "books" not in name else 1  # that a matrix sums over
        return torch.randn(shape, generator=generator) / sqrt(inputs)

    return {name: table(name, shape) for name, shape in shapes.items()}


def settled(length: int, geometry: Geometry | None) -> int:
    """The largest number of tokens up to `length` from which the next one encodes nothing, and the one before did."""
    if geometry is None:
        return length
    first = geometry.sinks + geometry.window
    if length < first + geometry.block:
        raise UserError(
            f"--length {length} is too short: from {first + geometry.block} tokens on something is compressed"
        )
    return first + int(geometry.encoded(length))


def bytes_read(layer: NativeLayer, stored: int) -> int:
    """Bytes of a layer's states that one decode step over `stored` tokens has to read, all sequences together.

    Tables are not counted. With a selection: its rows, and as many references as they can name.
    """
    geometry, total = layer.geometry, 0
    for name, (_, shape) in layer.plan.states.items():
        tensor = layer.states[name]
        symbol = next((dim for dim in shape if dim in ROW_SYMBOLS), None)
        part = 1.0
        if symbol is not None:
            rows = row_count(symbol, stored, geometry)
            if layer.plan.attributes.get("selects"):
                count = int(geometry.selected(np.array([stored]))[0])
                rows = min(rows, count * (layer.plan.attributes["neighbors"] if symbol == "ref_rows" else 1))
            part = rows / tensor.shape[shape.index(symbol)]
        total += int(tensor.numel() * tensor.element_size() * part)
    return total


def random_selection(layer: NativeLayer, stored: int) -> torch.Tensor | None:
    """Code rows as an observing layer would choose them, in random places, int32 [B, M]; None without selection."""
    if not layer.plan.attributes.get("selects"):
        return None
    geometry = layer.geometry
    _, width = geometry.selection(np.full(layer.batch, stored), layer.capacity, True)
    rows = [torch.randperm(int(geometry.encoded(stored)))[: int(width)].sort().values for _ in range(layer.batch)]
    return torch.stack(rows).int()


def described(case: Case, spec: LayerSpec) -> str:
    config = case.make(spec)
    if config is None:
        return "every key and value in 16 bits"
    if case.observes:
        return f"the same, and which tokens the layers after it read: {config.summary().rpartition('reads ')[2]}"
    return config.summary()
