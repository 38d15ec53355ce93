"""DenseAttention's kernels, and what all ops' steps share, on the emulator against the float32 references."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int, c_int64, c_void_p

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from plugins.attention import attend
from plugins.dense import onnx_body
from plugins.dense.reference import LayerCache, turn
from plugins.geometry import Geometry
from plugins.layer import LayerSpec
from plugins.native.abi import Dense, Library, NativeError, Step
from plugins.native.abi import Geometry as NativeGeometry
from plugins.native.layer import NativeLayer
from tests import native

LIMIT = 1024  # rows of the RoPE tables
BAR = {torch.float16: 5e-3, torch.bfloat16: 1e-2}
KINDS = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}


@pytest.fixture(scope="module")
def library() -> Library:
    return native.emulated()


def spec(head_dim: int, heads: int, group: int, softcap: float = 0.0, window: int = 0, rotary: int = -1) -> LayerSpec:
    """rotary: dimensions that turn, all of them when negative."""
    rotary = head_dim if rotary < 0 else rotary
    scale = 1.5 * head_dim**-0.5
    return LayerSpec(0, heads * group, heads, head_dim, scale, softcap, window, 0 if rotary else None, rotary)


def tables(layer: LayerSpec) -> tuple[Tensor, Tensor] | None:
    """cos and sin [LIMIT, rotary_dim / 2]."""
    if not layer.rotary_dim:
        return None
    rate = 1000.0 ** -(torch.arange(layer.rotary_dim // 2) / (layer.rotary_dim // 2))
    angle = torch.arange(LIMIT)[:, None] * rate[None, :]
    return angle.cos(), angle.sin()


def doubled(rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """As the reference wants them: [LIMIT, rotary_dim]."""
    return None if rope is None else tuple(torch.cat((x, x), dim=1) for x in rope)


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Bench:
    """A layer on the emulator, its states NaN where nothing is stored, beside a reference cache per sequence."""

    def __init__(
        self,
        library: Library,
        layer: LayerSpec,
        dtype: torch.dtype,
        lengths: Sequence[int],
        capacity: int,
        observes: Geometry | None = None,
    ) -> None:
        self.spec, self.dtype = layer, dtype
        rope = tables(layer)
        plan = onnx_body.plan(layer, KINDS[dtype], observes)
        batch = len(lengths)
        self.layer = NativeLayer(library, plan, layer, {}, batch, capacity, observes, dtype, "cpu", rope)
        self.caches = [LayerCache(layer, doubled(rope), dtype) for _ in lengths]
        self.layer.lengths = np.asarray(lengths, np.int32)
        states = self.layer.states.values()
        for side, state in zip(("key", "value"), states, strict=True):
            state.fill_(torch.nan)
            for b, (cache, length) in enumerate(zip(self.caches, lengths, strict=True)):
                shape = (layer.num_kv_heads, length, layer.head_dim)
                rows = drawn(shape, dtype, 7 * length + len(side))  # the same wherever the sequence is
                setattr(cache, side, rows.float()[None])
                kept = torch.arange(max(0, length - layer.window) if layer.window else 0, length)
                state[b, :, kept % layer.window if layer.window else kept] = rows[:, kept]

    def step(self, new: Sequence[int], length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Outputs found and wanted [B, Hq, S, D] of a step that appends new[b] tokens; wanted padding is 0."""
        past, inputs = self.layer.lengths, []
        for heads in (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads):
            shape = (heads, length, self.spec.head_dim)
            inputs.append(torch.stack([drawn(shape, self.dtype, seed + int(n) + heads + len(inputs)) for n in past]))
        found = native.step(self.layer, *inputs, new=new)
        wanted = torch.zeros(found.shape)
        for b, count in enumerate(new):
            if count:
                wanted[b, :, :count] = self.caches[b].step(*(x[b : b + 1, :, :count].float() for x in inputs))[0]
        return found, wanted

    def check(self, new: Sequence[int], length: int, seed: int = 0) -> Tensor:
        found, wanted = self.step(new, length, seed)
        for b, count in enumerate(new):
            assert not found[b, :, count:].any()
            for s in range(count):
                assert native.relative(found[b, :, s], wanted[b, :, s]) < BAR[self.dtype], (b, s)
        self.check_states()
        return found

    def check_states(self) -> None:
        """The stored rows are the reference's, and no others were written but the trash row."""
        for side, state in zip(("key", "value"), self.layer.states.values(), strict=True):
            for b, cache in enumerate(self.caches):
                rows = getattr(cache, side)[0]
                first = max(0, rows.shape[1] - self.spec.window) if self.spec.window else 0
                kept = torch.arange(first, rows.shape[1])
                place = kept % self.spec.window if self.spec.window else kept
                assert native.relative(state[b, :, place], rows[:, kept]) < 1e-3 or not len(kept)
                empty = torch.ones(state.shape[2], dtype=torch.bool)
                empty[place] = False
                if not self.spec.window:
                    empty[-1] = False
                assert state[b, :, empty].isnan().all()


