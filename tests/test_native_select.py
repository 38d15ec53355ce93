"""The native library's choice of code rows, on the CPU emulator, against plugins.dense.reference."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch

from plugins.dense.reference import LayerCache
from plugins.geometry import Geometry
from plugins.layer import LayerSpec
from plugins.native.abi import OK, Dense, Library, Step
from plugins.native.abi import Geometry as NativeGeometry
from tests import native
from tests.test_native_prefill import internal

GEOMETRY = Geometry(sinks=3, window=5, block=4)


@cache
def library() -> Library:
    return native.emulated()


def select(
    spec: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    past: list[int],
    count: list[int],
    width: int,
    length: int = 1,
    geometry: Geometry = GEOMETRY,
) -> torch.Tensor:
    """query [B, Hq, D] and key [B, H, rows, D], rotated -> selected int32 [B, width]."""
    selected = torch.full((len(past), width), -7, dtype=torch.int32)
    past_len, select_len = (torch.tensor(x, dtype=torch.int32) for x in (past, count))
    step = Step(batch=len(past), length=length, past_len=past_len.data_ptr())
    sizes = NativeGeometry(geometry.sinks, geometry.window, geometry.block)
    state = Dense(k=key.data_ptr(), rows=key.shape[2], geometry=sizes, select_len=select_len.data_ptr())
    state.select_width, state.selected = width, selected.data_ptr()
    arguments = [ctypes.byref(x) for x in (native.layer(spec, key.dtype), step, state)]
    needed = internal(library(), "select_scratch")
    needed.restype = ctypes.c_size_t
    scratch = torch.full((needed(*arguments) + 256,), -1, dtype=torch.int8)
    aligned = -(-scratch.data_ptr() // 256) * 256
    run = internal(library(), "select_rows")
    assert run(*arguments, ctypes.c_void_p(query.data_ptr()), ctypes.c_void_p(aligned)) == OK
    return selected


def received(spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, past: int, geometry: Geometry) -> torch.Tensor:
    """What the reference says of one sequence's code rows: float32 [encoded]. query [Hq, D], key [H, rows, D]."""
    layer = LayerCache(spec, None)
    layer.key = key[None, :, :past].float()
    most = layer.attention_received(query[None, :, None].float(), key[None, :, past : past + 1].float())
    return most[geometry.sinks : geometry.sinks + geometry.encoded(past)]


