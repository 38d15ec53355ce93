"""DeltaKVAttention's ONNX body and the observing layer's, run by ONNX Runtime, against the float32 references."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import ops
import pytest
import torch
from ops import (
    DIM,
    FLOAT,
    HALF,
    HEADS,
    LIMIT,
    STEPS,
    Op,
    host_feeds,
    layer,
    random_selection,
    rope_tables,
    run,
    twice,
)

from plugins.deltakv import onnx_body as deltakv
from plugins.deltakv.config import DeltaKVConfig
from plugins.deltakv.reference import LayerCache, LayerCodec, Rows, stored_rows
from plugins.dense import onnx_body as dense
from plugins.dense.reference import LayerCache as DenseCache
from plugins.layer import LayerSpec

WIDTH = 2 * HEADS * DIM
SMALL = {"head_dim": DIM, "kv_heads": HEADS, "latents": "24x4", "stride": 4, "neighbors": 2, "full_layers": (),
         "sinks": 3, "window": 5, "block": 3}  # fmt: skip
TIE = 1e-4


def random_codec(config: DeltaKVConfig, seed: int = 0) -> LayerCodec:
    generator = torch.Generator().manual_seed(seed)
    shapes = LayerCodec.shapes(config, config.kv_heads)
    tensors = {
        name: torch.randn(shape, generator=generator) * (shape[0] ** -0.5 if len(shape) > 1 else 0.5)
        for name, shape in shapes.items()
    }
    return LayerCodec.from_tensors(config, tensors)


def setup(
    config: DeltaKVConfig,
    spec: LayerSpec,
    batch: int,
    state: ir.DataType = FLOAT,
    codec: LayerCodec | None = None,
    limit: int = LIMIT,
) -> tuple[Op, list[LayerCache]]:
    codec = codec or random_codec(config)
    feeds, rope = deltakv.tables(codec), None
    if spec.rotary_dim:
        rope = rope_tables(spec.rotary_dim)
        feeds |= dict(zip(("cos", "sin"), (t.numpy() for t in rope), strict=True))
    op = Op(deltakv.plan(spec, config, state, limit), batch, feeds, config.geometry())
    dtype = torch.float16 if state == HALF else torch.float32
    return op, [LayerCache(spec, twice(rope) if rope else None, codec, dtype) for _ in range(batch)]


def rows_of(op: Op, config: DeltaKVConfig, sequence: int, count: int) -> Rows:
    """The first `count` code rows an op holds."""
    state = {
        name: torch.from_numpy(op.state[name][sequence, :, :count])
        for name in ("latents", "scales", "index")
        if name in op.state
    }
    return stored_rows(config, state)


def check_rows(op: Op, references: list[LayerCache], config: DeltaKVConfig, shares: float = 0.0) -> None:
    """Index, scales and latents are the reference's but for ties, and there are some; of all `shares` may differ."""
    for sequence, reference in enumerate(references):
        count = reference.stored.codes.shape[1]
        total, wrong, flips = reference.compare(rows_of(op, config, sequence, count), TIE)
        assert count > 0 and total > count
        assert wrong <= shares * total
        assert flips <= 0.01 * total


