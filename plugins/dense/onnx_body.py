"""DenseAttention as an ONNX function: attention over an uncompressed cache, whole or a sliding window of it.

DenseObservedAttention also chooses which rows the compressed layers after it read.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .. import graph
from ..geometry import Geometry
from ..graph import FLOAT, INT32, INT64, Body, NodePlan, Rows
from ..layer import LayerSpec

OP, OBSERVED_OP = "DenseAttention", "DenseObservedAttention"
INPUTS = ("q", "k", "v", "state_k", "state_v", "past_len", "new_len", "live", "cos", "sin")
OUTPUTS = ("out", "state_k_out", "state_v_out")
TOP_LIMIT = 3840  # rows that a body without tiles chooses at most: what TensorRT sorts
ROW_TILE = 2048  # rows read at a time: they cost a cast only, so a short context is one tile
SELECTION_INPUTS, SELECTION_OUTPUTS = ("select_len", "select_width"), ("selected",)


def function(
    b: Body, heads: LayerSpec, state: ir.DataType, overload: str, observes: Geometry | None = None
) -> ir.Function:
    """Writes the body for one set of attributes.

    q [B, Hq, S, D], k and v [B, H, S, D] before RoPE; state_k (rotated keys) and state_v [B, H, rows, D]; past_len and
    new_len int32 [B]; live int32 []; cos and sin [limit, rotary_dim / 2].
    With sliding_window = w the state is a ring of exactly w rows, position p at row p mod w. Otherwise position p is
    row p, the last row takes the writes of padding, and only the first `live` rows are read.
    observes: where the compressed layers keep what. Then select_width int32 [] and the output selected int32
    [B, select_width] belong to the op: the code rows that get most attention, in a step of one token (those past
    `select_len[b]` mean nothing), or all code rows.
    """
    inputs = graph.named(*INPUTS, *(SELECTION_INPUTS if observes else ()))
    q, k, v, state_k, state_v, past_len, new_len, live, cos, sin = inputs[: len(INPUTS)]
    past, new, length = b.cast(past_len, INT64), b.cast(new_len, INT64), b.size(q, 2)
    position = graph.step_positions(b, past, length)
    query, key, value = (b.cast(x, FLOAT) for x in (q, k, v))
    query = graph.rope(b, query, position, cos, sin, heads.rotary_dim, heads.head_dim)
    key = graph.rope(b, key, position, cos, sin, heads.rotary_dim, heads.head_dim)
    fresh, end = [b.cast(x, state) for x in (key, value)], b.Unsqueeze(b.cast(live, INT64), [0])
    seen: list[Rows] = []
    found = None
    if heads.window:
        old = [b.Concat(s, f, axis=2) for s, f in zip((state_k, state_v), fresh, strict=True)]
        held = graph.ring_positions(b, past, 0, heads.window)
        source = graph.ring_source(b, past, new, 0, heads.window)
        read = [b.cast(b.slice(x, 0, heads.window, 2), FLOAT) for x in old]
        seen = [Rows(*read, b.GreaterOrEqual(held, 0), held)]
        written = [graph.gather_rows(b, x, source, heads.num_kv_heads) for x in old]
    else:
        stored = b.Unsqueeze(past, [1])  # [B, 1]

        def build(t: Body, start: ir.Value, stop: ir.Value) -> tuple[ir.Value, list[ir.Value], ir.Value]:
            row = t.Unsqueeze(t.Range(t.Squeeze(start), t.Squeeze(stop), 1), [0])  # [1, n]
            keys, values = (t.cast(t.slice(s, start, stop, 2), FLOAT) for s in (state_k, state_v))
            return keys, [values], t.Less(row, stored)

        found = graph.summarise(b, heads, query, end, build, lambda t, sums: sums[0], [heads.head_dim], ROW_TILE)
        row = b.Where(graph.new_rows(b, new, length), position, b.Sub(b.size(state_k, 2), [1]))  # the last row is trash
        written = [
            graph.scatter_rows(b, s, row, f, heads.num_kv_heads) for s, f in zip((state_k, state_v), fresh, strict=True)
        ]
    out = b.CastLike(graph.attention(b, heads, query, key, value, past, new, seen, found), q)
    outputs, names = [out, *written], OUTPUTS
    attributes = plan(heads, state, observes).attributes
    if observes is None:
        return b.function(OP, overload, inputs, outputs, names, list(attributes))
    width = b.cast(inputs[-1], INT64)

    def everything(t: Body) -> ir.Value:
        row = t.cast(t.Range(0, width, 1), INT32)
        return t.Expand(t.Unsqueeze(row, [0]), t.shape(t.size(q, 0), t.Unsqueeze(width, [0])))

    single = b.Equal(b.Squeeze(length), 1)
    if b.tiled:
        chosen = graph.when(
            b,
            b.And(single, b.Greater(width, 0)),
            lambda t: most_attended(t, heads, observes, query, key, state_k, past, end, width),
            everything,
            INT32,
        )
    else:  # both, of which steps of many tokens take the second
        first = [b.slice(x, 0, 1, 2) for x in (query, key)]
        count = b.Max(b.Min(width, TOP_LIMIT), 1)
        found = most_attended(b, heads, observes, *first, state_k, past, end, count)
        place = b.Min(b.Range(0, width, 1), b.Sub(count, 1))
        chosen = b.Where(single, b.Gather(found, place, axis=1), everything(b))
    return b.function(OBSERVED_OP, overload, inputs, [*outputs, chosen], (*names, *SELECTION_OUTPUTS), list(attributes))


def most_attended(
    b: Body,
    heads: LayerSpec,
    geometry: Geometry,
    q: ir.Value,
    k: ir.Value,
    state_k: ir.Value,
    past: ir.Value,
    live: ir.Value,
    width: ir.Value,
) -> ir.Value:
    """The `width` code rows with the largest softmax probability of any head, the lower of equals: int32 [B, width].

    q [B, H g, 1, D] and k [B, H, 1, D], rotated; state_k: every position in order, those below past int64 [B] stored
    and all of these below live int64 [1]; width int64 [].
    """
    h, g, d = heads.num_kv_heads, heads.group, heads.head_dim
    query = b.Reshape(b.Mul(q, heads.scale), b.shape(0, h, g, d))

    def products(t: Body, keys: ir.Value) -> ir.Value:
        return t.MatMul(query, t.Transpose(keys, perm=[0, 1, 3, 2]))  # [B, H, g, n]

    def tile(t: Body, start: ir.Value, size: ir.Value) -> ir.Value:
        stop = t.Min(t.Add(start, size), live)
        score = products(t, t.cast(t.slice(state_k, start, stop, 2), FLOAT))
        return t.Pad(score, t.shape(0, t.Sub(t.Add(start, size), stop)), None, [-1])

    if b.tiled:
        stacked = graph.tiles(b, live, ROW_TILE, tile, FLOAT)  # [T, B, H, g, n]
        score = b.Reshape(b.Transpose(stacked, perm=[1, 2, 3, 0, 4]), [0, 0, 0, -1])
        score = b.slice(score, [0], live, 3)
    else:
        live = b.Max(live, [1])
        score = products(b, b.cast(b.slice(state_k, [0], live, 2), FLOAT))
    score = b.Concat(score, products(b, k), axis=-1)  # [B, H, g, live + 1]
    if heads.softcap:
        score = b.Mul(b.Tanh(b.Div(score, heads.softcap)), heads.softcap)
    stored = b.Less(b.Unsqueeze(b.Range(0, b.Squeeze(live), 1), [0]), b.Unsqueeze(past, [1]))
    seen = b.Pad(stored, [0, 1], True, [-1])  # the new token sees itself
    weight = b.Softmax(b.Where(b.Unsqueeze(seen, [1, 2]), score, graph.MASKED), axis=-1)
    most = b.ReduceMax(weight, [1, 2], keepdims=0)  # [B, N + 1]
    most = b.slice(most, geometry.sinks, b.Sub(b.size(most, 1), [1]), 1)
    row = b.Unsqueeze(b.Range(0, b.Squeeze(b.size(most, 1)), 1), [0])
    compressed = b.Less(row, b.Unsqueeze(graph.encoded(b, past, geometry), [1]))
    score = b.Where(compressed, most, np.float32(-1))
    if not b.tiled:
        score = b.Pad(score, [0, 1], np.float32(-1), [-1])  # there is one where nothing is stored yet
    return b.cast(b.several("TopK", 2, score, b.Unsqueeze(width, [0]))[1], INT32)


def plan(spec: LayerSpec, state: ir.DataType, observes: Geometry | None = None) -> NodePlan:
    """The node of one layer kept uncompressed.

    observes: the compressed layers' geometry, when the layer chooses which code rows they read. A sliding-window layer
    cannot.
    """
    shape = ("batch", spec.num_kv_heads, spec.window or "rows", spec.head_dim)
    attributes = spec.attributes()
    if observes is not None:
        attributes |= {"sinks": observes.sinks, "window": observes.window, "block": observes.block}
    return NodePlan(
        heads=spec,
        op=OBSERVED_OP if observes else OP,
        inputs=INPUTS + (SELECTION_INPUTS if observes else ()),
        outputs=OUTPUTS + (SELECTION_OUTPUTS if observes else ()),
        states={"state_k": (state, shape), "state_v": (state, shape)},
        attributes=attributes,
        function=lambda b, overload: function(b, spec, state, overload, observes),
    )