def check(
    spec: LayerSpec,
    dtype: torch.dtype,
    past: list[int],
    count: list[int],
    geometry: Geometry = GEOMETRY,
    sharpness: float = 1.0,
) -> None:
    torch.manual_seed(sum(past))
    rows, d = max(past) + 3, spec.head_dim
    query = (torch.randn(len(past), spec.num_heads, d) * sharpness).to(dtype)
    key = torch.full((len(past), spec.num_kv_heads, rows, d), torch.nan, dtype=dtype)
    for b, stored in enumerate(past):
        key[b, :, : stored + 1] = torch.randn(spec.num_kv_heads, stored + 1, d).to(dtype)
    width = max(count) + 5
    found = select(spec, query, key, past, count, width, geometry=geometry)
    for b, stored in enumerate(past):
        chosen = found[b, : count[b]].long()
        assert (chosen[1:] > chosen[:-1]).all()  # distinct, in order
        assert ((found[b] >= 0) & (found[b] < max(geometry.encoded(stored), 1))).all()
        if count[b] == 0:
            continue
        most = received(spec, query[b], key[b], stored, geometry)
        wanted = most.topk(count[b]).values
        torch.testing.assert_close(most[chosen].sort(descending=True).values, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_head_dim_and_dtype(dim: int, dtype: torch.dtype) -> None:
    check(LayerSpec(0, 2, 1, dim, dim**-0.5), dtype, [70, 33], [20, 5])


@pytest.mark.parametrize("group", [1, 6, 7, 8, 9, 16])
def test_groups(group: int) -> None:
    check(LayerSpec(0, 2 * group, 2, 64, 0.125), torch.float16, [50], [11])


def test_more_rows_than_a_chunk() -> None:
    check(LayerSpec(0, 2, 1, 64, 0.125), torch.float16, [511, 512, 513, 1100, 1031], [40, 200, 500, 300, 1020])


def test_more_rows_than_a_block_of_each_kernel() -> None:
    check(LayerSpec(0, 1, 1, 64, 0.125), torch.float16, [4500], [4100])


def test_none_and_all() -> None:
    past = [0, 7, 11, 12, 60, 60]
    check(LayerSpec(0, 1, 1, 64, 0.125), torch.float16, past, [0, 0, 0, 4, 0, GEOMETRY.encoded(60)])


def test_softcap() -> None:
    check(LayerSpec(0, 2, 1, 64, 0.125, softcap=3.0), torch.float16, [90], [30], sharpness=4)


def test_probabilities_that_vanish() -> None:
    """Rows whose probability is 0 in float32 are equal, whatever their score."""
    torch.manual_seed(1)
    spec, past = LayerSpec(0, 1, 1, 64, 1.0), 60
    direction = torch.randn(64)
    query = direction[None, None].half()
    key = (-direction * torch.linspace(3, 6, past + 1)[:, None])[None, None].half().contiguous()
    key[0, 0, [10, 40]] = direction.half()
    chosen = select(spec, query, key, [past], [4], 4)
    assert chosen.tolist() == [[0, 1, 7, 37]]


def test_the_lower_of_equal_rows_is_chosen() -> None:
    torch.manual_seed(2)
    spec, past = LayerSpec(0, 4, 2, 64, 0.125), 1500
    rows = torch.randn(2, 5, 64).half()
    order = torch.arange(past + 1) % 5
    key, query = rows[:, order][None].contiguous(), torch.randn(1, 4, 64).half()
    most = received(spec, query[0], key[0], past, GEOMETRY)
    rank = torch.sort(most[:5], descending=True, stable=True).indices
    best, second = (torch.arange(len(most))[(torch.arange(len(most)) % 5) == n] for n in rank[:2])
    for count in (1, 100, len(best), len(best) + 1, len(best) + 77):
        wanted = torch.cat((best, second))[:count].sort().values
        assert torch.equal(select(spec, query, key, [past], [count], count)[0].long(), wanted)


def test_more_equal_rows_than_are_kept_aside() -> None:
    spec, past = LayerSpec(0, 1, 1, 64, 0.125), 9000
    key = torch.zeros(1, 1, past + 1, 64).half()
    query = torch.ones(1, 1, 64).half()
    better = torch.tensor([5, 4000, 8900])
    key[0, 0, better + GEOMETRY.sinks] = 0.5
    chosen = select(spec, query, key, [past], [4321], 4321)
    assert torch.equal(chosen[0].long(), torch.cat((torch.arange(4320), better[2:])))


def test_a_sequence_is_chosen_for_alike_in_any_batch() -> None:
    torch.manual_seed(3)
    spec, past, count = LayerSpec(0, 2, 1, 64, 0.125), [700, 90, 1300], [100, 10, 333]
    query, key = torch.randn(3, 2, 64).half(), torch.randn(3, 1, 1301, 64).half()
    together = select(spec, query, key, past, count, 333)
    for b in range(3):
        own = (x[b : b + 1].contiguous() for x in (query, key))
        alone = select(spec, *own, [past[b]], [count[b]], count[b])
        assert torch.equal(together[b, : count[b]], alone[0])


def test_several_tokens_select_all_rows() -> None:
    spec, key = LayerSpec(0, 1, 1, 64, 0.125), torch.zeros(2, 1, 400, 64).half()
    found = select(spec, key[:, 0, :1].contiguous(), key, [300, 20], [0, 0], 290, length=2)
    assert torch.equal(found, torch.arange(290, dtype=torch.int32).expand(2, -1))