VARIANTS: dict[str, dict[str, Any]] = {
    "2 bits": {"latents": "24x2"},
    "4 bits": {"latents": "24x4"},
    "8 bits": {"latents": "24x8"},
    "16 bits": {"latents": "21x16"},
    "segments": {"latents": "8x8+16x4+24x2"},
    "segments of equal bits": {"latents": "8x4+16x4"},
    "8-bit references": {"reference_bits": 8},
    "swiglu": {"compressor": "swiglu", "hidden": 20},
    "three neighbors": {"neighbors": 3},
    "one neighbor, no other reference than every row": {"neighbors": 1, "stride": 1, "sinks": 1},
    "stride of a block and more": {"stride": 7},
    "block of one": {"block": 1, "sinks": 2},
    "half of the rows": {"select_fraction": 0.5, "full_layers": (0,)},
    "five rows": {"select_count": 5, "full_layers": (0,)},
    "five rows in 16 bits with 8-bit references": {
        "select_count": 5, "full_layers": (0,), "latents": "24x16", "reference_bits": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_and_stored_rows_equal_the_reference(variant: str) -> None:
    config = DeltaKVConfig(**(SMALL | VARIANTS[variant]))
    op, references = setup(config, layer(), 3)
    assert run(op, references, layer(), geometry=config.geometry()) < 2e-5
    check_rows(op, references, config)


@pytest.mark.parametrize(("group", "rotary_dim", "softcap"), [(1, 16, 5.0), (7, 0, 0.0), (3, 8, 2.0)])
def test_heads_rotation_and_softcap_follow_the_layer(group: int, rotary_dim: int, softcap: float) -> None:
    config, spec = DeltaKVConfig(**SMALL), layer(group, rotary_dim, softcap=softcap)
    op, references = setup(config, spec, 3)
    assert run(op, references, spec, geometry=config.geometry()) < 2e-5
    check_rows(op, references, config)


@pytest.mark.parametrize("variant", ["4 bits", "16 bits", "8-bit references"])
def test_half_precision_rounds_only_what_is_stored(variant: str) -> None:
    config = DeltaKVConfig(**(SMALL | VARIANTS[variant]))
    op, references = setup(config, layer(), 3, HALF)
    assert {name: x.dtype.name for name, x in op.state.items()}["ring"] == "float16"
    assert run(op, references, layer(), geometry=config.geometry()) < 5e-3
    check_rows(op, references, config, shares=1e-2)


def test_a_reference_row_names_itself_alone_and_has_no_residual() -> None:
    config = DeltaKVConfig(**(SMALL | {"neighbors": 3}))
    op, references = setup(config, layer(), 3)
    run(op, references, layer(), geometry=config.geometry())
    for sequence, reference in enumerate(references):
        count = reference.stored.codes.shape[1]
        assert count > 2 * config.stride
        own = np.arange(0, count, config.stride)
        index = op.state["index"][sequence, 0]
        assert (index[own] == (config.sinks + own // config.stride)[:, None]).all()
        assert (op.state["scales"][sequence, 0, own] == 0).all()
        kept = op.state["references"][sequence, 0, : len(own)]
        np.testing.assert_array_equal(kept, reference.rows[0, config.sinks + own].numpy())


def nearest_references(x: np.ndarray, config: DeltaKVConfig, count: int) -> list[list[int]]:
    """Ordinals of the nearest references of the first `count` code rows of x [N, X], by float64 and plain loops."""
    found = []
    for j in range(count):
        if j % config.stride == 0:
            found.append([config.sinks + j // config.stride] * config.neighbors)
            continue
        positions = [*range(config.sinks), *range(config.sinks, config.sinks + j + 1, config.stride)]
        distance = [float(((x[config.sinks + j] - x[p]) ** 2).sum()) for p in positions]
        found.append(sorted(range(len(positions)), key=lambda o: (distance[o], o))[: config.neighbors])
    return found


def feed_one(op: Op, config: DeltaKVConfig, spec: LayerSpec, x: torch.Tensor, sizes: list[int]) -> list[np.ndarray]:
    """Append x [N, X], batch 1, in steps of these sizes, reading every row; the outputs."""
    h, d = spec.num_kv_heads, spec.head_dim
    k, v = x.view(-1, 2, h, d).permute(1, 2, 0, 3)[:, None].numpy()  # [1, H, N, D] each
    q = torch.randn(1, spec.num_heads, len(x), d, generator=torch.Generator().manual_seed(9)).numpy()
    past, outs = 0, []
    for size in sizes:
        span = slice(past, past + size)
        feeds = host_feeds(np.array([past], np.int32), np.array([size], np.int32), config.geometry())
        outs.append(op.step(q=q[:, :, span], k=k[:, :, span], v=v[:, :, span], **feeds))
        past += size
    return outs


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [11, 1, 30, 2, 16]])
def test_the_nearest_earlier_references_are_named_whatever_the_chunks(sizes: list[int]) -> None:
    config = DeltaKVConfig(**(SMALL | {"neighbors": 3}))
    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(5))
    op, _ = setup(config, layer(), 1)
    feed_one(op, config, layer(), x, sizes)
    count = config.geometry().encoded(60)
    expected = nearest_references(x.double().numpy(), config, count)
    assert count == 51 and op.state["index"][0, 0, :count].tolist() == expected


def test_equal_references_are_named_from_the_lowest() -> None:
    config = DeltaKVConfig(**(SMALL | {"neighbors": 3}))
    op, _ = setup(config, layer(), 1)
    feed_one(op, config, layer(), torch.ones(60, WIDTH), [60])
    index = op.state["index"][0, 0, : config.geometry().encoded(60)]
    plain = np.arange(len(index)) % config.stride != 0
    assert (index[plain] == [0, 1, 2]).all()


def test_appending_in_chunks_of_any_size_stores_the_same() -> None:
    config = DeltaKVConfig(**(SMALL | {"latents": "24x8"}))
    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(6))
    rows = {"code_rows": config.geometry().encoded(60), "ref_rows": config.geometry().references(60)}
    states = []
    for sizes in ([60], [1] * 60, [20, 1, 1, 37, 1]):
        op, _ = setup(config, layer(), 1)
        feed_one(op, config, layer(), x, sizes)
        plan = deltakv.plan(layer(), config, FLOAT, LIMIT)
        states.append({n: op.state[n][:, :, : rows.get(shape[2], shape[2])] for n, (_, shape) in plan.states.items()})
    for other in states[1:]:
        np.testing.assert_allclose(other.pop("scales"), states[0]["scales"], rtol=1e-6)
        for name, array in other.items():
            np.testing.assert_array_equal(array, states[0][name], err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"select_fraction": 0.4, "full_layers": (0,), "reference_bits": 8}])
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(changes: dict[str, Any]) -> None:
    config, spec = DeltaKVConfig(**(SMALL | changes)), layer()
    geometry, generator = config.geometry(), torch.Generator().manual_seed(4)
    together, alone = setup(config, spec, 3)[0], setup(config, spec, 1)[0]
    past = np.zeros(3, np.int32)
    for counts in STEPS:
        if counts[2] == 0:
            continue
        new = np.array(counts, np.int32)
        q, k, v = (
            torch.randn(3, h, max(new), DIM, generator=generator).numpy() for h in (spec.num_heads, HEADS, HEADS)
        )
        feeds = host_feeds(past, new, geometry)
        single = host_feeds(past[2:], new[2:], geometry)
        if changes:
            width = int(feeds["select_width"])
            feeds["selected"] = np.tile(np.arange(width, dtype=np.int32), (3, 1))
            if max(new) == 1:
                feeds["selected"] = random_selection(feeds, geometry, generator)
            elif new[2] == 1:  # a step of several tokens for the batch reads everything
                single["select_len"], single["select_width"] = geometry.selection(past[2:], int(single["live"]), False)
            single["selected"] = feeds["selected"][2:, : int(single["select_width"])]
        outs = [
            together.step(q=q, k=k, v=v, **feeds)[2],
            alone.step(q=q[2:, :, : new[2]], k=k[2:, :, : new[2]], v=v[2:, :, : new[2]], **single)[0],
        ]
        np.testing.assert_allclose(outs[0][:, : new[2]], outs[1], atol=2e-6)
        past = past + new
    rows = geometry.encoded(int(past[2]))
    assert rows > config.stride
    for name in ("latents", "index"):
        np.testing.assert_array_equal(together.state[name][2, :, :rows], alone.state[name][0, :, :rows])


