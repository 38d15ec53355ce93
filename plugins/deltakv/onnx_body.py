"""DeltaKVAttention as an ONNX function: exact sinks and window, raw references, quantised residuals between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from .. import graph
from ..graph import FLOAT, INT64, Body, NodePlan, Rows, Summary
from ..layer import LayerSpec
from .config import STEPS, DeltaKVConfig

if TYPE_CHECKING:
    from .reference import LayerCodec

OP = "DeltaKVAttention"
FAR = np.float32(3e38)  # the distance of a reference that may not be named


def tables(codec: LayerCodec) -> dict[str, np.ndarray]:
    """The op's table inputs by name: see `LayerCodec`."""
    return {name: tensor.numpy() for name, tensor in codec.tensors().items()}


def plan(
    spec: LayerSpec, config: DeltaKVConfig, state: ir.DataType, limit: int = 1 << 17, int16: bool = True
) -> NodePlan:
    """The node of one compressed layer. limit: tokens of the longest sequence, which decides how wide an index is.
    int16: whether who runs it knows int16; otherwise an index of two bytes is two int8 of the state, the low one first.

    States, each with a head axis of 1: ring, x of sinks and recent tokens; latents, int8 or (16 bits) z itself; scales;
    index; references and (8 bits) reference_scales. Code row j is position sinks + j, reference row r is code row
    r * stride, the last row of either takes the writes of padding. Zeroed rows are valid.
    """
    geometry = config.geometry()
    ordinals = geometry.sinks + geometry.references(limit)

    def rows(dtype: ir.DataType, count: int | str, width: int) -> tuple[ir.DataType, tuple[int | str, ...]]:
        return dtype, ("batch", 1, count, width)

    states = {"ring": rows(state, geometry.dense_rows, config.width)}
    if not config.scales:
        states["latents"] = rows(state, "code_rows", config.latent_dim)
    else:
        states["latents"] = rows(ir.DataType.INT8, "code_rows", config.latent_bits // 8)
        states["scales"] = rows(state, "code_rows", config.scales)
    if ordinals > 1 << 15:
        states["index"] = rows(ir.DataType.INT32, "code_rows", config.neighbors)
    elif int16:
        states["index"] = rows(ir.DataType.INT16, "code_rows", config.neighbors)
    else:
        states["index"] = rows(ir.DataType.INT8, "code_rows", 2 * config.neighbors)
    if config.reference_bits == 16:
        states["references"] = rows(state, "ref_rows", config.width)
    else:
        states["references"] = rows(ir.DataType.INT8, "ref_rows", config.width)
        states["reference_scales"] = rows(state, "ref_rows", 1)
    selection = ("selected", "select_len") if config.selects else ()
    learned = ("center", "compress", "decompress") + (("gate", "up", "down") if config.hidden else ())
    host = ("past_len", "new_len", "live", "enc_src", "enc_dst")
    inputs = ("q", "k", "v", *states, *host, *selection, "cos", "sin", *learned)
    attributes = {
        **spec.attributes(),
        "sinks": config.sinks,
        "window": config.window,
        "block": config.block,
        "stride": config.stride,
        "neighbors": config.neighbors,
        "latent_sizes": tuple(size for size, _ in config.segments),
        "latent_bits": tuple(bits for _, bits in config.segments),
        "reference_bits": config.reference_bits,
        "hidden": config.hidden,
        "selects": int(config.selects),
    }
    outputs = ("out", *(f"{name}_out" for name in states))
    dtypes = {name: dtype for name, (dtype, _) in states.items()}
    return NodePlan(
        heads=spec,
        op=OP,
        inputs=inputs,
        outputs=outputs,
        states=states,
        attributes=attributes,
        function=lambda b, overload: _Writer(spec, config, dtypes, inputs).function(
            b, overload, outputs, list(attributes)
        ),
    )


class _Writer:
    """Writes the body for one set of attributes; `x` holds the op's inputs by name, `dtypes` those of the states.

    q [B, Hq, S, D], k and v [B, H, S, D] before RoPE; states as in `plan`; past_len, new_len and select_len int32 [B];
    live int32 []; enc_src and enc_dst int32 [B, E]; selected int32 [B, M]: code rows to read, of which sequence b uses
    the first select_len[b]; cos and sin [limit, rotary_dim / 2]; tables as in `LayerCodec`. X: width of x.
    """

    def __init__(
        self, spec: LayerSpec, config: DeltaKVConfig, dtypes: dict[str, ir.DataType], inputs: tuple[str, ...]
    ) -> None:
        self.spec, self.config, self.geometry, self.dtypes = spec, config, config.geometry(), dtypes
        self.inputs = graph.named(*inputs)
        self.x = dict(zip(inputs, self.inputs, strict=True))

    def function(self, b: Body, overload: str, outputs: tuple[str, ...], attributes: list[str]) -> ir.Function:
        x, geometry, spec = self.x, self.geometry, self.spec
        past, new, length = b.cast(x["past_len"], INT64), b.cast(x["new_len"], INT64), b.size(x["q"], 2)
        position = graph.step_positions(b, past, length)
        query, key, value = (b.cast(x[name], FLOAT) for name in "qkv")
        packed = b.Concat(self.packed(b, key), self.packed(b, value), axis=-1)  # [B, 1, S, X]
        joined = b.Concat(x["ring"], b.cast(packed, self.dtypes["ring"]), axis=2)  # [B, 1, rows + S, X]

        # (a) what the new tokens see of the old state
        query, key = self.rotated(b, query, position), self.rotated(b, key, position)
        exact, compressed = self.exact(b, joined, past), self.compressed(b, query, joined, past)
        out = b.CastLike(graph.attention(b, spec, query, key, value, past, new, [exact], compressed), x["q"])

        # (b) encode what leaves the window, (c) renew the exact rows
        keep = graph.ring_source(b, past, new, geometry.sinks, geometry.ring)
        written = {"ring": graph.gather_rows(b, joined, keep, 1)}
        written |= self.encoded(b, joined, written["ring"])
        return b.function(
            OP, overload, self.inputs, [out, *(written[name] for name in self.dtypes)], outputs, attributes
        )

    # -- layout of x

    def packed(self, b: Body, x: ir.Value) -> ir.Value:
        """[B, H, N, D] -> [B, 1, N, H D]."""
        flat = b.Reshape(b.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, self.spec.num_kv_heads * self.spec.head_dim])
        return b.Unsqueeze(flat, [1])

    def heads(self, b: Body, x: ir.Value, side: int) -> ir.Value:
        """The keys (side 0) or values (1) in x [B, 1, N, X]: [B, H, N, D]."""
        h, d = self.spec.num_kv_heads, self.spec.head_dim
        part = b.slice(b.Squeeze(x, [1]), side * h * d, (side + 1) * h * d, -1)
        return b.Transpose(b.Reshape(part, [0, 0, h, d]), perm=[0, 2, 1, 3])

    def rotated(self, b: Body, x: ir.Value, position: ir.Value) -> ir.Value:
        return graph.rope(b, x, position, self.x["cos"], self.x["sin"], self.spec.rotary_dim, self.spec.head_dim)

    # -- reading

    def exact(self, b: Body, joined: ir.Value, past: ir.Value) -> Rows:
        """Sinks and recent tokens."""
        geometry = self.geometry
        held, visible = graph.exact_rows(b, past, geometry)
        rows = b.cast(b.slice(joined, 0, geometry.dense_rows, 2), FLOAT)
        key = self.rotated(b, self.heads(b, rows, 0), held)
        return Rows(key, self.heads(b, rows, 1), visible)

    def compressed(self, b: Body, query: ir.Value, joined: ir.Value, past: ir.Value) -> Summary:
        """What query [B, H g, S, D] finds in the code rows of the first `live` positions, or in those selected."""
        x, config, geometry = self.x, self.config, self.geometry
        h, d = self.spec.num_kv_heads, self.spec.head_dim
        stored = b.Unsqueeze(graph.encoded(b, past, geometry), [1])  # [B, 1]
        live = graph.encoded(b, b.Unsqueeze(b.cast(x["live"], INT64), [0]), geometry)  # [1]
        count, selected = live, None
        if config.selects:
            selected = x["selected"] if b.tiled else b.Pad(x["selected"], [0, 1], None, [-1])  # never empty
            count = b.size(x["selected"], 1)
        pool = self.pool(b, b.slice(joined, 0, geometry.sinks, 2), x, live)
        to_key = b.slice(x["decompress"], 0, h * d, 1)  # [latent_dim, H D]
        to_value = b.Reshape(b.slice(x["decompress"], h * d, 2 * h * d, 1), [0, h, d])
        to_value = b.Unsqueeze(b.Transpose(to_value, perm=[1, 0, 2]), [0])  # [1, H, latent_dim, D]

        def build(t: Body, start: ir.Value, stop: ir.Value) -> tuple[ir.Value, list[ir.Value], ir.Value]:
            names = [name for name in ("latents", "scales", "index") if name in x]
            if config.selects:
                row = t.cast(t.slice(selected, start, stop, 1), INT64)  # [B, n]
                slot = t.Range(t.Squeeze(start), t.Squeeze(stop), 1)
                visible = t.And(t.Less(row, stored), t.Less(slot, t.Unsqueeze(t.cast(x["select_len"], INT64), [1])))
                parts = {name: graph.gather_rows(t, x[name], row, 1) for name in names}
            else:
                row = t.Unsqueeze(t.Range(t.Squeeze(start), t.Squeeze(stop), 1), [0])  # [1, n]
                visible = t.Less(row, stored)
                parts = {name: t.slice(x[name], start, stop, 2) for name in names}
            z = self.dequantised(t, parts["latents"], parts.get("scales"))  # [B, 1, n, latent_dim]
            index = t.Squeeze(self.ordinals(t, parts["index"]), [1])
            if not t.tiled:  # the row that is built where there are none may be one that this step writes
                index = t.Min(index, t.Sub(t.size(pool, 2), [1]))
            mean = self.mean(t, pool, index)
            # Not z [B, 1, ...] times [1, H, ...]: where B = H, ONNX Runtime on CUDA pairs up what it should spread.
            key = t.Add(self.heads(t, t.MatMul(z, to_key), 0), self.heads(t, mean, 0))
            return self.rotated(t, key, t.Add(row, geometry.sinks)), [z, self.heads(t, mean, 1)], visible

        def finish(t: Body, sums: list[ir.Value]) -> ir.Value:
            return t.Add(t.MatMul(sums[0], to_value), sums[1])

        return graph.summarise(b, self.spec, query, count, build, finish, [config.latent_dim, d])

    def ordinals(self, b: Body, index: ir.Value) -> ir.Value:
        """Rows of the state as int64 [B, 1, n, neighbors]."""
        index = b.cast(index, INT64)
        if self.dtypes["index"] != ir.DataType.INT8:
            return index
        halves = b.Reshape(index, [0, 0, -1, self.config.neighbors, 2])
        low, high = (b.Squeeze(b.slice(halves, n, n + 1, 4), [4]) for n in (0, 1))
        return b.Add(b.Mul(high, 256), b.Where(b.Less(low, 0), b.Add(low, 256), low))

    def stored_ordinals(self, b: Body, index: ir.Value) -> ir.Value:
        """Inverse of `ordinals`, of float32 [B, 1, n, neighbors]: float32, to be cast to the state's dtype."""
        if self.dtypes["index"] != ir.DataType.INT8:
            return index
        high = b.Floor(b.Mul(index, np.float32(1 / 256)))
        low = b.Sub(index, b.Mul(high, np.float32(256)))
        low = b.Where(b.Greater(low, np.float32(127)), b.Sub(low, np.float32(256)), low)
        halves = b.Concat(b.Unsqueeze(low, [4]), b.Unsqueeze(high, [4]), axis=4)
        return b.Reshape(halves, [0, 0, 0, 2 * self.config.neighbors])

    def mean(self, b: Body, pool: ir.Value, index: ir.Value) -> ir.Value:
        """Mean of the rows of pool [B, 1, P, X] that index [B, n, neighbors] names: float32 [B, 1, n, X]."""
        named = [b.Squeeze(b.slice(index, n, n + 1, 2), [2]) for n in range(self.config.neighbors)]
        picked = [b.cast(graph.gather_rows(b, pool, n, 1), FLOAT) for n in named]
        return b.Mul(b.Sum(*picked), np.float32(1 / len(picked))) if len(picked) > 1 else picked[0]

    def pool(self, b: Body, sinks: ir.Value, states: dict[str, ir.Value], count: ir.Value) -> ir.Value:
        """The references of the first `count` code rows by their ordinals: [B, 1, sinks + ceil(count / stride), X].

        In the states' dtype, or in float32 where 8 bits had to be restored.
        """
        rows = b.Div(b.Add(count, [self.config.stride - 1]), [self.config.stride])
        references = b.slice(states["references"], [0], rows, 2)
        if self.config.reference_bits == 8:
            scale = b.cast(b.slice(states["reference_scales"], [0], rows, 2), FLOAT)
            references = b.Add(b.Mul(b.cast(references, FLOAT), scale), self.x["center"])
            sinks = b.cast(sinks, FLOAT)
        return b.Concat(sinks, references, axis=2)

    def dequantised(self, b: Body, latents: ir.Value, scales: ir.Value | None) -> ir.Value:
        """latents [B, 1, N, bytes] and scales [B, 1, N, scales] -> z [B, 1, N, latent_dim]."""
        values = b.cast(latents, FLOAT)
        if scales is None:
            return values
        scales, found, first = b.cast(scales, FLOAT), [], 0
        for number, (size, bits) in enumerate(self.config.segments):
            rest = b.slice(values, first, first + size * bits // 8, -1)
            first += size * bits // 8
            # A byte holds code - half in its highest bits, and plain codes, all positive, below: see `quantised`.
            parts, center = [], 0.5
            for low in range(8 - bits, 0, -bits):
                high = b.Floor(b.Mul(rest, np.float32(2.0**-low)))
                parts.insert(0, b.Add(high, np.float32(center)))
                rest, center = b.Sub(rest, b.Mul(high, np.float32(2.0**low))), 0.5 - (1 << (bits - 1))
            parts.insert(0, b.Add(rest, np.float32(center)))
            steps = b.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
            found.append(b.Mul(steps, b.slice(scales, number, number + 1, -1)))
        return b.Concat(*found, axis=-1) if len(found) > 1 else found[0]

    # -- writing

    def encoded(self, b: Body, joined: ir.Value, ring: ir.Value) -> dict[str, ir.Value]:
        """The states but the ring after this step; ring: the renewed one."""
        config, x = self.config, self.x
        source, target = graph.schedule(b, x["enc_src"], x["enc_dst"], graph.last_row(b, x["latents"]))
        written = self.written_references(b, joined, source, target)
        size = config.latent_bits // 8 if config.scales else config.latent_dim
        widths = {"index": config.neighbors, "latents": size} | ({"scales": config.scales} if config.scales else {})

        def rows(t: Body) -> ir.Value:
            most = t.Add(t.Unsqueeze(t.cast(x["live"], INT64), [0]), t.size(x["q"], 2))  # tokens stored after the step
            count = graph.encoded(t, most, self.geometry)  # [1]
            pool = self.pool(t, t.slice(ring, 0, self.geometry.sinks, 2), written, count)
            pool = t.cast(t.Squeeze(pool, [1]), FLOAT)
            return self.rows(t, joined, pool, source, target, sum(widths.values()))

        coded = self.where_some(b, source, sum(widths.values()), rows)
        first = 0
        for name, width in widths.items():
            part = b.slice(coded, first, first + width, 3)
            part = b.cast(self.stored_ordinals(b, part) if name == "index" else part, self.dtypes[name])
            written[name] = graph.scatter_rows(b, x[name], target, part, 1)
            first += width
        return written

    def where_some(self, b: Body, source: ir.Value, width: int, compute: Callable[[Body], ir.Value]) -> ir.Value:
        """`compute`, or float32 [B, 1, 0, width] in a step that encodes nothing, which costs nothing."""

        def nothing(t: Body) -> ir.Value:
            return t.ConstantOfShape(t.shape(t.size(source, 0), 1, 0, width), value=ir.tensor(np.zeros(1, np.float32)))

        return graph.when_some(b, b.size(source, 1), compute, nothing, FLOAT)

    def written_references(self, b: Body, joined: ir.Value, source: ir.Value, target: ir.Value) -> dict[str, ir.Value]:
        """The reference states with those among the rows to encode: code rows 0, stride, 2 stride, ..."""
        stride, x = self.config.stride, self.x
        count = b.Div(b.Add(b.size(target, 1), [stride - 1]), [stride])  # there are at most so many
        first = b.slice(target, 0, 1, 1)  # code row of the first row to encode, [B, 1]
        number = b.Add(b.Div(b.Add(first, stride - 1), stride), b.Range(0, b.Squeeze(count), 1))
        row = b.Sub(b.Mul(number, stride), first)  # [B, count]: which of the rows to encode
        row = b.Min(row, b.Sub(b.size(target, 1), [1]))
        code = b.GatherElements(target, row, axis=1)
        code_trash, trash = (b.Sub(b.size(x[name], 2), [1]) for name in ("latents", "references"))
        real = b.And(b.Equal(b.Mod(code, stride), 0), b.Less(code, code_trash))
        number = b.Where(real, b.Div(code, stride), trash)
        raw = graph.gather_rows(b, joined, b.GatherElements(source, row, axis=1), 1)
        if self.config.reference_bits == 16:
            return {"references": graph.scatter_rows(b, x["references"], number, raw, 1)}

        def quantise(t: Body) -> ir.Value:
            y = t.Sub(t.cast(raw, FLOAT), x["center"])
            scale = t.Div(t.ReduceMax(t.Abs(y), [-1]), np.float32(127))
            scale = t.cast(t.cast(scale, self.dtypes["reference_scales"]), FLOAT)
            return t.Concat(t.Clip(t.Round(divided(t, y, scale)), np.float32(-127), np.float32(127)), scale, axis=-1)

        width = self.config.width
        coded = self.where_some(b, source, width + 1, quantise)
        parts = {"references": (0, width), "reference_scales": (width, width + 1)}
        return {
            name: graph.scatter_rows(b, x[name], number, b.cast(b.slice(coded, *span, 3), self.dtypes[name]), 1)
            for name, span in parts.items()
        }

    def rows(
        self, b: Body, joined: ir.Value, pool: ir.Value, source: ir.Value, target: ir.Value, width: int
    ) -> ir.Value:
        """Index, latent and scales of the rows to encode, by tiles: float32 [B, 1, E, width].

        pool [B, P, X]: the references by their ordinals, those among the rows included.
        """
        config, sinks = self.config, self.geometry.sinks
        count, known = b.size(source, 1), b.size(pool, 1)
        source, target = (b.Pad(x, [0, graph.ENCODE_TILE], None, [-1]) for x in (source, target))
        centered = b.Sub(pool, self.x["center"])
        energy = b.Unsqueeze(b.ReduceSum(b.Mul(centered, centered), [-1], keepdims=0), [1])  # [B, 1, P]
        centered = b.Mul(b.Transpose(centered, perm=[0, 2, 1]), np.float32(-2))
        # the code row from which on each reference may be named, [1, 1, P]
        earliest = b.Unsqueeze(b.Mul(b.Sub(b.Range(0, b.Squeeze(known), 1), sinks), config.stride), [0, 1])
        pooled = b.Unsqueeze(pool, [1])

        def tile(t: Body, start: ir.Value, size: ir.Value) -> ir.Value:
            own = t.Unsqueeze(t.slice(target, start, t.Add(start, size), 1), [2])  # [B, t, 1]
            raw = graph.gather_rows(t, joined, t.slice(source, start, t.Add(start, size), 1), 1)
            x = t.cast(t.Squeeze(raw, [1]), FLOAT)  # [B, t, X]
            distance = t.Add(t.MatMul(t.Sub(x, self.x["center"]), centered), energy)
            distance = t.Where(t.LessOrEqual(earliest, own), distance, FAR)  # [B, t, P]
            index = t.several("TopK", 2, distance, [config.neighbors], largest=0)[1]  # the lower one of equals first
            itself = t.Min(t.Add(t.Div(own, config.stride), sinks), t.Sub(known, [1]))  # in bounds for padding too
            index = t.Where(t.Equal(t.Mod(own, config.stride), 0), itself, index)  # [B, t, neighbors]
            named = [t.Squeeze(t.slice(index, n, n + 1, 2), [2]) for n in range(config.neighbors)]
            picked = [t.Squeeze(graph.gather_rows(t, pooled, n, 1), [1]) for n in named]
            mean = picked[0]
            if len(picked) > 1:  # so that the mean of equal ones is exactly that
                rest = [t.Sub(p, picked[0]) for p in picked[1:]]
                mean = t.Add(mean, t.Div(t.Sum(*rest), np.float32(len(picked))))
            coded = t.Concat(t.cast(index, FLOAT), *self.quantised(t, self.residual(t, x, mean)), axis=-1)
            return t.Reshape(coded, [0, 0, width])  # a rank for Scan

        stacked = b.Transpose(graph.tiles(b, count, graph.ENCODE_TILE, tile, FLOAT), perm=[1, 0, 2, 3])
        return b.slice(b.Reshape(stacked, b.shape(b.size(pool, 0), 1, -1, width)), [0], count, 2)

    def residual(self, b: Body, x: ir.Value, mean: ir.Value) -> ir.Value:
        """f(x) - f(mean) of [B, t, X]: [B, t, latent_dim]."""
        z = b.MatMul(b.Sub(x, mean), self.x["compress"])
        if not self.config.hidden:
            return z

        def units(y: ir.Value) -> ir.Value:
            y = b.Sub(y, self.x["center"])
            gate = b.MatMul(y, self.x["gate"])
            return b.Mul(b.Mul(gate, b.Sigmoid(gate)), b.MatMul(y, self.x["up"]))

        return b.Add(z, b.MatMul(b.Sub(units(x), units(mean)), self.x["down"]))

    def quantised(self, b: Body, z: ir.Value) -> list[ir.Value]:
        """z [B, t, latent_dim] -> the numbers to store, float32: latents, and scales where there are any.

        Of a segment with 8 / bits = n codes to a byte, byte i holds codes i, i + bytes, ..., i + (n - 1) bytes, the
        first one in its lowest bits, less 128; the segments' bytes follow one another.
        """
        if not self.config.scales:
            return [z]
        found, scales, first = [], [], 0
        for size, bits in self.config.segments:
            half, count = 1 << (bits - 1), size * bits // 8
            part = b.slice(z, first, first + size, 2)
            first += size
            largest = b.Mul(b.ReduceMax(b.Abs(part), [-1]), np.float32(1 / half))
            rms = b.Sqrt(b.ReduceMean(b.Mul(part, part), [-1]))
            scale = b.Min(largest, b.Mul(rms, np.float32(STEPS[bits])))
            scale = b.cast(b.cast(scale, self.dtypes["scales"]), FLOAT)  # [B, t, 1]
            steps = b.Add(b.Floor(divided(b, part, scale)), np.float32(half))
            codes = b.Clip(steps, np.float32(0), np.float32(2 * half - 1))
            packed = b.slice(codes, 0, count, 2)
            for n in range(1, 8 // bits):
                more = b.slice(codes, n * count, (n + 1) * count, 2)
                packed = b.Add(packed, b.Mul(more, np.float32(1 << (bits * n))))
            found.append(packed)
            scales.append(scale)
        return [b.Sub(b.Concat(*found, axis=-1), np.float32(128)), b.Concat(*scales, axis=-1)]


def divided(b: Body, x: ir.Value, scale: ir.Value) -> ir.Value:
    """x / scale, 0 where the scale is 0."""
    some = b.Greater(scale, np.float32(0))
    return b.Where(some, b.Div(x, b.Where(some, scale, np.float32(1))), np.float32(0))
