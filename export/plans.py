"""Which node every layer of a model becomes under a codec, and the cache that these nodes keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from plugins.contract import TensorSpec, bytes_at, capacity_for
from plugins.dense import onnx_body as dense
from plugins.graph import NodePlan
from plugins.layer import LayerSpec
from plugins.methods import onnx_body

if TYPE_CHECKING:
    from calib.codec import Codec

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
STATES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


def layer_plans(
    codec: Codec | None, specs: Sequence[LayerSpec], kv_dtype: str, limit: int, int16: bool = True
) -> tuple[list[NodePlan], list[Mapping[str, np.ndarray]]]:
    """The node of every layer and the arrays it reads. kv_dtype: a key of STATES; limit: the longest sequence; int16:
    whether a state may have that dtype."""
    from calib.codec import observing_layers

    state = STATES[kv_dtype]
    body = onnx_body(codec.info.method) if codec else None
    observers = set(observing_layers(codec.config, specs).values()) if codec else set()
    plans, tables = [], []
    for spec in specs:
        layer = codec.layers.get(spec.layer) if codec else None
        if layer is None or body is None:
            observes = codec.config.geometry() if codec and spec.layer in observers else None
            plans.append(dense.plan(spec, state, observes))
            tables.append({})
        else:
            plans.append(body.plan(spec, codec.config, state, limit, int16))
            tables.append(body.tables(layer))
    return plans, tables


def codec_bytes(
    codec: Codec, specs: Sequence[LayerSpec], kv_dtype: str, limit: int, lengths: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """What an engine of this codec would hold: bytes of its tables, and of one sequence's cache by its tokens.

    Equal to an engine's "fixed_bytes" and `runtime.artefact.state_bytes`.
    """
    plans, tables = layer_plans(codec, specs, kv_dtype, limit)
    states = [
        TensorSpec(f"layer{spec.layer}.{name}", "state", np.dtype(dtype.numpy()).name, tuple(shape))
        for spec, plan in zip(specs, plans, strict=True)
        for name, (dtype, shape) in plan.states.items()
    ]
    geometry = codec.config.geometry()
    held = {n: bytes_at(states, capacity_for(n, max(n, limit)), geometry) for n in lengths}
    return sum(array.nbytes for layer in tables for array in layer.values()), held