def test_an_identity_compressor_gives_dense_attention() -> None:
    config = DeltaKVConfig(**(SMALL | {"latents": f"{WIDTH}x16"}))
    spec, generator = layer(), torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    codec = LayerCodec(config, torch.randn(WIDTH, generator=generator), turn, turn.T.contiguous())
    op, _ = setup(config, spec, 3, codec=codec)
    rope = twice(rope_tables(spec.rotary_dim))
    assert run(op, [DenseCache(spec, rope) for _ in range(3)], spec, geometry=config.geometry()) < 5e-6


@pytest.mark.parametrize(("limit", "dtype"), [(32764 * 4, "int16"), (32768 * 4, "int32")])
def test_indices_are_as_wide_as_the_longest_sequence_needs(limit: int, dtype: str) -> None:
    config = DeltaKVConfig(**SMALL)
    op, references = setup(config, layer(), 3, limit=limit)
    assert op.state["index"].dtype == dtype
    assert run(op, references, layer(), geometry=config.geometry()) < 2e-5
    check_rows(op, references, config)


def test_without_int16_an_index_is_the_same_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "CAPACITY", 400)
    config, generator = DeltaKVConfig(**(SMALL | {"stride": 1})), torch.Generator().manual_seed(3)
    codec, geometry = random_codec(config), config.geometry()
    rope = dict(zip(("cos", "sin"), (t.numpy() for t in rope_tables(layer().rotary_dim)), strict=True))
    pair = [Op(deltakv.plan(layer(), config, FLOAT, 400, known), 1, deltakv.tables(codec) | rope, geometry)
            for known in (True, False)]  # fmt: skip
    past = np.zeros(1, np.int32)
    for count in (390, 1, 5):
        shapes = ((1, heads, count, DIM) for heads in (layer().num_heads, HEADS, HEADS))
        q, k, v = (torch.randn(*shape, generator=generator).numpy() for shape in shapes)
        feeds = host_feeds(past, np.array([count], np.int32), geometry)
        np.testing.assert_array_equal(*(op.step(q=q, k=k, v=v, **feeds) for op in pair))
        past += count
    wide, halves = (op.state["index"] for op in pair)
    assert halves.dtype == np.int8 and wide.max() > 256 and (wide % 256 > 127).any()
    np.testing.assert_array_equal(halves.view(np.int16), wide)
    state = {name: torch.from_numpy(pair[1].state[name][0, :, :380]) for name in ("latents", "scales", "index")}
    assert torch.equal(stored_rows(config, state).index, torch.from_numpy(wide[0, :, :380]).long())


