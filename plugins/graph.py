"""Building blocks of the ONNX function bodies: attention over a cache, in standard operators, tiled and in float32.

Shapes: B batch, H KV heads, g query heads per KV head, S new tokens, N cached rows, D head dimension.
State is read only through a copy or a slice that the write of the same step depends on or does not overlap, because
ONNX Runtime does not know that a state's input and output share one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from .contract import TILE_ROWS
from .geometry import Geometry
from .layer import LayerSpec

OPSET = 23
DOMAIN = "kvpack"
QUERY_TILE = 128  # query rows per attention tile: bounds the score matrix at [B, H, g, 128, N + S]
ENCODE_TILE = 128  # cache rows encoded at a time
ROW_TILE = 512  # cache rows rebuilt at a time; fewer when there are many queries
MASKED = np.float32(-1e30)  # finite, so that a row with nothing to see stays finite

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
Operand = ir.Value | np.ndarray | int | float | Sequence[int] | None


class Body:
    """Writes nodes: `b.MatMul(x, y)` appends one and returns its output. Numbers and arrays become constants.

    Python ints become int64 scalars, lists of ints int64 vectors and floats float32 scalars.
    tiled: whether rows are worked on by tiles, one after another, or all at once, without loops.
    """

    def __init__(self, prefix: str = "", tiled: bool = True) -> None:
        self.tape = tape.Tape()
        self.prefix, self.tiled = prefix, tiled
        self.nested = 0

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def emit(*inputs: Operand, **attributes: Any) -> ir.Value:
            return self._named(self.tape.op(op_type, [self.value(x) for x in inputs], attributes))

        return emit

    def several(self, op_type: str, count: int, *inputs: Operand, **attributes: Any) -> list[ir.Value]:
        """The first `count` outputs of one node."""
        values = self.tape.op_multi_out(op_type, [self.value(x) for x in inputs], attributes, num_outputs=count)
        return [self._named(value, f"_{n}") for n, value in enumerate(values)]

    def value(self, x: Operand) -> ir.Value | None:
        if x is None or isinstance(x, ir.Value):
            return x
        array = np.asarray(x)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return self._named(self.tape.op("Constant", [], {"value": ir.tensor(array)}))

    def _named(self, value: ir.Value, suffix: str = "") -> ir.Value:
        value.name = f"{self.prefix}{len(self.tape.nodes)}{suffix}"
        return value

    def inner(self) -> Body:
        """A body for a subgraph of this one; its names clash with none outside."""
        self.nested += 1
        return Body(f"{self.prefix}t{self.nested}_", self.tiled)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.Cast(x, to=int(dtype))

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """Length of one axis: int64 [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def slice(self, x: ir.Value, start: Operand, end: Operand, axis: int) -> ir.Value:
        """x[start:end] along `axis`; start and end are int64 [1]."""
        return self.Slice(x, _vector(start), _vector(end), [axis])

    def shape(self, *dims: ir.Value | int) -> ir.Value:
        """A shape from constants and int64 [1] values."""
        return self.Concat(*[[d] if isinstance(d, int) else d for d in dims], axis=0)

    def function(
        self,
        name: str,
        overload: str,
        inputs: list[ir.Value],
        outputs: list[ir.Value],
        names: Sequence[str],
        attributes: Sequence[str],
    ) -> ir.Function:
        """The nodes so far as one function; `names` are the outputs' names."""
        for value, output in zip(outputs, names, strict=True):
            value.name = output
        graph = ir.Graph(inputs, outputs, nodes=self.tape.nodes, opset_imports={"": OPSET}, name=name)
        declared = [ir.Attr(a, ir.AttributeType.UNDEFINED, None) for a in attributes]
        return ir.Function(DOMAIN, name, overload, graph=graph, attributes=declared)


def _vector(x: Operand) -> Operand:
    return [x] if isinstance(x, int) else x


def named(*names: str) -> list[ir.Value]:
    return [ir.Value(name=n) for n in names]


def tiles(
    b: Body,
    rows: ir.Value,
    tile: int,
    compute: Callable[[Body, ir.Value, ir.Value], ir.Value],
    dtype: ir.DataType,
) -> ir.Value:
    """Run `compute(body, start, size)` over ceil(rows / size) tiles, size = min(rows, tile), as one Scan.

    rows: int64 [1], at least 1. start, size: int64 [1]. Returns the tiles stacked along a new first axis.
    A body without tiles has a single one, of all rows.
    """
    if not b.tiled:
        return b.Unsqueeze(compute(b, b.value([0]), rows), [0])
    size = b.Min(rows, [tile])
    count = b.Div(b.Sub(b.Add(rows, size), [1]), size)
    starts = b.Mul(b.Range(0, b.Squeeze(count), 1), size)
    inner = b.inner()
    start = ir.Value(name=f"{inner.prefix}start", type=ir.TensorType(INT64), shape=ir.Shape([]))
    out = compute(inner, inner.Unsqueeze(start, [0]), size)
    out.type = ir.TensorType(dtype)
    graph = ir.Graph([start], [out], nodes=inner.tape.nodes, name="tile")
    return b.Scan(starts, body=graph, num_scan_inputs=1)


def when(
    b: Body,
    condition: ir.Value,
    compute: Callable[[Body], ir.Value],
    otherwise: Callable[[Body], ir.Value],
    dtype: ir.DataType,
) -> ir.Value:
    """`compute` where the bool scalar `condition` holds, else `otherwise`: only the chosen one runs."""
    branches = []
    for branch in (compute, otherwise):
        inner = b.inner()
        out = branch(inner)
        out.type = ir.TensorType(dtype)
        branches.append(ir.Graph([], [out], nodes=inner.tape.nodes, name="branch"))
    return b.If(condition, then_branch=branches[0], else_branch=branches[1])


def when_some(
    b: Body,
    rows: ir.Value,
    compute: Callable[[Body], ir.Value],
    nothing: Callable[[Body], ir.Value],
    dtype: ir.DataType,
) -> ir.Value:
    """`compute` where there are rows, int64 [1], else `nothing`: only the chosen one runs. A body without tiles always
    has rows, see `schedule`."""
    return when(b, b.Squeeze(b.Greater(rows, [0])), compute, nothing, dtype) if b.tiled else compute(b)


def schedule(b: Body, source: ir.Value, target: ir.Value, trash: ir.Value, unit: int = 1) -> tuple[ir.Value, ir.Value]:
    """enc_src and enc_dst int32 [B, E] as int64: which rows to encode, and the code rows they become.

    A body without tiles encodes `unit` rows more, into the code row `trash` int64 [], so that no tensor is empty.
    """
    source, target = b.cast(source, INT64), b.cast(target, INT64)
    if b.tiled:
        return source, target
    return b.Pad(source, [0, unit], None, [-1]), b.Pad(target, [0, unit], trash, [-1])


def last_row(b: Body, state: ir.Value) -> ir.Value:
    """The last row of state [B, H, N, D], its trash row: int64 []."""
    return b.Squeeze(b.Sub(b.size(state, 2), [1]))


def gather_rows(b: Body, x: ir.Value, index: ir.Value, heads: int) -> ir.Value:
    """x [B, H, N, D], index int64 [B, M] -> [B, H, M, D]."""
    shape = b.shape(b.size(index, 0), heads, b.size(index, 1), 1)
    return b.GatherND(x, b.Expand(b.Unsqueeze(index, [1, 3]), shape), batch_dims=2)


def scatter_rows(b: Body, state: ir.Value, row: ir.Value, update: ir.Value, heads: int) -> ir.Value:
    """state [B, H, N, D] with rows `row` int64 [B, M] replaced by update [B, H, M, D]."""
    batch, count = b.size(row, 0), b.size(row, 1)
    full = b.shape(batch, heads, count, 1)
    members = b.Reshape(b.Range(0, b.Squeeze(batch), 1), [-1, 1, 1, 1])
    index = b.Concat(
        b.Expand(members, full),
        b.Expand(np.arange(heads, dtype=np.int64).reshape(1, -1, 1, 1), full),
        b.Expand(b.Unsqueeze(row, [1, 3]), full),
        axis=-1,
    )
    return b.ScatterND(state, index, update)


def rope(
    b: Body,
    x: ir.Value,
    position: ir.Value,
    cos: ir.Value | None,
    sin: ir.Value | None,
    dims: int,
    head_dim: int,
):
    """Rotate x [B, H, N, D] at `position` int64 [B, N] by tables [limit, dims / 2]; dims = 0 means no RoPE."""
    if dims == 0:
        return x
    position = b.Max(b.Min(position, b.Sub(b.size(cos, 0), [1])), [0])
    c = b.Unsqueeze(b.Gather(b.cast(cos, FLOAT), position), [1])  # [B, 1, N, dims / 2]
    s = b.Unsqueeze(b.Gather(b.cast(sin, FLOAT), position), [1])
    half = dims // 2
    first, second = b.slice(x, 0, half, -1), b.slice(x, half, dims, -1)
    parts = [b.Sub(b.Mul(first, c), b.Mul(second, s)), b.Add(b.Mul(second, c), b.Mul(first, s))]
    if dims < head_dim:
        parts.append(b.slice(x, dims, head_dim, -1))
    return b.Concat(*parts, axis=-1)


@dataclass
class Rows:
    """Cached rows a query may see, all at once. key: [B, H, N, D] rotated. value: [B, H, N, D]. visible: bool [B, N].

    position: int64 [B, N], only needed under a sliding window.
    """

    key: ir.Value
    value: ir.Value
    visible: ir.Value
    position: ir.Value | None = None


@dataclass
class Summary:
    """Attention over some rows by themselves, to be merged: out [B, H, g, S, D], and the log of the sum of exp(score)
    in mass [B, H, g, S, 1]."""

    out: ir.Value
    mass: ir.Value


def summarise(
    b: Body,
    heads: LayerSpec,
    q: ir.Value,
    count: ir.Value,
    build: Callable[[Body, ir.Value, ir.Value], tuple[ir.Value, list[ir.Value], ir.Value]],
    finish: Callable[[Body, list[ir.Value]], ir.Value],
    widths: Sequence[int],
    tile_rows: int | None = None,
    offset: ir.Value | None = None,
    unit: int = 1,
) -> Summary:
    """Attention over `count` rows, int64 [1], that are built a tile at a time: none of them twice, never all at once.

    q [B, H g, S, D], rotated. build(body, start, stop), int64 [1] each, gives the rows' keys [B, H, n, D], rotated,
    values [B, H or 1, n, w] of the given widths, and bool [B, n]: which a query may see. Rows come in multiples of
    `unit`; a body without tiles builds at least one unit, whether there are rows or not. finish(body, sums) makes the
    output [B, H, g S, D] of the values' weighted sums [B, H, g S, w]. tile_rows: the most rows of a tile, ROW_TILE when
    None. offset [B, H g, S, 1]: added to each product of query and key. Everything float32. A sum over tiles runs in
    the order of the rows and a tile's size depends on S alone.
    """
    h, g, d = heads.num_kv_heads, heads.group, heads.head_dim
    length = b.size(q, 2)
    query = b.Reshape(b.Mul(q, heads.scale), b.shape(0, h, b.Mul(length, [g]), d))
    if offset is not None:
        offset = b.Reshape(b.Mul(offset, heads.scale), b.shape(0, h, b.Mul(length, [g]), 1))
    size = b.Max(b.Min(b.Div([QUERY_TILE * ROW_TILE], length), [tile_rows or ROW_TILE]), [32])
    size = b.Mul(b.Div(size, [TILE_ROWS]), [TILE_ROWS])  # whole tiles, where codes are stored in tiles
    sides = b.shape(b.size(q, 0), h, b.Mul(length, [g]))

    def scored(t: Body, key: ir.Value, visible: ir.Value) -> ir.Value:
        """[B, H, g S, n]."""
        score = t.MatMul(query, t.Transpose(key, perm=[0, 1, 3, 2]))
        if offset is not None:
            score = t.Add(score, offset)
        if heads.softcap:
            score = t.Mul(t.Tanh(t.Div(score, heads.softcap)), heads.softcap)
        return t.Where(t.Unsqueeze(visible, [1, 2]), score, MASKED)

    def at_once(t: Body) -> ir.Value:
        key, values, visible = build(t, t.value([0]), t.Max(count, [unit]))
        score = scored(t, key, visible)
        most = t.ReduceMax(score, [-1])
        weight = t.Exp(t.Sub(score, most))
        total = t.ReduceSum(weight, [-1])
        sums = [t.Div(t.MatMul(weight, value), total) for value in values]
        return t.Concat(finish(t, sums), t.Add(most, t.Log(total)), axis=-1)

    def by_tiles(t: Body) -> ir.Value:
        starts = t.Mul(t.Range(0, t.Squeeze(t.Div(t.Sub(t.Add(count, size), [1]), size)), 1), size)
        inner = t.inner()
        start = ir.Value(name=f"{inner.prefix}start", type=ir.TensorType(INT64), shape=ir.Shape([]))
        most, total, *sums = carried = [
            ir.Value(name=f"{inner.prefix}c{n}", type=ir.TensorType(FLOAT), shape=ir.Shape([None] * 4))
            for n in range(2 + len(widths))
        ]
        first = inner.Unsqueeze(start, [0])
        key, values, visible = build(inner, first, inner.Min(inner.Add(first, size), count))
        score = scored(inner, key, visible)
        peak = inner.Max(most, inner.ReduceMax(score, [-1]))
        weight, keep = inner.Exp(inner.Sub(score, peak)), inner.Exp(inner.Sub(most, peak))
        renewed = [peak, inner.Add(inner.Mul(total, keep), inner.ReduceSum(weight, [-1]))]
        for before, value in zip(sums, values, strict=True):
            renewed.append(inner.Add(inner.Mul(before, keep), inner.MatMul(weight, value)))
        renewed = [inner.Reshape(x, [0, 0, 0, n]) for x, n in zip(renewed, (1, 1, *widths), strict=True)]  # ranks
        for value in renewed:
            value.type = ir.TensorType(FLOAT)
        tile = ir.Graph([*carried, start], renewed, nodes=inner.tape.nodes, name="rows")
        begin = [t.Expand(MASKED, t.shape(sides, 1))]
        begin += [t.Expand(np.float32(0), t.shape(sides, width)) for width in (1, *widths)]
        most, total, *sums = t.several("Scan", len(carried), *begin, starts, body=tile, num_scan_inputs=1)
        return t.Concat(finish(t, [t.Div(x, total) for x in sums]), t.Add(most, t.Log(total)), axis=-1)

    def nothing(t: Body) -> ir.Value:
        return t.Expand(np.append(np.zeros(d, np.float32), MASKED), t.shape(sides, d + 1))

    both = when(b, b.Squeeze(b.Greater(count, [0])), by_tiles, nothing, FLOAT) if b.tiled else at_once(b)
    both = b.Reshape(both, b.shape(0, h, g, length, d + 1))
    return Summary(b.slice(both, 0, d, -1), b.slice(both, d, d + 1, -1))


def attention(
    b: Body,
    heads: LayerSpec,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    past: ir.Value,
    new: ir.Value,
    cached: Sequence[Rows],
    summary: Summary | None = None,
) -> ir.Value:
    """Softmax attention of the new tokens over cached rows and, causally, over themselves. All float32.

    summary: what they found in further cached rows.
    q [B, H g, S, D], k and v [B, H, S, D], rotated; past and new int64 [B]. Rows s >= new[b] give 0. -> [B, H g, S, D].
    """
    h, g, d = heads.num_kv_heads, heads.group, heads.head_dim
    length = b.size(q, 2)
    queries = b.Reshape(b.Mul(q, heads.scale), b.shape(0, h, g, -1, d))

    def tile(t: Body, start: ir.Value, size: ir.Value) -> ir.Value:
        stop = t.Min(t.Add(start, size), length)
        missing = t.Sub(t.Add(start, size), stop)

        def rows_of(x: ir.Value) -> ir.Value:
            """This tile of x [B, H, g, S, n], with zeros in place of missing rows: [B, H, g, t, n]."""
            return t.Pad(t.slice(x, start, stop, 3), t.shape(0, 0, missing, 0), None, [-2, -1])

        flat = t.Reshape(rows_of(queries), t.shape(0, h, -1, d))  # [B, H, g t, D]
        row = t.Add(t.Range(0, t.Squeeze(size), 1), start)  # index of each query among the new tokens, [t]
        first = t.Max(t.Sub(start, [heads.window - 1]), [0]) if heads.window else [0]
        scores: list[ir.Value] = []
        counts: list[ir.Value] = []

        def add(score: ir.Value, mask: ir.Value) -> None:
            """score [B, H, g t, n]; mask bool, broadcastable to [B, 1, 1, t, n]."""
            score = t.Reshape(score, t.shape(0, h, g, size, -1)) if g > 1 else t.Unsqueeze(score, [2])
            if heads.softcap:
                score = t.Mul(t.Tanh(t.Div(score, heads.softcap)), heads.softcap)
            scores.append(t.Where(mask, score, MASKED))
            counts.append(t.size(score, 4))

        def dot(query: ir.Value, key: ir.Value) -> ir.Value:
            return t.MatMul(query, t.Transpose(key, perm=[0, 1, 3, 2]))  # beside its product, so that it is fused

        for rows in cached:
            mask = t.Unsqueeze(rows.visible, [1, 2, 3])  # [B, 1, 1, 1, n]
            if heads.window:
                oldest = t.Sub(t.Add(t.Unsqueeze(past, [1]), t.Unsqueeze(row, [0])), heads.window)  # [B, t]
                inside = t.Greater(t.Unsqueeze(rows.position, [1]), t.Unsqueeze(oldest, [2]))  # [B, t, n]
                mask = t.And(mask, t.Unsqueeze(inside, [1, 2]))
            add(dot(flat, rows.key), mask)
        other = t.Add(t.Range(0, t.Squeeze(t.Sub(stop, first)), 1), first)  # the new tokens this tile may see, [n]
        mask = t.LessOrEqual(t.Unsqueeze(other, [0]), t.Unsqueeze(row, [1]))  # [t, n]
        if heads.window:
            near = t.Greater(t.Unsqueeze(other, [0]), t.Unsqueeze(t.Sub(row, heads.window), [1]))
            mask = t.And(mask, near)
        add(dot(flat, t.slice(k, first, stop, 2)), mask)

        if summary is not None:
            scores.append(rows_of(summary.mass))  # counts as one more row, whose value is summary.out
        weight = t.Softmax(t.Concat(*scores, axis=-1), axis=-1)
        weight = t.Reshape(weight, t.shape(0, h, t.Mul(size, [g]), -1))  # [B, H, g t, n]
        out, offset = None, t.value([0])
        for rows, count in zip([*cached, None], counts, strict=True):
            end = t.Add(offset, count)
            mass = t.slice(weight, offset, end, 3)
            offset = end
            term = t.MatMul(mass, t.slice(v, first, stop, 2) if rows is None else rows.value)
            out = term if out is None else t.Add(out, term)
        out = t.Reshape(out, t.shape(0, h, g, size, d))
        if summary is not None:
            mass = t.Reshape(t.slice(weight, offset, t.Add(offset, [1]), 3), t.shape(0, h, g, size, 1))
            out = t.Add(out, t.Mul(mass, rows_of(summary.out)))
        return out

    stacked = tiles(b, length, QUERY_TILE, tile, FLOAT)  # [T, B, H, g, t, D]
    joined = b.Transpose(stacked, perm=[1, 2, 3, 0, 4, 5])
    out = b.Reshape(joined, b.shape(b.size(q, 0), heads.num_heads, -1, d))
    out = b.slice(out, [0], length, 2)
    return b.Where(b.Unsqueeze(new_rows(b, new, length), [1, 3]), out, np.float32(0))


def new_rows(b: Body, new: ir.Value, length: ir.Value) -> ir.Value:
    """bool [B, S]: the rows of the right-padded step that are real. new int64 [B], length int64 [1]."""
    return b.Less(b.Range(0, b.Squeeze(length), 1), b.Unsqueeze(new, [1]))


def step_positions(b: Body, past: ir.Value, length: ir.Value) -> ir.Value:
    """int64 [B, S]: the position of each new token."""
    return b.Add(b.Unsqueeze(past, [1]), b.Range(0, b.Squeeze(length), 1))


def encoded(b: Body, stored: ir.Value, geometry: Geometry) -> ir.Value:
    """Geometry.encoded on int64 values of any shape."""
    beyond = b.Max(b.Sub(stored, geometry.sinks + geometry.window), 0)
    return b.Mul(b.Div(beyond, geometry.block), geometry.block)


def ring_positions(b: Body, stored: ir.Value, sinks: int, ring: int) -> ir.Value:
    """int64 [B, sinks + ring]: the position in each exact row after `stored` int64 [B] tokens; negative when none."""
    slot = np.arange(ring, dtype=np.int64)
    last = b.Sub(b.Unsqueeze(stored, [1]), sinks + 1)  # newest position, counted from the end of the sinks
    recent = b.Sub(last, b.Mod(b.Sub(last, slot), ring))
    recent = b.Where(b.Less(recent, 0), -1, b.Add(recent, sinks))
    if not sinks:
        return recent
    first = np.arange(sinks, dtype=np.int64)[None]
    return b.Concat(b.Where(b.Less(first, b.Unsqueeze(stored, [1])), first, -1), recent, axis=1)


def exact_rows(b: Body, past: ir.Value, geometry: Geometry) -> tuple[ir.Value, ir.Value]:
    """Of the exact rows after `past` int64 [B] tokens, sinks and then ring: the position in each, int64 [B, rows], and
    whether it is read there, bool [B, rows]: it is a sink, or not encoded yet."""
    stored = b.Unsqueeze(encoded(b, past, geometry), [1])  # [B, 1]
    held = ring_positions(b, past, geometry.sinks, geometry.ring)
    tail = b.Or(b.Less(held, geometry.sinks), b.GreaterOrEqual(held, b.Add(stored, geometry.sinks)))
    return held, b.And(b.GreaterOrEqual(held, 0), tail)


def ring_source(b: Body, past: ir.Value, new: ir.Value, sinks: int, ring: int) -> ir.Value:
    """int64 [B, sinks + ring]: where each exact row comes from, as an index into old rows ++ new tokens."""
    rows = sinks + ring
    position = ring_positions(b, b.Add(past, new), sinks, ring)
    since = b.Sub(position, b.Unsqueeze(past, [1]))
    return b.Where(b.Less(since, 0), np.arange(rows, dtype=np.int64)[None], b.Add(since, rows))


def token_major(function: ir.Function, heads: LayerSpec, packed: bool) -> ir.Function:
    """A body whose first inputs are q [B, Hq, S, D], k and v [B, H, S, D] and first output [B, Hq, S, D], as one with
    q [B, S, Hq * D], k and v [B, S, H * D] and [B, S, Hq * D] in their place.

    packed: q is [B, S, (Hq + 2 H) * D], queries, keys and values side by side, and k and v are left out.
    """
    b = Body("io")
    graph, counts = function.graph, (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    inputs = named("q", "k", "v")
    rows = inputs
    if packed:
        rows = b.several("Split", 3, inputs[0], [n * heads.head_dim for n in counts], axis=-1)
    for place, (x, count) in enumerate(zip(rows, counts, strict=True)):
        split = b.Transpose(b.Reshape(x, [0, 0, count, heads.head_dim]), perm=[0, 2, 1, 3])
        graph.inputs[place].replace_all_uses_with(split)
        graph.inputs[place] = inputs[place]
    graph.insert_before(graph[0], b.tape.nodes)
    after, out = Body("oi"), graph.outputs[0]
    joined = after.Reshape(after.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, heads.num_heads * heads.head_dim])
    out.name, joined.name = "heads", out.name
    graph.extend(after.tape.nodes)
    graph.outputs[0] = joined
    return function


@dataclass(frozen=True)
class NodePlan:
    """One layer's node, as the exporter needs it.

    inputs and outputs are the op's own names, in order. states: shape of each state input (symbols as in
    `plugins.contract`) and its dtype; the output `<name>_out` is written to the same memory. function: makes the
    arithmetic of the op in an empty body, under an overload name, by heads (see `token_major`); equal `attributes` mean
    equal bodies.
    """

    heads: LayerSpec

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: dict[str, tuple[ir.DataType, tuple[int | str, ...]]]
    attributes: dict[str, int | float | str | tuple[int, ...]]
    function: Callable[[Body, str], ir.Function]

    def body(self, overload: str, packed: bool = False, tiled: bool = True) -> ir.Function:
        """The op's body. packed: q, k and v are one tensor. tiled: see `Body`."""
        return token_major(self.function(Body(tiled=tiled), overload), self.heads, packed)