DECODE = {
    "one-head": (spec(64, 1, 1), torch.float16, (0, 1, 15, 16, 17)),
    "pieces": (spec(64, 2, 7), torch.bfloat16, (127, 128, 129, 511, 513)),
    "head-96": (spec(96, 2, 3, softcap=5.0, rotary=32), torch.float16, (63, 65, 257)),
    "head-128": (spec(128, 1, 8), torch.bfloat16, (64, 300)),
    "head-256": (spec(256, 1, 16, rotary=0), torch.bfloat16, (33, 140)),
    "group-6": (spec(64, 1, 6, softcap=20.0), torch.float16, (31, 200)),
}


@pytest.mark.parametrize("name", DECODE)
def test_a_decode_step_attends_to_all_stored_rows(library: Library, name: str) -> None:
    layer, dtype, lengths = DECODE[name]
    bench = Bench(library, layer, dtype, [*lengths, 40], capacity=640)
    bench.check([1] * len(lengths) + [0], 1)  # the last sequence has no new token
    bench.check([1] * len(lengths) + [1], 1, seed=5)


@pytest.mark.parametrize("past", [(0, 39, 40, 41), (80, 129)])
def test_a_sliding_window_forgets_what_left_it(library: Library, past: tuple[int, ...]) -> None:
    bench = Bench(library, spec(64, 2, 2, window=40), torch.float16, past, capacity=640)
    for seed in range(3):
        bench.check([1] * len(past), 1, seed)


def test_pieces_are_looped_over_where_the_batch_is_large(library: Library) -> None:
    lengths = [0] * 1030
    lengths[1], lengths[-1] = 30, 600
    bench = Bench(library, spec(64, 1, 1), torch.bfloat16, lengths, capacity=640)
    found, wanted = bench.step([1] * len(lengths), 1)
    for b in (0, 1, 512, 1029):
        assert native.relative(found[b], wanted[b]) < BAR[torch.bfloat16]


def test_results_do_not_depend_on_the_batch_or_the_launch(library: Library) -> None:
    lengths, layer = (300, 17, 128, 0), spec(64, 2, 3, softcap=8.0)

    def run(chosen: Iterable[int], capacity: int) -> dict[int, Tensor]:
        bench = Bench(library, layer, torch.bfloat16, list(chosen), capacity)
        return dict(zip(chosen, bench.step([1] * len(bench.caches), 1)[0], strict=True))

    together = run(lengths, 640)
    for again in (run(lengths, 640), run(lengths[::-1], 960), *(run([n], 640) for n in lengths)):
        assert all(torch.equal(out, together[n]) for n, out in again.items())


PREFILL = {
    "whole": (spec(64, 2, 3), torch.float16),
    "head-96": (spec(96, 1, 1, softcap=5.0, rotary=48), torch.bfloat16),
    "head-128": (spec(128, 1, 4), torch.bfloat16),
    "sliding": (spec(64, 1, 2, window=24), torch.float16),
}