@pytest.mark.parametrize("changes", [{"select_fraction": 0.4}, {"select_count": 4}])
@pytest.mark.parametrize(("group", "rotary_dim", "softcap"), [(3, 8, 0.0), (1, 16, 5.0), (7, 0, 0.0)])
def test_the_observer_selects_the_rows_that_get_most_attention(
    changes: dict[str, Any], group: int, rotary_dim: int, softcap: float
) -> None:
    config = DeltaKVConfig(**(SMALL | changes | {"full_layers": (0,)}))
    spec, geometry = layer(group, rotary_dim, softcap=softcap), config.geometry()
    rope = rope_tables(rotary_dim) if rotary_dim else None
    feeds = {n: t.numpy() for n, t in zip(("cos", "sin"), rope, strict=True)} if rope else {}
    op = Op(dense.plan(spec, FLOAT, geometry), 3, feeds, geometry)
    plain = Op(dense.plan(spec, FLOAT), 3, feeds)
    caches = [DenseCache(spec, twice(rope) if rope else None) for _ in range(3)]
    generator = torch.Generator().manual_seed(3)
    past, chosen = np.zeros(3, np.int32), 0
    for counts in STEPS:
        new = np.array(counts, np.int32)
        q, k, v = (torch.randn(3, h, max(new), DIM, generator=generator) for h in (spec.num_heads, HEADS, HEADS))
        host = host_feeds(past, new, geometry)
        tokens = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()}
        np.testing.assert_array_equal(op.step(**tokens, **host), plain.step(**tokens, **host))
        selected = op.extra["selected"]
        assert selected.dtype == np.int32 and selected.shape == (3, host["select_width"])
        for b, n in enumerate(new):
            if max(new) > 1:
                assert selected[b].tolist() == list(range(geometry.encoded(int(host["live"]))))
            elif n:
                score = caches[b].attention_received(q[b : b + 1], k[b : b + 1])
                score = score[geometry.sinks : geometry.sinks + geometry.encoded(int(past[b]))]
                count = int(geometry.selected(past[b : b + 1])[0])
                best = score.sort(descending=True, stable=True).indices[:count]
                assert set(selected[b, :count].tolist()) == set(best.tolist())
                chosen += count
            if n:
                caches[b].step(*(x[b : b + 1, :, :n] for x in (q, k, v)))
        past = past + new
    assert chosen > 20


