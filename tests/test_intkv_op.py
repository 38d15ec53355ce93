"""IntKVAttention's ONNX body, run by ONNX Runtime step by step, against the float32 reference."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from ops import CAPACITY, DIM, FLOAT, HALF, HEADS, STEPS, Op, host_feeds, layer, rope_tables, run, twice

from plugins.intkv import onnx_body as intkv
from plugins.intkv.config import IntKVConfig
from plugins.intkv.reference import LayerCache, LayerCodec, stored_rows
from plugins.layer import LayerSpec

SMALL = {"head_dim": DIM, "sinks": 2, "window": 5, "block": 3}


def setup(config: IntKVConfig, spec: LayerSpec, batch: int, state: ir.DataType = FLOAT) -> tuple[Op, list[LayerCache]]:
    center = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    codec = LayerCodec(config, center if config.mean else torch.zeros_like(center))
    tables = rope_tables(spec.rotary_dim) if spec.rotary_dim else None
    feeds = intkv.tables(codec)
    if tables:
        feeds |= dict(zip(("cos", "sin"), (t.numpy() for t in tables), strict=True))
    op = Op(intkv.plan(spec, config, state), batch, feeds, config.geometry())
    dtype = torch.float16 if state == HALF else torch.float32
    return op, [LayerCache(spec, twice(tables) if tables else None, codec, dtype) for _ in range(batch)]


def used(op: Op, config: IntKVConfig, b: int, count: int) -> dict[str, torch.Tensor]:
    """The first `count` code rows of one sequence, and their scales and zeros."""
    found = {}
    for side in "kv":
        for part, tokens in (("codes", 1), ("scales", config.side(side).tokens), ("zeros", config.side(side).tokens)):
            name = f"{part}_{side}"
            found[name] = torch.from_numpy(op.state[name][b, :, : count // tokens])
    return found


def check(op: Op, caches: list[LayerCache]) -> None:
    """Every stored number equals the reference's, but for a code in a thousand that a last bit decides."""
    for b, cache in enumerate(caches):
        count = cache.stored["k"].codes.shape[-2]
        given = stored_rows(cache.codec.config, used(op, cache.codec.config, b, count))
        total, wrong, flips = cache.compare(given)
        assert total > 0 and wrong == 0 and flips <= total // 1000


@pytest.mark.parametrize("bits", [(2, 3), (3, 4), (4, 8), (8, 2)])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(("key_space", "strong"), [("pre_rope", True), ("post_rope", True), ("post_rope", False)])
def test_the_op_equals_the_reference(bits: tuple[int, int], axis: str, key_space: str, strong: bool) -> None:
    config = IntKVConfig(
        **SMALL, k_bits=bits[0], v_bits=bits[1], k_axis=axis, key_space=key_space, rotation=strong, mean=strong,
        group=0 if strong else 4,
    )  # fmt: skip
    op, caches = setup(config, layer(), 3)
    assert run(op, caches, layer(), geometry=config.geometry()) < 5e-6
    check(op, caches)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(
    ("group", "rotary_dim", "softcap", "exact"),
    [(1, 16, 5.0, {}), (7, 0, 0.0, {"sinks": 0, "block": 1}), (3, 4, 0.0, {"window": 1, "block": 5})],
)
def test_groups_of_heads_partial_rotary_and_soft_caps(
    group: int, rotary_dim: int, softcap: float, exact: dict[str, int], axis: str
) -> None:
    config = IntKVConfig(**(SMALL | exact), k_axis=axis, mean=False)
    spec = layer(group, rotary_dim, softcap=softcap)
    op, caches = setup(config, spec, 3)
    assert run(op, caches, spec, geometry=config.geometry()) < 5e-6
    check(op, caches)


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_rows_in_half_precision_are_rounded_once_each(axis: str) -> None:
    config = IntKVConfig(**SMALL, k_axis=axis, k_bits=8)
    op, caches = setup(config, layer(), 3, HALF)
    assert run(op, caches, layer(), geometry=config.geometry()) < 2e-2  # a rounding or a code the other way
    for name in ("ring_k", "scales_k", "zeros_v"):
        assert op.state[name].dtype == np.float16
    check(op, caches)


