"""IntKVAttention as an ONNX function: exact sinks and window, integer codes with scales and zeros between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from .. import graph
from ..graph import FLOAT, INT64, Body, NodePlan, Rows
from ..layer import LayerSpec
from .config import IntKVConfig, hadamard

if TYPE_CHECKING:
    from .reference import LayerCodec

OP = "IntKVAttention"
PARTS = ("codes", "scales", "zeros")
HOST = ("past_len", "new_len", "live", "enc_src", "enc_dst", "cos", "sin")


def tables(codec: LayerCodec) -> dict[str, np.ndarray]:
    """The op's table inputs by name."""
    return {"center": codec.center.numpy()} if codec.config.mean else {}


def plan(spec: LayerSpec, config: IntKVConfig, state: ir.DataType, limit: int = 0, int16: bool = True) -> NodePlan:
    """The node of one compressed layer. The longest sequence's tokens, limit, and int16 change nothing here.

    States: ring_k (in the key space) and ring_v, exact; and for either side codes, as bytes (see
    `plugins.intkv.reference.unpacked`), scales and zeros, which have a row per block where keys share them along
    tokens. Zeroed rows are valid.
    """
    geometry, heads = config.geometry(), spec.num_kv_heads
    ring = (state, ("batch", heads, geometry.dense_rows, spec.head_dim))
    states: dict[str, tuple[ir.DataType, tuple[int | str, ...]]] = {"ring_k": ring, "ring_v": ring}
    for name in "kv":
        side = config.side(name)
        codes = ("batch", heads, "code_rows", spec.head_dim * side.bits // 8)
        scales = ("batch", heads, "code_rows" if side.tokens == 1 else "ref_rows", side.scales)
        states |= {f"codes_{name}": (ir.DataType.INT8, codes)}
        states |= {f"scales_{name}": (state, scales), f"zeros_{name}": (state, scales)}
    inputs = ("q", "k", "v", *states, *HOST, *(("center",) if config.mean else ()))
    outputs = ("out", *(f"{name}_out" for name in states))
    attributes = {
        **spec.attributes(),
        "sinks": config.sinks,
        "window": config.window,
        "block": config.block,
        "key_space": config.key_space,
        "k_bits": config.k_bits,
        "v_bits": config.v_bits,
        "k_axis": config.k_axis,
        "group": config.group,
        "rotation": int(config.rotation),
        "mean": int(config.mean),
    }
    return NodePlan(
        heads=spec,
        op=OP,
        inputs=inputs,
        outputs=outputs,
        states=states,
        attributes=attributes,
        function=lambda b, overload: function(b, spec, config, state, overload),
    )


class Store:
    """One side's codes inside a body. center [1, H, 1, D] and matrix [D, D] are None where there is none."""

    def __init__(
        self,
        spec: LayerSpec,
        config: IntKVConfig,
        state: ir.DataType,
        name: str,
        center: ir.Value | None,
        matrix: ir.Value | None,
    ) -> None:
        self.heads, self.dim, self.side = spec.num_kv_heads, spec.head_dim, config.side(name)
        self.state, self.center, self.matrix = state, center, matrix
        self.size = 3 if self.side.bits == 3 else 1  # bytes of a word of codes
        self.words = self.dim * self.side.bits // (8 * self.size)
        self.width = self.words * self.size  # bytes of a row
        self.most = np.float32(2**self.side.bits - 1)
        self.axis = 4 if self.side.tokens == 1 else 3  # of `shared`

    # -- reading

    def quantised(self, b: Body, states: list[ir.Value], start: ir.Value, stop: ir.Value) -> ir.Value:
        """Code rows start to stop as they are before `restored`, [B, H, n, D]; states: codes, scales and zeros."""
        codes = self.unpacked(b, b.slice(states[0], start, stop, 2))
        if self.side.tokens > 1:
            block = b.Div(b.Range(b.Squeeze(start), b.Squeeze(stop), 1), self.side.tokens)
            scales, zeros = (b.cast(b.Gather(x, block, axis=2), FLOAT) for x in states[1:])
            return b.Add(b.Mul(codes, scales), zeros)
        scales, zeros = (b.cast(b.slice(x, start, stop, 2), FLOAT) for x in states[1:])  # [B, H, n, scales]
        if self.side.scales == 1:
            return b.Add(b.Mul(codes, scales), zeros)
        y = b.Add(b.Mul(self.shared(b, codes), b.Unsqueeze(scales, [4])), b.Unsqueeze(zeros, [4]))
        return b.Reshape(y, [0, 0, 0, self.dim])

    def restored(self, b: Body, y: ir.Value) -> ir.Value:
        """y [B, H, n, D] rotated back, with the mean."""
        if self.matrix is not None:
            y = b.MatMul(y, self.matrix)  # its own inverse
        return y if self.center is None else b.Add(y, self.center)

    def unpacked(self, b: Body, carrier: ir.Value) -> ir.Value:
        """int8 [B, H, n, width] -> codes, float32 [B, H, n, D]."""
        word = b.Add(b.cast(carrier, FLOAT), np.float32(128))
        if self.size > 1:
            planes = [b.slice(word, n * self.words, (n + 1) * self.words, 3) for n in range(self.size)]
            word = b.Sum(*(b.Mul(plane, np.float32(256**n)) for n, plane in enumerate(planes)))
        parts = []
        for low in range(8 * self.size - self.side.bits, 0, -self.side.bits):
            part = b.Floor(b.Mul(word, np.float32(2.0**-low)))
            word = b.Sub(word, b.Mul(part, np.float32(2.0**low)))
            parts.insert(0, part)
        return b.Concat(word, *parts, axis=-1) if parts else word

    # -- writing

    def encoded(self, b: Body, joined: ir.Value, source: ir.Value) -> list[ir.Value]:
        """Rows source [B, E] of joined [B, H, N, D] as codes [B, H, E, width], scales and zeros, in their dtypes.

        A step without rows costs nothing.
        """
        side, count = self.side, b.size(source, 1)
        width = side.tokens * self.width + 2 * side.scales  # of the tokens that share scales

        def nothing(t: Body) -> ir.Value:
            shape = t.shape(t.size(source, 0), self.heads, 0, width)
            return t.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, np.float32)))

        units = graph.when_some(b, count, lambda t: self._units(t, joined, source, width), nothing, FLOAT)
        codes, scales, zeros = (
            b.slice(units, first, last, 3)
            for first, last in (
                (0, width - 2 * side.scales),
                (width - 2 * side.scales, width - side.scales),
                (width - side.scales, width),
            )
        )
        codes = b.Reshape(codes, b.shape(b.size(source, 0), self.heads, count, self.width), allowzero=1)
        return [b.cast(codes, ir.DataType.INT8), b.cast(scales, self.state), b.cast(zeros, self.state)]

    def _units(self, b: Body, joined: ir.Value, source: ir.Value, width: int) -> ir.Value:
        """For every `tokens` rows their codes' bytes, scales and zeros: float32 [B, H, E / tokens, width], E > 0."""
        tokens, count = self.side.tokens, b.size(source, 1)
        tile_rows = tokens * max(1, graph.ENCODE_TILE // tokens)
        padded = b.Pad(source, [0, tile_rows], None, [-1])

        def tile(t: Body, start: ir.Value, size: ir.Value) -> ir.Value:
            index = t.slice(padded, start, t.Add(start, size), 1)
            y = t.cast(graph.gather_rows(t, joined, index, self.heads), FLOAT)
            if self.center is not None:
                y = t.Sub(y, self.center)
            if self.matrix is not None:
                y = t.MatMul(y, self.matrix)
            y = self.shared(t, y)
            low = t.ReduceMin(y, [self.axis])
            scale = t.Div(t.Sub(t.ReduceMax(y, [self.axis]), low), self.most)
            scale, low = (t.cast(t.cast(x, self.state), FLOAT) for x in (scale, low))
            some = t.Greater(scale, np.float32(0))
            steps = t.Div(t.Sub(y, low), t.Where(some, scale, np.float32(1)))
            codes = t.Clip(t.Round(t.Where(some, steps, np.float32(0))), np.float32(0), self.most)
            codes = self.packed(t, t.Reshape(codes, t.shape(0, 0, size, self.dim)))
            codes = t.Reshape(codes, [0, 0, -1, tokens * self.width])
            scale, low = (t.Squeeze(x, [self.axis]) for x in (scale, low))
            return t.Reshape(t.Concat(codes, scale, low, axis=-1), [0, 0, 0, width])  # a rank for Scan

        stacked = b.Transpose(graph.tiles(b, count, tile_rows, tile, FLOAT), perm=[1, 2, 0, 3, 4])
        units = b.Reshape(stacked, b.shape(b.size(source, 0), self.heads, -1, width))
        return b.slice(units, [0], b.Div(count, [tokens]), 2)

    def packed(self, b: Body, codes: ir.Value) -> ir.Value:
        """Inverse of `unpacked`, float32."""
        parts = [b.slice(codes, n * self.words, (n + 1) * self.words, 3) for n in range(self.dim // self.words)]
        word = parts[0]
        for n, part in enumerate(parts[1:], start=1):
            word = b.Add(word, b.Mul(part, np.float32(1 << (self.side.bits * n))))
        planes = []
        for n in range(self.size - 1, 0, -1):
            plane = b.Floor(b.Mul(word, np.float32(256.0**-n)))
            word = b.Sub(word, b.Mul(plane, np.float32(256.0**n)))
            planes.insert(0, plane)
        return b.Sub(b.Concat(word, *planes, axis=-1) if planes else word, np.float32(128))

    def shared(self, b: Body, y: ir.Value) -> ir.Value:
        """y [B, H, n, D] as [B, H, n, scales, D / scales], or [B, H, n / tokens, tokens, D] along tokens."""
        if self.side.tokens == 1:
            return b.Reshape(y, [0, 0, 0, self.side.scales, self.dim // self.side.scales])
        return b.Reshape(y, [0, 0, -1, self.side.tokens, self.dim])


def function(b: Body, spec: LayerSpec, config: IntKVConfig, state: ir.DataType, overload: str) -> ir.Function:
    """Writes the body for one set of attributes.

    q [B, Hq, S, D], k and v [B, H, S, D] before RoPE; states as in `plan`; past_len and new_len int32 [B]; live int32
    []; enc_src and enc_dst int32 [B, E]; cos and sin [limit, rotary_dim / 2]; center as in `LayerCodec`.
    """
    node = plan(spec, config, state)
    inputs = graph.named(*node.inputs)
    x = dict(zip(node.inputs, inputs, strict=True))
    geometry, heads, pre_rope = config.geometry(), spec.num_kv_heads, config.key_space == "pre_rope"
    matrix = b.value(hadamard(spec.head_dim)) if config.rotation else None
    stores = {}
    for number, name in enumerate("kv"):
        center = b.Unsqueeze(b.slice(x["center"], number, number + 1, 0), [2]) if config.mean else None
        stores[name] = Store(spec, config, state, name, center, matrix)
    past, new, length = b.cast(x["past_len"], INT64), b.cast(x["new_len"], INT64), b.size(x["q"], 2)

    def rotated(t: Body, rows: ir.Value, position: ir.Value) -> ir.Value:
        return graph.rope(t, rows, position, x["cos"], x["sin"], spec.rotary_dim, spec.head_dim)

    position = graph.step_positions(b, past, length)
    query, raw_key, value = (b.cast(x[name], FLOAT) for name in "qkv")
    query, key = rotated(b, query, position), rotated(b, raw_key, position)
    fresh = {"k": raw_key if pre_rope else key, "v": value}
    joined = {name: b.Concat(x[f"ring_{name}"], b.cast(fresh[name], state), axis=2) for name in "kv"}

    # (a) what the new tokens see of the old state
    stored = b.Unsqueeze(graph.encoded(b, past, geometry), [1])  # [B, 1]
    held, visible = graph.exact_rows(b, past, geometry)
    exact = {name: b.cast(b.slice(joined[name], 0, geometry.dense_rows, 2), FLOAT) for name in "kv"}
    exact_key = rotated(b, exact["k"], held) if pre_rope else exact["k"]
    seen = Rows(exact_key, exact["v"], visible)
    count = graph.encoded(b, b.Unsqueeze(b.cast(x["live"], INT64), [0]), geometry)  # [1]
    states = {name: [x[f"{part}_{name}"] for part in PARTS] for name in "kv"}

    def build(t: Body, start: ir.Value, stop: ir.Value) -> tuple[ir.Value, list[ir.Value], ir.Value]:
        row = t.Unsqueeze(t.Range(t.Squeeze(start), t.Squeeze(stop), 1), [0])  # [1, n]
        coded = {name: stores[name].quantised(t, states[name], start, stop) for name in "kv"}
        keys = stores["k"].restored(t, coded["k"])
        if pre_rope:
            keys = rotated(t, keys, t.Add(row, geometry.sinks))
        return keys, [coded["v"]], t.Less(row, stored)

    def finish(t: Body, sums: list[ir.Value]) -> ir.Value:
        return stores["v"].restored(t, sums[0])  # once, for it is linear

    compressed = graph.summarise(b, spec, query, count, build, finish, [spec.head_dim])
    out = b.CastLike(graph.attention(b, spec, query, key, value, past, new, [seen], compressed), x["q"])

    # (b) encode what leaves the window, (c) renew the exact rows
    unit = max(store.side.tokens for store in stores.values())
    source, target = graph.schedule(b, x["enc_src"], x["enc_dst"], graph.last_row(b, x["codes_k"]), unit)
    keep = graph.ring_source(b, past, new, geometry.sinks, geometry.ring)
    written = {f"ring_{name}": graph.gather_rows(b, joined[name], keep, heads) for name in "kv"}
    for name in "kv":
        targets = dict.fromkeys(PARTS, target)
        if stores[name].side.tokens > 1:
            targets |= dict.fromkeys(PARTS[1:], blocks(b, target, states[name], stores[name].side.tokens))
        rows = stores[name].encoded(b, joined[name], source)
        for part, old, update in zip(PARTS, states[name], rows, strict=True):
            written[f"{part}_{name}"] = graph.scatter_rows(b, old, targets[part], update, heads)
    outputs = [out, *(written[name] for name in node.states)]
    return b.function(OP, overload, inputs, outputs, node.outputs, list(node.attributes))


def blocks(b: Body, target: ir.Value, states: list[ir.Value], tokens: int) -> ir.Value:
    """Rows int64 [B, E / tokens] that the scales of code rows `target` [B, E] are written to.

    A block's padding goes to the last row, as that of codes does.
    """
    first = b.Slice(target, [0], [np.iinfo(np.int64).max], [1], [tokens])
    trash_code, trash = (b.Sub(b.size(x, 2), [1]) for x in states[:2])
    return b.Where(b.Less(first, trash_code), b.Div(first, tokens), trash)