def test_rows_with_equal_attention_are_selected_from_the_lowest() -> None:
    config = DeltaKVConfig(**(SMALL | {"select_count": 4, "full_layers": (0,)}))
    spec, geometry = layer(rotary_dim=0), config.geometry()
    op = Op(dense.plan(spec, FLOAT, geometry), 1, {}, geometry)
    past = 0
    for size in (40, 1):
        tokens = {n: np.ones((1, h, size, DIM), np.float32) for n, h in (("q", 6), ("k", HEADS), ("v", HEADS))}
        op.step(**tokens, **host_feeds(np.array([past], np.int32), np.array([size], np.int32), geometry))
        past += size
    assert op.extra["selected"][0, :4].tolist() == [0, 1, 2, 3]


def compared(change) -> tuple[int, int, int]:
    """What compare counts on a reference's own rows after `change` to a copy of them."""
    config = DeltaKVConfig(**SMALL)
    cache = LayerCache(layer(), twice(rope_tables(8)), random_codec(config))
    generator = torch.Generator().manual_seed(8)
    cache.step(*(torch.randn(1, h, 50, DIM, generator=generator) for h in (6, HEADS, HEADS)))
    own = cache.stored
    copy = Rows(own.codes.clone(), own.scales.clone(), own.index.clone())
    change(cache, copy)
    return cache.compare(copy, TIE)


def test_differences_of_stored_rows_are_counted_by_kind() -> None:
    rows, numbers = 42, 42 * (24 + 1 + 1)

    def swap(_: LayerCache, other: Rows) -> None:
        other.index[0, 1] = other.index[0, 1].flip(-1)

    def replace(_: LayerCache, other: Rows) -> None:
        other.index[0, 1, 0] = next(o for o in range(4) if o not in other.index[0, 1])
        other.codes[0, 1] = 0  # not looked at after another index

    def tie(cache: LayerCache, other: Rows) -> None:
        replace(cache, other)
        cache.gaps[0, 1] = 1e-5

    def code(cache: LayerCache, other: Rows) -> None:
        other.codes[0, 5, 7] = 15 - other.codes[0, 5, 7]
        cache.margins[0, 5, 7] = 0.2

    def boundary(cache: LayerCache, other: Rows) -> None:
        other.codes[0, 5, 7] += 1
        cache.margins[0, 5, 7] = 1e-4

    def scale(_: LayerCache, other: Rows) -> None:
        other.scales[0, 5] *= 1.01

    assert compared(lambda cache, other: None) == (numbers, 0, 0) and rows == 42
    assert compared(swap) == (numbers, 0, 0)
    assert compared(replace) == (numbers, 1, 0)
    assert compared(tie) == (numbers, 0, 1)
    assert compared(code) == (numbers, 1, 0)
    assert compared(boundary) == (numbers, 0, 1)
    assert compared(scale) == (numbers, 1, 0)
    with pytest.raises(ValueError, match="codes of shape"):
        compared(lambda cache, other: setattr(other, "codes", other.codes[:, :-1]))