@pytest.mark.parametrize("name", PREFILL)
def test_prompts_are_stored_and_continued(library: Library, name: str) -> None:
    layer, dtype = PREFILL[name]
    bench = Bench(library, layer, dtype, [0, 0, 0], capacity=160)
    bench.check([33, 1, 0], 33)
    bench.check([5, 20, 20], 20, seed=1)
    bench.check([1, 1, 1], 1, seed=2)


def test_an_observing_layer_chooses_the_most_attended_rows(library: Library) -> None:
    geometry = Geometry(sinks=4, window=16, block=8, select_count=12)
    layer, past = spec(64, 2, 2), (150, 90, 10)
    bench = Bench(library, layer, torch.float16, past, 320, geometry)
    before = [(c.key, c.value) for c in bench.caches]
    shape = (3, layer.num_kv_heads, 1, layer.head_dim)
    q, k, v = (drawn((3, h, *shape[2:]), torch.float16, h) for h in (layer.num_heads, *shape[1:2] * 2))
    native.step(bench.layer, q, k, v)
    for b, count in enumerate(geometry.selected(np.asarray(past))):
        cache = bench.caches[b]
        cache.key, cache.value = before[b]
        weight = cache.attention_received(q[b : b + 1].float(), k[b : b + 1].float())
        weight = weight[geometry.sinks : geometry.sinks + geometry.encoded(past[b])]
        found = bench.layer.selected[b, :count].long()
        assert len(set(found.tolist())) == count
        wanted = weight.sort(descending=True).values[:count]
        assert torch.allclose(weight[found].sort(descending=True).values, wanted, rtol=2e-3)


def test_an_observing_layer_names_all_rows_to_several_tokens(library: Library) -> None:
    geometry = Geometry(sinks=4, window=16, block=8, select_count=12)
    bench = Bench(library, spec(64, 1, 2), torch.float16, (70, 40), 320, geometry)
    bench.check([3, 2], 3)
    wanted = torch.arange(bench.layer.selected.shape[1], dtype=torch.int32)
    assert len(wanted) and torch.equal(bench.layer.selected, wanted.expand(2, -1))


def test_refusals_say_why(library: Library) -> None:
    layer = native.layer(spec(64, 2, 2), torch.float16)
    assert library.supported("dense", layer, Dense()) == ""
    layer.head_dim = 80
    assert "head_dim 80" in library.supported("dense", layer, Dense())
    layer.head_dim, layer.num_heads = 64, 34
    assert "17 query heads" in library.supported("dense", layer, Dense())
    with pytest.raises(NativeError, match="batch=0"):
        library.attention("dense", native.layer(spec(64, 2, 2), torch.float16), Step(), Dense())
    bench = Bench(library, spec(64, 1, 1), torch.float16, [3], 320)
    library_workspace, library.workspace = library.workspace, lambda *_: 256
    try:
        with pytest.raises(NativeError, match="workspace has 256 bytes"):
            bench.step([1], 1)
    finally:
        library.workspace = library_workspace


# -- what compressed layers share: the exact rows


class ExactRows(ctypes.Structure):
    """kvpack::ExactRows."""

    _fields_ = [
        *((n, c_void_p) for n in "kv"),
        *((n, c_int64) for n in ("batch_stride", "head_stride", "row_stride")),
        ("geometry", NativeGeometry),
        ("rotated", c_int),
    ]


class Decode(ctypes.Structure):
    """kvpack::Decode."""

    _fields_ = [(n, c_void_p) for n in ("query", "partial", "mass", "counter")] + [("splits", c_int)]


LAYER, STEP, EXACT = "RK12kvpack_layer", "RK11kvpack_step", "RKNS_9ExactRowsE"
SYMBOLS = {
    "decode_begin": f"_ZN6kvpack12decode_beginE{LAYER}{STEP}{EXACT}RKNS_6DecodeE",
    "restore_exact": f"_ZN6kvpack13restore_exactE{LAYER}{STEP}{EXACT}PvS9_i",
    "store_exact": f"_ZN6kvpack11store_exactE{LAYER}{STEP}{EXACT}",
}


