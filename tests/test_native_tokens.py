"""Where q, k and v lie must not matter: packed, apart and with gaps, every op gives and stores the same bits."""

from __future__ import annotations

import pytest
import torch
from native import emulated, tokens_first

from plugins.bench import cases
from plugins.native.abi import Library, NativeError
from plugins.native.layer import NativeLayer

NAMES = ("none", "int8", "vqkv-0.125-tiles", "vqkv-0.172-post", "vqkv-0.172-pre", "vqkv-56x1-32x1", "deltakv-all",
         "none-observing-2048")  # fmt: skip
STEPS = [[190, 165], [1, 1], [40, 3], [1, 1]]


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


def made(library: Library, name: str) -> NativeLayer:
    (case,) = (case for case in cases.CASES if case.name == name)
    dim = 128 if "tiles" in name else 64
    return cases.make_layer(case, cases.layer_spec((1, 2, dim)), library, 2, 256, torch.bfloat16, "cpu")


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """x [B, S, C] with `gap` NaN after every token."""
    room = torch.full((*x.shape[:2], x.shape[2] + gap), torch.nan, dtype=x.dtype)
    return room[..., : x.shape[2]].copy_(x)


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_where_tokens_lie(library: Library, name: str) -> None:
    layers = [made(library, name) for _ in range(3)]
    spec, generator = layers[0].spec, torch.Generator().manual_seed(1)
    for counts in STEPS:
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        shapes = [(2, h, max(counts), spec.head_dim) for h in heads]
        q, k, v = (tokens_first(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes)
        outs = [
            layers[0].step(q, k, v, new=counts),
            layers[1].step(torch.cat((q, k, v), dim=-1), new=counts),
            layers[2].step(apart(q, 24), apart(k, 8), apart(v, 8), new=counts),
        ]
        assert outs[0].isfinite().all() and outs[0].float().norm() > 0
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    for state, tensor in layers[0].states.items():
        assert tensor.float().norm() > 0
        assert all(torch.equal(tensor, other.states[state]) for other in layers[1:])


def test_tokens_that_lie_otherwise_are_refused(library: Library) -> None:
    layer = made(library, "none")
    q, kv = torch.zeros(2, 3, 128).bfloat16(), torch.zeros(2, 3, 64).bfloat16()
    with pytest.raises(ValueError, match=r"q must be torch.bfloat16 \[2, 3, 128\]"):
        layer.step(torch.zeros(2, 3, 200).bfloat16())
    with pytest.raises(ValueError, match=r"v must be torch.bfloat16 \[2, 3, 64\]"):
        layer.step(q, kv)
    with pytest.raises(ValueError, match="k and v must lie equally far apart, not 64 and 72 elements"):
        layer.step(q, kv, apart(kv, 8))
    with pytest.raises(ValueError, match="the tokens of q must lie equally far apart"):
        layer.step(torch.zeros(2, 4, 128).bfloat16()[:, :3], kv, kv)
    with pytest.raises(NativeError, match="q_row=132 and kv_row=64 must be multiples of 8 and at least 128 and 64"):
        layer.step(apart(q, 4), kv, kv)
    with pytest.raises(NativeError, match="q, k, v and out must be 16-byte aligned"):
        layer.step(torch.zeros(2, 3, 136).bfloat16()[..., 4:132], kv, kv)
