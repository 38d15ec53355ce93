"""Prefill attention of the native library, on the CPU emulator, against plugins.attention."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from typing import Any

import pytest
import torch

from plugins.attention import attend, causal_mask
from plugins.layer import LayerSpec
from plugins.native.abi import OK, Library, Step
from tests import native

BAR = {torch.float16: 5e-3, torch.bfloat16: 1e-2}


@cache
def library() -> Library:
    return native.emulated()


def internal(library: Library, name: str) -> Any:
    """A function of the library that kvpack.h does not name."""
    listed = subprocess.run(["nm", "-D", library.path], check=True, capture_output=True, text=True).stdout
    (symbol,) = {word for word in listed.split() if word.startswith(f"_ZN6kvpack{len(name)}{name}E")}
    return getattr(library.handle, symbol)


def check(
    spec: LayerSpec,
    dtype: torch.dtype,
    past: list[int],
    new: list[int],
    length: int,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """One step of `length` tokens, of which new[b] are real; rows that may not be read are NaN. Returns its output."""
    batch, h, d = len(past), spec.num_kv_heads, spec.head_dim
    ahead = [min(p, spec.window) if spec.window else p for p in past]
    query, out = torch.full((2, batch, spec.num_heads, length, d), torch.nan, dtype=dtype)
    room = max(ahead) + length + 3
    key, value = torch.full((2, batch, h + 1, room, d), torch.nan, dtype=dtype)  # one head of padding
    for b in range(batch):
        torch.manual_seed(past[b] + new[b])
        total = ahead[b] + new[b]
        key[b, :h, :total], value[b, :h, :total] = torch.randn(2, h, total, d).to(dtype)
        query[b, :, : new[b]] = (torch.randn(spec.num_heads, new[b], d) * sharpness).to(dtype)
    past_len, new_len = (torch.tensor(x, dtype=torch.int32) for x in (past, new))
    step = Step(batch=batch, length=length, out=out.data_ptr())
    step.past_len, step.new_len = past_len.data_ptr(), new_len.data_ptr()
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (query, key, value)]
    strides = [ctypes.c_int64(key.stride(n)) for n in (0, 1)]
    run = internal(library(), "prefill_attention")
    layer = native.layer(spec, dtype)
    assert run(ctypes.byref(layer), ctypes.byref(step), *pointers, *strides) == OK
    out = native.heads_first(out.view(batch, length, -1), spec.num_heads)
    for b in range(batch):
        n, total = new[b], ahead[b] + new[b]
        assert (out[b, :, n:] == 0).all()
        if n == 0:
            continue
        mask = causal_mask(n, total, spec.window)
        keys, values = key[b : b + 1, :h, :total].float(), value[b : b + 1, :h, :total].float()
        wanted = attend(query[b : b + 1, :, :n].float(), keys, values, mask, spec.scale, spec.softcap)
        assert native.relative(out[b : b + 1, :, :n], wanted) < BAR[dtype]
    return out


@pytest.mark.parametrize("dtype", BAR)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_head_dim_and_dtype(dim: int, dtype: torch.dtype) -> None:
    check(LayerSpec(0, 2, 1, dim, dim**-0.5), dtype, [37, 0], [70, 21], 70)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 127, 128, 129])
def test_lengths_about_the_tiles(length: int) -> None:
    check(LayerSpec(0, 1, 1, 64, 0.125), torch.float16, [0], [length], length)


@pytest.mark.parametrize("past", [1, 63, 64, 65, 190])
def test_stored_rows_about_the_tiles(past: int) -> None:
    check(LayerSpec(0, 1, 1, 64, 0.125), torch.bfloat16, [past], [5], 5)


@pytest.mark.parametrize("group", [1, 6, 7, 8, 16])
def test_groups(group: int) -> None:
    check(LayerSpec(0, 2 * group, 2, 64, 0.125), torch.float16, [9], [6], 6)


def test_ragged_sequences_and_empty_ones() -> None:
    check(LayerSpec(0, 2, 2, 64, 0.125), torch.float16, [100, 0, 7, 130], [140, 3, 0, 129], 140)


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_sliding_windows(window: int) -> None:
    check(LayerSpec(0, 1, 1, 64, 0.125, window=window), torch.float16, [0, 50, 300], [150, 131, 140], 150)


@pytest.mark.parametrize("dim", [64, 256])
def test_softcap(dim: int) -> None:
    check(LayerSpec(0, 2, 1, dim, dim**-0.5, softcap=4.0), torch.float16, [30], [40], 40, sharpness=8)


@pytest.mark.parametrize("dtype", BAR)
def test_sharp_scores(dtype: torch.dtype) -> None:
    check(LayerSpec(0, 1, 1, 128, 0.1), dtype, [150], [60], 60, sharpness=30)


def test_a_sequence_gives_the_same_bits_in_any_batch() -> None:
    spec = LayerSpec(0, 1, 1, 64, 0.125)
    together = check(spec, torch.float16, [10, 90, 0], [70, 30, 150], 150)
    for b, (past, new) in enumerate(((10, 70), (90, 30), (0, 150))):
        alone = check(spec, torch.float16, [past], [new], new)
        assert torch.equal(alone[0], together[b, :, :new])
