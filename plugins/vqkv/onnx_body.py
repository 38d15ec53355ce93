"""VQKVAttention as an ONNX function: exact sinks and window, vector-quantised codes for everything between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from .. import graph
from ..contract import TILE_ROWS
from ..graph import FLOAT, INT32, INT64, Body, NodePlan, Rows
from ..layer import LayerSpec
from .config import VQKVConfig
from .layout import permutation

if TYPE_CHECKING:
    from .reference import LayerCodec

OP = "VQKVAttention"
TABLES = ("books", "encode", "decode", "mean")
SIDE_ATTRIBUTES = ("groups", "stages", "entries")
INPUTS = (
    *("q", "k", "v", "ring_k", "ring_v", "codes_k", "codes_v"),
    *("past_len", "new_len", "live", "enc_src", "enc_dst", "cos", "sin"),
    *(f"k_{t}" for t in TABLES),
    *(f"v_{t}" for t in TABLES),
)
# An int8 carrier holds code - entries / 2 (code - 128 for byte codes), so that a zeroed row is a valid one.
OUTPUTS = ("out", "ring_k_out", "ring_v_out", "codes_k_out", "codes_v_out")


class Quantiser:
    """One side's tables inside a body. books [T, L, entries, d]; encode, decode [T, D, D]; mean [H, D]."""

    def __init__(
        self,
        b: Body,
        inputs: Sequence[ir.Value],
        spec: LayerSpec,
        groups: int,
        stages: tuple[int, ...],
        entries: int,
        tables: str,
    ) -> None:
        self.books, self.encode_matrix, self.decode_matrix, self.mean = (b.cast(t, FLOAT) for t in inputs)
        self.spec, self.groups, self.stages, self.entries = spec, groups, stages, entries
        self.dim, self.lookups = spec.head_dim // groups, sum(stages)
        self.sets = spec.num_kv_heads if tables == "head" else 1

    def _offsets(self, first: int, count: int, zero: int = 0) -> np.ndarray:
        """Added to a code, gives its row in the flattened books: int64 [T, 1, count]."""
        table = np.arange(self.sets, dtype=np.int64)[:, None, None] * self.lookups
        return (table + first + np.arange(count, dtype=np.int64)) * self.entries + zero

    def decode(self, b: Body, codes: ir.Value) -> ir.Value:
        """codes int8 [B, H, N, L] -> [B, H, N, D] in the codec's space: the sum of the codewords."""
        offsets = self._offsets(0, self.lookups, self.entries // 2).astype(np.int32)
        index = b.Add(b.cast(codes, INT32), offsets)
        flat = b.Reshape(self.books, [-1, self.dim])
        total, first = None, 0
        for count in self.stages:
            part = b.Gather(flat, b.slice(index, first, first + count, 3))  # [B, H, N, count, d]
            width = count * self.dim
            part = b.Reshape(part, [0, 0, -1, width])
            first += count
            if total is None:
                total, covered = part, width
                continue
            if width < covered:
                head = b.Add(b.slice(total, 0, width, -1), part)
                total = b.Concat(head, b.slice(total, width, covered, -1), axis=-1)
            else:
                total = b.Add(total, part)
        if covered < self.spec.head_dim:
            total = b.Pad(total, [0, self.spec.head_dim - covered], None, [-1])
        return total

    def vectors(self, b: Body, x: ir.Value) -> ir.Value:
        """x [B, H, N, D] in the codec's space -> the vectors themselves."""
        return b.Add(b.MatMul(x, self.decode_matrix), b.Unsqueeze(self.mean, [1]))

    def query(self, b: Body, q: ir.Value) -> tuple[ir.Value, ir.Value]:
        """q [B, H g, S, D] -> q' of that shape and c [B, H g, S, 1]: q . vectors(x) = q' . x + c."""
        flat = b.Reshape(q, [0, self.spec.num_kv_heads, -1, self.spec.head_dim])
        coded = b.MatMul(flat, b.Transpose(self.decode_matrix, perm=[0, 2, 1]))
        constant = b.MatMul(flat, b.Unsqueeze(self.mean, [2]))
        return b.Reshape(coded, b.Shape(q)), b.Reshape(constant, [0, self.spec.num_heads, -1, 1])

    def encode(self, b: Body, rows: ir.Value) -> ir.Value:
        """rows float32 [B, H, E, D] -> codes int8 [B, H, E, L]. A step without rows costs nothing."""

        def nothing(t: Body) -> ir.Value:
            shape = t.shape(t.size(rows, 0), self.spec.num_kv_heads, 0, self.lookups)
            return t.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, np.int8)))

        return graph.when_some(b, b.size(rows, 2), lambda t: self._encode(t, rows), nothing, ir.DataType.INT8)

    def _encode(self, b: Body, rows: ir.Value) -> ir.Value:
        """`encode` for at least one row, by tiles of rows."""
        count = b.size(rows, 2)
        norms = b.Unsqueeze(b.ReduceSum(b.Mul(self.books, self.books), [-1], keepdims=0), [2])  # [T, L, 1, entries]
        books = b.Transpose(self.books, perm=[0, 1, 3, 2])  # [T, L, d, entries]
        flat = b.Reshape(self.books, [-1, self.dim])
        padded = b.Pad(rows, [0, 0, graph.ENCODE_TILE, 0], None, [-2, -1])

        def tile(t: Body, start: ir.Value, size: ir.Value) -> ir.Value:
            x = t.slice(padded, start, t.Add(start, size), 2)
            y = t.MatMul(t.Sub(x, t.Unsqueeze(self.mean, [1])), self.encode_matrix)
            residual = t.Transpose(t.Reshape(y, [0, 0, -1, self.groups, self.dim]), perm=[0, 1, 3, 2, 4])
            codes, first = [], 0
            for stage, width in enumerate(self.stages):
                if width < (self.stages[stage - 1] if stage else self.groups):
                    residual = t.slice(residual, 0, width, 2)
                book, norm = (t.slice(z, first, first + width, 1) for z in (books, norms))
                distance = t.Sub(norm, t.Mul(t.MatMul(residual, book), np.float32(2)))  # [B, H, G, t, entries]
                code = t.ArgMin(distance, axis=-1, keepdims=0)  # [B, H, G, t]
                codes.append(code)
                if stage + 1 < len(self.stages):
                    offsets = self._offsets(first, width).transpose(0, 2, 1)  # [T, G, 1]
                    residual = t.Sub(residual, t.Gather(flat, t.Add(code, offsets)))
                first += width
            joined = t.Transpose(t.Concat(*codes, axis=2), perm=[0, 1, 3, 2])  # [B, H, t, L]
            return t.cast(t.Sub(joined, self.entries // 2), ir.DataType.INT8)

        stacked = b.Transpose(graph.tiles(b, count, graph.ENCODE_TILE, tile, ir.DataType.INT8), perm=[1, 2, 0, 3, 4])
        codes = b.Reshape(stacked, b.shape(b.size(rows, 0), self.spec.num_kv_heads, -1, self.lookups))
        return b.slice(codes, [0], count, 2)


@dataclass(frozen=True)
class Codes:
    """Where one side's codes lie in its state, int8: rows [B, heads, code_rows, lookups], or tiles of them
    [B, heads, code_tiles, TILE_ROWS * lookups] in the order of `plugins.vqkv.layout`."""

    heads: int
    lookups: int
    layout: str
    side: str

    @property
    def unit(self) -> int:
        """Rows that are read and written together."""
        return TILE_ROWS if self.layout == "tiles" else 1

    def read(self, b: Body, state: ir.Value, start: ir.Value, stop: ir.Value) -> ir.Value:
        """Code rows start to stop, int64 [1], whole tiles: [B, heads, n, lookups]."""
        if self.layout == "plain":
            return b.slice(state, start, stop, 2)
        tiles = b.slice(state, b.Div(start, [TILE_ROWS]), b.Div(stop, [TILE_ROWS]), 2)
        rows = b.Gather(tiles, np.argsort(permutation(self.side, self.lookups)), axis=3)
        return b.Reshape(rows, [0, 0, -1, self.lookups])

    def write(self, b: Body, state: ir.Value, row: ir.Value, codes: ir.Value) -> ir.Value:
        """The state with codes [B, heads, E, lookups] at code rows `row` int64 [B, E]."""
        if self.layout == "plain":
            return graph.scatter_rows(b, state, row, codes, self.heads)
        width, count = TILE_ROWS * self.lookups, b.Div(b.size(codes, 2), [TILE_ROWS])
        tiles = b.Reshape(codes, b.shape(b.size(codes, 0), self.heads, count, width), allowzero=1)
        tiles = b.Gather(tiles, permutation(self.side, self.lookups), axis=3)
        first = b.Slice(row, [0], [np.iinfo(np.int64).max], [1], [TILE_ROWS])
        return graph.scatter_rows(b, state, b.Div(first, TILE_ROWS), tiles, self.heads)


def tables(codec: LayerCodec) -> dict[str, np.ndarray]:
    """The op's table inputs by name."""
    return {name.replace(".", "_"): tensor.numpy() for name, tensor in codec.tensors().items()}


def plan(spec: LayerSpec, config: VQKVConfig, state: ir.DataType, limit: int = 0, int16: bool = True) -> NodePlan:
    """The node of one compressed layer. The longest sequence's tokens, limit, and int16 change nothing here."""
    geometry = config.geometry()
    ring = (state, ("batch", spec.num_kv_heads, geometry.dense_rows, spec.head_dim))
    unit = ("code_tiles", TILE_ROWS) if config.layout == "tiles" else ("code_rows", 1)
    codes = [(ir.DataType.INT8, ("batch", spec.num_kv_heads, unit[0], unit[1] * config.lookups(side))) for side in "kv"]
    return NodePlan(
        heads=spec,
        op=OP,
        inputs=INPUTS,
        outputs=OUTPUTS,
        states={"ring_k": ring, "ring_v": ring, "codes_k": codes[0], "codes_v": codes[1]},
        attributes={
            **spec.attributes(),
            "sinks": config.sinks,
            "window": config.window,
            "block": config.block,
            "key_space": config.key_space,
            "layout": config.layout,
            "sets": spec.num_kv_heads if config.tables == "head" else 1,
            **{f"{side}_{name}": getattr(config, f"{side}_{name}") for side in "kv" for name in SIDE_ATTRIBUTES},
        },
        function=lambda b, overload: function(b, spec, config, state, overload),
    )


def function(b: Body, spec: LayerSpec, config: VQKVConfig, state: ir.DataType, overload: str) -> ir.Function:
    """Writes the body for one set of attributes.

    q [B, Hq, S, D], k and v [B, H, S, D] before RoPE; ring_k (in the codec's key space) and ring_v
    [B, H, sinks + ring, D]; codes int8 as in `Codes`; past_len and new_len int32 [B]; live int32 [];
    enc_src and enc_dst int32 [B, E]; cos and sin [limit, rotary_dim / 2]; tables as in `Quantiser`.
    """
    geometry, pre_rope = config.geometry(), config.key_space == "pre_rope"
    inputs = graph.named(*INPUTS)
    q, k, v, ring_k, ring_v, codes_k, codes_v, past_len, new_len, live, enc_src, enc_dst, cos, sin = inputs[:14]
    sides = [
        Quantiser(b, inputs[14:18], spec, config.k_groups, config.k_stages, config.k_entries, config.tables),
        Quantiser(b, inputs[18:22], spec, config.v_groups, config.v_stages, config.v_entries, config.tables),
    ]
    stores = [Codes(spec.num_kv_heads, config.lookups(side), config.layout, side) for side in "kv"]
    kv, rows = spec.num_kv_heads, geometry.dense_rows
    past, new, length = b.cast(past_len, INT64), b.cast(new_len, INT64), b.size(q, 2)

    def rotated(b: Body, x: ir.Value, position: ir.Value) -> ir.Value:
        return graph.rope(b, x, position, cos, sin, spec.rotary_dim, spec.head_dim)

    position = graph.step_positions(b, past, length)
    query, raw_key, value = (b.cast(x, FLOAT) for x in (q, k, v))
    query, key = rotated(b, query, position), rotated(b, raw_key, position)
    fresh = [b.cast(x, state) for x in (raw_key if pre_rope else key, value)]
    joined = [b.Concat(r, f, axis=2) for r, f in zip((ring_k, ring_v), fresh, strict=True)]  # [B, H, rows + S, D]

    # (a) what the new tokens see of the old state
    stored = b.Unsqueeze(graph.encoded(b, past, geometry), [1])  # [B, 1]
    held, visible = graph.exact_rows(b, past, geometry)
    exact = [b.cast(b.slice(x, 0, rows, 2), FLOAT) for x in joined]
    seen = Rows(rotated(b, exact[0], held) if pre_rope else exact[0], exact[1], visible)
    count = graph.encoded(b, b.Unsqueeze(b.cast(live, INT64), [0]), geometry)  # [1]

    def build(t: Body, start: ir.Value, stop: ir.Value) -> tuple[ir.Value, list[ir.Value], ir.Value]:
        row = t.Unsqueeze(t.Range(t.Squeeze(start), t.Squeeze(stop), 1), [0])  # [1, n]
        coded_k, coded_v = (codes.read(t, x, start, stop) for codes, x in zip(stores, (codes_k, codes_v), strict=True))
        keys = sides[0].decode(t, coded_k)
        if pre_rope:
            keys = rotated(t, sides[0].vectors(t, keys), t.Add(row, geometry.sinks))
        return keys, [sides[1].decode(t, coded_v)], t.Less(row, stored)

    def finish(t: Body, sums: list[ir.Value]) -> ir.Value:
        return sides[1].vectors(t, sums[0])

    asked, offset = (query, None) if pre_rope else sides[0].query(b, query)
    found = graph.summarise(b, spec, asked, count, build, finish, [spec.head_dim], offset=offset, unit=stores[0].unit)
    out = b.CastLike(graph.attention(b, spec, query, key, value, past, new, [seen], found), q)

    # (b) encode what leaves the window, (c) renew the exact rows
    trash = b.Mul(graph.last_row(b, codes_k), stores[0].unit)
    source, target = graph.schedule(b, enc_src, enc_dst, trash, stores[0].unit)
    code_states = [
        codes.write(b, old, target, side.encode(b, b.cast(graph.gather_rows(b, x, source, kv), FLOAT)))
        for codes, old, x, side in zip(stores, (codes_k, codes_v), joined, sides, strict=True)
    ]
    keep = graph.ring_source(b, past, new, geometry.sinks, geometry.ring)
    rings = [graph.gather_rows(b, x, keep, kv) for x in joined]
    return b.function(
        OP, overload, inputs, [out, *rings, *code_states], OUTPUTS, list(plan(spec, config, state).attributes)
    )
