"""One op in a graph of its own, run by ONNX Runtime step by step beside float32 references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from plugins.contract import state_sizes
from plugins.geometry import Geometry
from plugins.graph import NodePlan
from plugins.layer import LayerSpec

HEADS, DIM, LIMIT, CAPACITY = 2, 16, 256, 64
FLOAT, HALF, INT32 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT32
RANKS = {"past_len": 1, "new_len": 1, "live": 0, "enc_src": 2, "enc_dst": 2, "select_len": 1, "select_width": 0}
# appended tokens per sequence and step: ragged prefills, idle sequences, chunks with a past, single tokens
STEPS = [[5, 1, 20], [1, 1, 1], [0, 3, 2], [1, 0, 1], [4, 7, 1], [12, 1, 0], [1, 9, 9], *[[1, 1, 1]] * 8]


def layer(group: int = 3, rotary_dim: int = 8, **changes: float) -> LayerSpec:
    rope = 0 if rotary_dim else None
    return LayerSpec(0, HEADS * group, HEADS, DIM, 0.25, rope=rope, rotary_dim=rotary_dim, **changes)


def rope_tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [LIMIT, rotary_dim / 2]."""
    frequency = 0.7 ** torch.arange(rotary_dim // 2)
    angle = torch.arange(LIMIT)[:, None] * frequency
    return angle.cos(), angle.sin()


class Op:
    """One node in a graph of its own, with its state. `extra`: outputs of the last step that are no state.

    tiled: see `plugins.graph.Body`.
    """

    tiled = True

    def __init__(
        self, plan: NodePlan, batch: int, tables: dict[str, np.ndarray], geometry: Geometry | None = None
    ) -> None:
        inputs = []
        for name in plan.inputs:
            if name in ("cos", "sin") and name not in tables:
                inputs.append(None)
                continue
            dtype, rank = FLOAT, 3 if name in ("q", "k", "v") else 4
            if name in RANKS or name == "selected":
                dtype, rank = INT32, RANKS.get(name, 2)
            elif name in plan.states:
                dtype = plan.states[name][0]
            elif name in tables:
                rank = tables[name].ndim
            inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([None] * rank)))
        node = ir.Node("kvpack", plan.op, inputs, num_outputs=len(plan.outputs))
        for value, name in zip(node.outputs, plan.outputs, strict=True):
            state = plan.states.get(name.removesuffix("_out"))
            dtype, rank = (INT32, 2) if name == "selected" else ((state[0], 4) if state else (FLOAT, 3))
            value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([None] * rank)
        graph = ir.Graph(
            [x for x in inputs if x is not None],
            node.outputs,
            nodes=[node],
            opset_imports={"": 23, "kvpack": 1},
            name="one",
        )
        proto = ir.to_proto(ir.Model(graph, ir_version=10, functions=[plan.body("", tiled=self.tiled)]))
        onnx.checker.check_model(proto)
        self.session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        self.names = {value.name for value in self.session.get_inputs()}
        self.outputs, self.tables = plan.outputs, tables
        self.extra: dict[str, np.ndarray] = {}
        sizes = state_sizes(CAPACITY, geometry, batch)
        self.state = {
            name: np.zeros([sizes.get(d, d) for d in shape], dtype.numpy())
            for name, (dtype, shape) in plan.states.items()
        }

    def step(self, **feeds: np.ndarray) -> np.ndarray:
        """out [B, Hq, S, D] of q [B, Hq, S, D], k and v [B, H, S, D] and the rest."""
        dim = feeds["q"].shape[-1]
        feeds |= {name: token_major(feeds[name]) for name in ("q", "k", "v")} | self.tables | self.state
        found = self.session.run(None, {name: x for name, x in feeds.items() if name in self.names})
        results = dict(zip(self.outputs, found, strict=True))
        self.state = {name: results.pop(f"{name}_out") for name in self.state}
        out = results.pop("out")
        self.extra = results
        return out.reshape(*out.shape[:2], -1, dim).transpose(0, 2, 1, 3)


def token_major(x: np.ndarray) -> np.ndarray:
    """[B, H, S, D] -> [B, S, H * D]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def host_feeds(past: np.ndarray, new: np.ndarray, geometry: Geometry | None = None) -> dict[str, np.ndarray]:
    """What a session feeds beside tokens and state, with `live` rounded up to 8."""
    live = min(-(-past.max() // 8) * 8, CAPACITY)
    feeds = {"past_len": past, "new_len": new, "live": np.array(live, np.int32)}
    if geometry:
        feeds["enc_src"], feeds["enc_dst"] = geometry.schedule(past, new, geometry.encoded(CAPACITY))
        feeds["select_len"], feeds["select_width"] = geometry.selection(past, live, new.max() == 1)
    return feeds


def random_selection(feeds: dict[str, np.ndarray], geometry: Geometry, generator: torch.Generator) -> np.ndarray:
    """Distinct code rows for each sequence, the stored ones first: int32 [B, select_width]."""
    room = geometry.encoded(int(feeds["live"]))
    chosen = []
    for stored in geometry.encoded(feeds["past_len"].astype(np.int64)):
        order = torch.cat((torch.randperm(stored, generator=generator), torch.arange(stored, room)))
        chosen.append(order[: int(feeds["select_width"])].numpy())
    return np.stack(chosen).astype(np.int32)


def run(op: Op, references: Sequence[Any], spec: LayerSpec, steps: Sequence[Sequence[int]] = STEPS,
        geometry: Geometry | None = None) -> float:  # fmt: skip
    """Feed both the same random tokens; returns the largest difference of their outputs.

    Where the op takes a selection, steps of one token read random rows and others everything.
    """
    generator = torch.Generator().manual_seed(1)
    batch = len(references)
    past, worst = np.zeros(batch, np.int32), 0.0
    for counts in steps:
        new = np.array(counts, np.int32)
        q, k, v = (
            torch.randn(batch, h, max(new), DIM, generator=generator)
            for h in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        feeds = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy(), **host_feeds(past, new, geometry)}
        if "selected" in op.names:
            width = int(feeds["select_width"])
            feeds["selected"] = np.tile(np.arange(width, dtype=np.int32), (batch, 1))
            if max(new) == 1:
                feeds["selected"] = random_selection(feeds, geometry, generator)
        out = op.step(**feeds)
        assert np.isfinite(out).all()
        for b, n in enumerate(new):
            assert (out[b, :, n:] == 0).all()  # padding gives zeros
            if n:
                chosen = {}
                if "selected" in op.names and max(new) == 1:
                    rows = feeds["selected"][b, : feeds["select_len"][b]]
                    chosen["selected"] = torch.from_numpy(rows.astype(np.int64))
                expected = references[b].step(*(x[b : b + 1, :, :n] for x in (q, k, v)), **chosen)
                worst = max(worst, float(np.abs(expected.numpy()[0] - out[b, :, :n]).max()))
        past = past + new
    return worst


def twice(tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.cat((t, t), -1) for t in tables)
