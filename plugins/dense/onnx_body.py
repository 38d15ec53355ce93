"""DenseAttention as an ONNX function: attention over an uncompressed cache, whole or a sliding window of it."""

from __future__ import annotations

import onnx_ir as ir

from .. import graph
from ..graph import INT64, Body, NodePlan, Rows
from ..layer import LayerSpec

OP = "DenseAttention"
INPUTS = ("q", "k", "v", "state_k", "state_v", "past_len", "new_len", "live", "cos", "sin")
OUTPUTS = ("out", "state_k_out", "state_v_out")


def function(heads: LayerSpec, state: ir.DataType, overload: str) -> ir.Function:
    """The body for one set of attributes.

    q [B, Hq, S, D], k and v [B, H, S, D] before RoPE; state_k (rotated keys) and state_v [B, H, rows, D]; past_len and
    new_len int32 [B]; live int32 []; cos and sin [limit, rotary_dim / 2].
    With sliding_window = w the state is a ring of exactly w rows, position p at row p mod w. Otherwise position p is
    row p, the last row takes the writes of padding, and only the first `live` rows are read.
    """
    b = Body()
    q, k, v, state_k, state_v, past_len, new_len, live, cos, sin = inputs = graph.named(*INPUTS)
    past, new, length = b.cast(past_len, INT64), b.cast(new_len, INT64), b.size(q, 2)
    position = graph.step_positions(b, past, length)
    query, key, value = (b.cast(x, graph.FLOAT) for x in (q, k, v))
    query = graph.rope(b, query, position, cos, sin, heads.rotary_dim, heads.head_dim)
    key = graph.rope(b, key, position, cos, sin, heads.rotary_dim, heads.head_dim)
    fresh = [b.cast(x, state) for x in (key, value)]
    if heads.window:
        old = [b.Concat(s, f, axis=2) for s, f in zip((state_k, state_v), fresh, strict=True)]
        held = graph.ring_positions(b, past, 0, heads.window)
        source = graph.ring_source(b, past, new, 0, heads.window)
        read = [b.slice(x, 0, heads.window, 2) for x in old]
        visible = b.GreaterOrEqual(held, 0)
        written = [graph.gather_rows(b, x, source, heads.num_kv_heads) for x in old]
    else:
        end = b.Unsqueeze(b.cast(live, INT64), [0])
        read = [b.slice(s, [0], end, 2) for s in (state_k, state_v)]
        held = b.Range(0, b.cast(live, INT64), 1)
        visible = b.Less(b.Unsqueeze(held, [0]), b.Unsqueeze(past, [1]))
        real = graph.new_rows(b, new, length)
        trash = b.Sub(b.size(state_k, 2), [1])
        row = b.Where(real, position, trash)
        written = [
            graph.scatter_rows(b, s, row, f, heads.num_kv_heads) for s, f in zip((state_k, state_v), fresh, strict=True)
        ]
    cached = Rows(b.cast(read[0], graph.FLOAT), b.cast(read[1], graph.FLOAT), visible, held)
    out = b.CastLike(graph.attention(b, heads, query, key, value, past, new, [cached]), q)
    return b.function(OP, overload, inputs, [out, *written], OUTPUTS, list(heads.attributes()))


def plan(spec: LayerSpec, state: ir.DataType) -> NodePlan:
    """The node of one layer kept uncompressed."""
    shape = ("batch", spec.num_kv_heads, spec.window or "rows", spec.head_dim)
    return NodePlan(
        op=OP,
        inputs=INPUTS,
        outputs=OUTPUTS,
        states={"state_k": (state, shape), "state_v": (state, shape)},
        attributes=spec.attributes(),
        function=lambda overload: function(spec, state, overload),
    )