class Ring:
    """Exact rows [B, 1, rows, 2 H D], keys beside values as DeltaKV has them, of sequences of random tokens."""

    def __init__(self, layer: LayerSpec, geometry: Geometry, dtype: torch.dtype, past: Sequence[int], rotated: bool):
        self.layer, self.geometry, self.dtype, self.past, self.rotated = layer, geometry, dtype, past, rotated
        self.rope = tables(layer)
        h, d, rows = layer.num_kv_heads, layer.head_dim, geometry.dense_rows
        self.raw = [drawn((2, h, n, d), dtype, n) for n in past]
        self.rows = torch.full((len(past), rows, 2, h, d), torch.nan, dtype=dtype)
        for b, (raw, length) in enumerate(zip(self.raw, past, strict=True)):
            self.put(b, raw, 0, length)
        numbers = NativeGeometry(geometry.sinks, geometry.window, geometry.block)
        address, side = self.rows.data_ptr(), h * d
        self.exact = ExactRows(address, address + 2 * side, rows * 2 * side, d, 2 * side, numbers, rotated)

    def keys(self, raw: Tensor, first: int = 0) -> Tensor:
        """Rotated keys [H, n, D] of [2, H, n, D], from position `first`."""
        return turn(raw[:1].float(), doubled(self.rope), first)[0]

    def put(self, b: int, raw: Tensor, first: int, length: int) -> None:
        """Tokens [2, H, n, D] from position `first` into the rows."""
        stored = raw.clone()
        if self.rotated:
            stored[0] = self.keys(raw, first).to(self.dtype)
        for n in range(length):
            self.rows[b, int(self.geometry.slot(np.asarray(first + n)))] = stored[:, :, n]

    def visible(self, b: int) -> Tensor:
        """Positions that are read from the exact rows."""
        position = torch.arange(self.past[b])
        encoded = self.geometry.encoded(self.past[b])
        return position[(position < self.geometry.sinks) | (position >= self.geometry.sinks + encoded)]


def call(library: Library, name: str, *arguments: object) -> None:
    function = getattr(library.handle, SYMBOLS[name])
    assert function(*[ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]) == 0


def step_of(ring: Ring, q: Tensor, kv: Tensor, new: Tensor) -> tuple[Step, list[Tensor]]:
    """The step that appends kv [2, B, H, S, D], and what it points to."""
    past = torch.tensor(ring.past, dtype=torch.int32)
    step = Step(batch=len(ring.past), length=q.shape[2], live=max(ring.past))
    q, k, v = (native.tokens_first(x) for x in (q, *kv))
    step.q_row, step.kv_row = q.shape[2], k.shape[2]
    for name, tensor in {"q": q, "k": k, "v": v, "past_len": past, "new_len": new}.items():
        setattr(step, name, tensor.data_ptr())
    if ring.rope:
        step.cos, step.sin = (x.data_ptr() for x in ring.rope)
        step.rope_rows = LIMIT
    return step, [past, q, k, v, new, *(ring.rope or ())]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("head_dim", "group", "dtype"), [(64, 7, torch.float16), (128, 2, torch.bfloat16)])