def feed(op: Op, config: IntKVConfig, past: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    count = q.shape[2]
    host = host_feeds(np.full(len(q), past, np.int32), np.full(len(q), count, np.int32), config.geometry())
    return op.step(q=q.numpy(), k=k.numpy(), v=v.numpy(), **host)


def inputs(tokens: int, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, tokens, DIM, generator=generator) for heads in (3 * HEADS, HEADS, HEADS)]


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_appending_in_chunks_of_any_size_gives_the_same_state(axis: str) -> None:
    config = IntKVConfig(**SMALL, k_axis=axis, k_bits=3)
    given, count = inputs(40), config.geometry().encoded(40)
    states = []
    for sizes in ([40], [1] * 40, [13, 1, 1, 25]):
        op, past = setup(config, layer(), 1)[0], 0
        for size in sizes:
            feed(op, config, past, *(x[:, :, past : past + size] for x in given))
            past += size
        states.append(used(op, config, 0, count) | {n: torch.from_numpy(op.state[n]) for n in ("ring_k", "ring_v")})
    for other in states[1:]:
        for name, expected in states[0].items():
            torch.testing.assert_close(other[name], expected, rtol=0, atol=2e-6)


def test_a_sequence_does_not_depend_on_the_others_of_its_batch() -> None:
    config = IntKVConfig(**SMALL, k_axis="channel")
    generator = torch.Generator().manual_seed(4)
    together, alone = setup(config, layer(), 3)[0], setup(config, layer(), 1)[0]
    past = np.zeros(3, np.int32)
    for counts in STEPS:
        new = np.array(counts, np.int32)
        given = [torch.randn(3, h, max(new), DIM, generator=generator).numpy() for h in (3 * HEADS, HEADS, HEADS)]
        outs = []
        for op, members in ((together, slice(0, 3)), (alone, slice(2, 3))):
            q, k, v = (x[members] for x in given)
            outs.append(op.step(q=q, k=k, v=v, **host_feeds(past[members], new[members], config.geometry()))[-1])
        np.testing.assert_allclose(outs[0], outs[1], atol=2e-6)
        past = past + new
    count = config.geometry().encoded(int(past[2]))
    for name, rows in used(together, config, 2, count).items():
        torch.testing.assert_close(rows, used(alone, config, 0, count)[name], rtol=0, atol=1e-6)


def test_equal_values_have_the_scale_0_and_come_back_as_they_are() -> None:
    config = IntKVConfig(**SMALL, k_axis="channel", rotation=False, mean=False)
    op = setup(config, layer(3, 0), 1)[0]
    q, k, v = inputs(40)
    k[:], v[:] = torch.arange(DIM) / 7, 0.3  # each channel of keys is constant, and so is each token of values
    feed(op, config, 0, q, k, v)
    out = feed(op, config, 40, *(x[:, :, :1] for x in (q, k, v)))
    count = config.geometry().encoded(40)
    for name in ("k", "v"):
        rows = stored_rows(config, used(op, config, 0, count))[name]
        assert (rows.scales == 0).all() and (rows.codes == 0).all()
    np.testing.assert_allclose(out, 0.3, atol=1e-6)


def test_zeroed_and_trash_rows_never_show() -> None:
    """What lies past the rows in use, whatever it is, changes nothing."""
    config = IntKVConfig(**SMALL, k_axis="channel", k_bits=2)
    given, outs = inputs(30), []
    for noisy in (False, True):
        op = setup(config, layer(), 1)[0]
        feed(op, config, 0, *(x[:, :, :29] for x in given))
        if noisy:
            count = config.geometry().encoded(29)
            for name, array in op.state.items():
                tokens = config.block if name in ("scales_k", "zeros_k") else 1
                if not name.startswith("ring"):
                    array[:, :, count // tokens :] = 77
        outs.append(feed(op, config, 29, *(x[:, :, 29:] for x in given)))
    np.testing.assert_array_equal(*outs)
    assert config.geometry().encoded(29) < config.geometry().encoded(CAPACITY)
