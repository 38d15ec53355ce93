"""From a graph's attention nodes to the structures of kvpack.h: what is fixed about a layer, without any address."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure
from typing import Any

from plugins.errors import UserError
from plugins.native.abi import (
    BF16,
    FP16,
    MAX_SEGMENTS,
    MAX_STAGES,
    PLAIN,
    TILES,
    VQKV,
    DeltaKV,
    Dense,
    Geometry,
    IntKV,
    Layer,
    Library,
)

OPS = {
    "DenseAttention": "dense",
    "DenseObservedAttention": "dense",
    "VQKVAttention": "vqkv",
    "DeltaKVAttention": "deltakv",
    "IntKVAttention": "intkv",
}
DTYPES = {"float16": FP16, "bfloat16": BF16}
LAYOUTS = {"plain": PLAIN, "tiles": TILES}


def describe(op_type: str, attributes: Mapping[str, Any], dtype: str) -> tuple[str, Layer, Structure]:
    """The library's name for an op, and its structures with sizes and attributes filled in and every address left 0.

    attributes: of the node (`NodePlan.attributes`). dtype: of activations and exact rows, "float16" or "bfloat16".
    Raises UserError for what the structures cannot hold.
    """
    if dtype not in DTYPES:
        raise UserError(f"the native kernels compute in float16 or bfloat16, not in {dtype}")
    op = OPS[op_type]
    layer = Layer(
        **{name: attributes[name] for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")},
        **{name: attributes[name] for name in ("sliding_window", "scale", "softcap")},
        dtype=DTYPES[dtype],
    )
    geometry = Geometry(*(attributes.get(name, 0) for name in ("sinks", "window", "block")))
    return op, layer, _STATES[op](attributes, geometry)


def uncovered(library: Library, op_type: str, attributes: Mapping[str, Any], dtype: str) -> str:
    """Why the library cannot run a node; "" when it can."""
    try:
        return library.supported(*describe(op_type, attributes, dtype))
    except UserError as error:
        return str(error)


def _dense(attributes: Mapping[str, Any], geometry: Geometry) -> Dense:
    return Dense(geometry=geometry)


def _vqkv(attributes: Mapping[str, Any], geometry: Geometry) -> VQKV:
    state = VQKV(geometry=geometry, pre_rope=attributes["key_space"] == "pre_rope")
    state.layout = LAYOUTS[attributes["layout"]]
    state.sets = attributes["sets"]
    for side in "kv":
        stages = attributes[f"{side}_stages"]
        if len(stages) > MAX_STAGES:
            raise UserError(f"{len(stages)} residual stages are more than the native kernels' {MAX_STAGES}")
        getattr(state, f"{side}_stages")[: len(stages)] = stages
        setattr(state, f"{side}_stage_count", len(stages))
        for name in (f"{side}_groups", f"{side}_entries"):
            setattr(state, name, attributes[name])
    return state


def _deltakv(attributes: Mapping[str, Any], geometry: Geometry) -> DeltaKV:
    names = ("stride", "neighbors", "reference_bits", "hidden", "selects")
    state = DeltaKV(geometry=geometry, **{name: attributes[name] for name in names})
    sizes, bits = attributes["latent_sizes"], attributes["latent_bits"]
    if len(sizes) > MAX_SEGMENTS:
        raise UserError(f"{len(sizes)} latent segments are more than the native kernels' {MAX_SEGMENTS}")
    state.segment_count = len(sizes)
    state.latent_sizes[: len(sizes)], state.latent_bits[: len(bits)] = sizes, bits
    state.index_bytes = 2
    return state


def _intkv(attributes: Mapping[str, Any], geometry: Geometry) -> IntKV:
    names = ("k_bits", "v_bits", "group", "rotation", "mean")
    state = IntKV(geometry=geometry, **{name: attributes[name] for name in names})
    state.pre_rope = attributes["key_space"] == "pre_rope"
    state.k_channel = attributes["k_axis"] == "channel"
    return state


_STATES = {"dense": _dense, "vqkv": _vqkv, "deltakv": _deltakv, "intkv": _intkv}