def test_a_decode_step_begins_with_the_exact_rows(library, head_dim: int, group: int, dtype, rotated: bool) -> None:
    past = (0, 3, 36, 37, 100, 50)
    layer = spec(head_dim, 2, group, softcap=10.0 if rotated else 0.0, rotary=head_dim // 2)
    ring = Ring(layer, Geometry(4, 32, 8), dtype, past, rotated)
    batch, heads, d, splits = len(past), layer.num_heads, head_dim, 3
    q, kv = drawn((batch, heads, 1, d), dtype, 1), drawn((2, batch, 2, 1, d), dtype, 2)
    new = torch.tensor([1] * 5 + [0], dtype=torch.int32)
    step, keep = step_of(ring, q, kv, new)
    query, partial = torch.full_like(q, torch.nan), torch.full((batch, heads, splits + 1, d), torch.nan)
    mass, counter = torch.full((batch, heads, splits + 1, 2), torch.nan), torch.full((batch, 2), 9, dtype=torch.int32)
    decode = Decode(*(x.data_ptr() for x in (query, partial, mass, counter)), splits)
    before = ring.rows.clone()
    call(library, "decode_begin", native.layer(layer, dtype), step, ring.exact, decode)
    assert keep and not counter.any() and partial[:, :, :splits].isnan().all()
    for b in range(5):
        turned = turn(q[b : b + 1].float(), doubled(ring.rope), past[b])
        assert native.relative(query[b], turned[0]) < 4e-3
        raw = torch.cat((ring.raw[b], kv[:, b]), dim=2)
        chosen = torch.cat((ring.visible(b), torch.tensor([past[b]])))
        key, value = ring.keys(raw)[:, chosen], raw[1].float()[:, chosen]
        mask = torch.ones(1, len(chosen), dtype=torch.bool)
        wanted = attend(turned, key[None], value[None], mask, layer.scale, layer.softcap)[0, :, 0]
        assert native.relative(partial[b, :, splits] / mass[b, :, splits, 1:], wanted) < BAR[dtype]
        score = (turned[0] @ key.repeat_interleave(group, 0).transpose(1, 2)) * layer.scale
        if layer.softcap:
            score = layer.softcap * torch.tanh(score / layer.softcap)
        found = mass[b, :, splits, 0] + mass[b, :, splits, 1].log2()
        assert torch.allclose(found, score[:, 0].logsumexp(-1) * 1.442695, atol=0.05)
    assert not mass[5, :, splits, 1].any()
    found, ring.rows = ring.rows, before
    for b in range(5):
        ring.put(b, kv[:, b], past[b], 1)
    assert torch.allclose(found.float(), ring.rows.float(), rtol=1e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("rotated", [False, True])
def test_exact_rows_are_restored_for_and_stored_after_a_prompt(library: Library, rotated: bool) -> None:
    past, new, length, dtype = (0, 3, 60, 101), (60, 20, 5, 0), 60, torch.float16
    layer, geometry = spec(64, 2, 1, rotary=32), Geometry(4, 16, 8)
    ring = Ring(layer, geometry, dtype, past, rotated)
    kv = drawn((2, 4, 2, length, 64), dtype, 3)
    q = torch.zeros(4, 2, length, 64, dtype=dtype)
    step, keep = step_of(ring, q, kv, torch.tensor(new, dtype=torch.int32))
    rows = max(past) + length
    dense = torch.full((2, 4, 2, rows, 64), torch.nan, dtype=dtype)
    arguments = native.layer(layer, dtype), step, ring.exact
    call(library, "restore_exact", *arguments, *(c_void_p(x.data_ptr()) for x in dense), c_int(rows))
    for b in range(4):
        raw = torch.cat((ring.raw[b], kv[:, b, :, : new[b]]), dim=2)
        shown = torch.cat((ring.visible(b), torch.arange(past[b], past[b] + new[b])))
        assert native.relative(dense[0, b, :, shown], ring.keys(raw)[:, shown]) < 1e-3
        assert torch.equal(dense[1, b, :, shown], raw[1][:, shown])
        hidden = torch.ones(rows, dtype=torch.bool)
        hidden[shown] = False
        assert dense[:, b, :, hidden].isnan().all()
    wanted = ring.rows.clone()
    found, ring.rows = ring.rows, wanted
    for b in range(4):
        ring.put(b, kv[:, b], past[b], new[b])
    call(library, "store_exact", *arguments)
    assert keep and torch.allclose(found.float(), wanted.float(), rtol=2e-3, atol=1e-3, equal_nan=True)
