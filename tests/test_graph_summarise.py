"""Attention over rows that are built tile by tile, against a plain softmax over all of them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from plugins import graph
from plugins.graph import FLOAT, INT64, Body
from plugins.layer import LayerSpec

HEADS, GROUP, DIM, WIDTH = 2, 3, 8, 5
TILE = graph.ROW_TILE
BOOL = ir.DataType.BOOL
NAMES = {"q": FLOAT, "key": FLOAT, "value": FLOAT, "visible": BOOL, "count": INT64, "offset": FLOAT}


def session(softcap: float = 0.0, tile_rows: int | None = None) -> ort.InferenceSession:
    """A graph of `summarise` alone: the values are wider than the output, which a constant matrix makes of them."""
    spec = LayerSpec(0, HEADS * GROUP, HEADS, DIM, 0.5, softcap=softcap)
    b = Body()
    x = {n: ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape([None] * 4)) for n, dtype in NAMES.items()}
    x["visible"].shape, x["count"].shape = ir.Shape([None] * 2), ir.Shape([1])

    def build(t: Body, start: ir.Value, stop: ir.Value) -> tuple[ir.Value, list[ir.Value], ir.Value]:
        key, value = (t.slice(x[name], start, stop, 2) for name in ("key", "value"))
        return key, [value], t.slice(x["visible"], start, stop, 1)

    def finish(t: Body, sums: list[ir.Value]) -> ir.Value:
        return t.MatMul(sums[0], matrix())

    found = graph.summarise(b, spec, x["q"], x["count"], build, finish, [WIDTH], tile_rows, x["offset"])
    found.out.name, found.mass.name = "out", "mass"
    for value in (found.out, found.mass):
        value.type, value.shape = ir.TensorType(FLOAT), ir.Shape([None] * 5)
    opsets = {"": graph.OPSET}
    whole = ir.Graph(list(x.values()), [found.out, found.mass], nodes=b.tape.nodes, opset_imports=opsets, name="one")
    proto = ir.to_proto(ir.Model(whole, ir_version=10))
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def matrix() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((WIDTH, DIM)).astype(np.float32)


def rows(batch: int, length: int, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; rows past `count` are NaN, so that reading one shows."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    key, value = random(batch, HEADS, count + 3, DIM), random(batch, HEADS, count + 3, WIDTH)
    key[:, :, count:], value[:, :, count:] = np.nan, np.nan
    visible = rng.random((batch, count + 3)) < 0.7
    visible[:, :1] = True
    feeds = {"q": 3 * random(batch, HEADS * GROUP, length, DIM), "key": key, "value": value, "visible": visible}
    return feeds | {"count": np.array([count]), "offset": random(batch, HEADS * GROUP, length, 1)}


def expected(x: dict[str, np.ndarray], softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """In float64: out [B, H, g, S, D] and mass [B, H, g, S, 1]."""
    batch, _, length, _ = x["q"].shape
    n = int(x["count"][0])
    q, offset = (x[name].astype(np.float64).reshape(batch, HEADS, GROUP, length, -1) for name in ("q", "offset"))
    score = 0.5 * (np.einsum("bhgsd,bhnd->bhgsn", q, x["key"][:, :, :n]) + offset)
    if softcap:
        score = softcap * np.tanh(score / softcap)
    score = np.where(x["visible"][:, None, None, None, :n], score, -np.inf)
    most = score.max(-1, keepdims=True)
    weight = np.exp(score - most)
    total = weight.sum(-1, keepdims=True)
    return np.einsum("bhgsn,bhnw->bhgsw", weight / total, x["value"][:, :, :n]) @ matrix(), most + np.log(total)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("length", [1, 200])  # 200 queries take smaller tiles
@pytest.mark.parametrize("count", [1, 31, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_tiles_of_rows_give_what_one_softmax_over_them_gives(count: int, length: int, softcap: float) -> None:
    feeds = rows(2, length, count)
    out, mass = session(softcap).run(None, feeds)
    for got, want in zip((out, mass), expected(feeds, softcap), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_size_of_a_tile_changes_nothing_but_the_rounding() -> None:
    feeds = rows(2, 1, 4 * TILE + 7)
    small, large = (session(tile_rows=tile).run(None, feeds) for tile in (40, 100 * TILE))
    for one, other in zip(small, large, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_no_rows_and_rows_nobody_sees_weigh_nothing_beside_others() -> None:
    one = session()
    nothing, feeds = one.run(None, rows(1, 4, 0)), rows(1, 4, 2 * TILE + 1)
    feeds["visible"][:] = False
    for out, mass in (nothing, one.run(None, feeds)):
        assert np.isfinite(out).all() and (mass < -1e29).all()


def test_a_sequence_gets_the_same_bits_whatever_its_batch() -> None:
    feeds, one = rows(3, 1, 2 * TILE + 9), session()
    together = one.run(None, feeds)
    alone = one.run(None, {name: x if name == "count" else x[2:] for name, x in feeds.items()})
    for mine, theirs in zip(alone, together, strict=True):
        np.testing.assert_array_equal(mine[0], theirs[2])
