"""The ops' ONNX bodies, run by ONNX Runtime step by step, against the float32 references."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from ops import CAPACITY, DIM, FLOAT, HALF, HEADS, STEPS, Op, host_feeds, layer, rope_tables, run, twice

from plugins import graph
from plugins.contract import TILE_ROWS
from plugins.dense import onnx_body as dense
from plugins.dense.reference import LayerCache as DenseCache
from plugins.geometry import Geometry
from plugins.layer import LayerSpec
from plugins.vqkv import onnx_body as vqkv
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import LayerCache as VQKVCache
from plugins.vqkv.reference import LayerCodec, Quantiser, byte_values, stored_rows

LONG = [[25, 1, 20], *STEPS]  # up to 62 rows


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("group", "rotary_dim", "softcap"), [(3, 8, 0.0), (1, 16, 5.0), (7, 0, 0.0)])
def test_dense_attention_equals_the_reference(window: int, group: int, rotary_dim: int, softcap: float) -> None:
    spec = layer(group, rotary_dim, window=window, softcap=softcap)
    tables = rope_tables(rotary_dim) if rotary_dim else None
    feeds = {n: t.numpy() for n, t in zip(("cos", "sin"), tables, strict=True)} if tables else {}
    op = Op(dense.plan(spec, FLOAT), 3, feeds)
    references = [DenseCache(spec, twice(tables) if tables else None) for _ in range(3)]
    assert run(op, references, spec) < 2e-6


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads tiles of 32 rows, the fewest, and the observing layer ranks 8 at a time."""
    monkeypatch.setattr(graph, "ROW_TILE", 8)
    monkeypatch.setattr(dense, "ROW_TILE", 8)


@pytest.mark.parametrize(("group", "softcap"), [(3, 0.0), (1, 5.0)])
def test_dense_attention_over_several_tiles_equals_the_reference(small_tiles: None, group: int, softcap: float) -> None:
    spec, tables = layer(group, softcap=softcap), rope_tables(8)
    op = Op(dense.plan(spec, FLOAT), 3, dict(zip(("cos", "sin"), (t.numpy() for t in tables), strict=True)))
    assert run(op, [DenseCache(spec, twice(tables)) for _ in range(3)], spec, LONG) < 2e-6


def test_the_observing_layer_selects_the_same_rows_however_it_is_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, geometry = layer(rotary_dim=0), Geometry(sinks=2, window=5, block=3, select_count=9)
    generator, past, ops = torch.Generator().manual_seed(5), np.zeros(2, np.int32), []
    for tile in (CAPACITY, 8):
        monkeypatch.setattr(dense, "ROW_TILE", tile)
        ops.append(Op(dense.plan(spec, FLOAT, geometry), 2, {}, geometry))
    for size in (45, 1, 1, 1):
        q, k, v = (torch.randn(2, h, size, DIM, generator=generator).numpy() for h in (spec.num_heads, HEADS, HEADS))
        new = np.array([size, size // 2 + 1], np.int32)
        for op in ops:
            op.step(q=q, k=k, v=v, **host_feeds(past, new, geometry))
        one, several = (op.extra["selected"] for op in ops)
        np.testing.assert_array_equal(one, several)
        past = past + new
    assert (np.sort(one[:, :9], axis=1) != np.arange(9)).any()


def test_dense_attention_in_half_precision_rounds_only_what_is_stored() -> None:
    spec, tables = layer(), rope_tables(8)
    op = Op(dense.plan(spec, HALF), 3, dict(zip(("cos", "sin"), (t.numpy() for t in tables), strict=True)))
    references = [DenseCache(spec, twice(tables), torch.float16) for _ in range(3)]
    assert run(op, references, spec) < 5e-4  # a rounding that went the other way, now and then


def random_side(config: VQKVConfig, side: str, generator: torch.Generator) -> Quantiser:
    sets = HEADS if config.tables == "head" else 1
    groups, stages = getattr(config, f"{side}_groups"), getattr(config, f"{side}_stages")
    matrix = 1.5 * torch.linalg.qr(torch.randn(sets, DIM, DIM, generator=generator))[0]
    return Quantiser(
        books=torch.randn(sets, sum(stages), getattr(config, f"{side}_entries"), DIM // groups, generator=generator),
        encode=matrix,
        decode=torch.linalg.inv(matrix),
        mean=torch.randn(HEADS, DIM, generator=generator),
        stages=stages,
    )


def vqkv_setup(
    config: VQKVConfig, spec: LayerSpec, batch: int, state: ir.DataType = FLOAT
) -> tuple[Op, list[VQKVCache]]:
    generator = torch.Generator().manual_seed(0)
    codec = LayerCodec(config, *(random_side(config, side, generator) for side in "kv"))
    tables = rope_tables(spec.rotary_dim)
    feeds = vqkv.tables(codec) | dict(zip(("cos", "sin"), (t.numpy() for t in tables), strict=True))
    op = Op(vqkv.plan(spec, config, state), batch, feeds, config.geometry())
    return op, [VQKVCache(spec, twice(tables), codec) for _ in range(batch)]


SMALL = {"head_dim": DIM, "k_groups": 4, "v_groups": 4, "k_entries": 16, "v_entries": 16,
         "sinks": 2, "window": 5, "block": 3}  # fmt: skip
SHAPES = {
    "second stage on part of the groups": {"k_stages": (4, 2), "v_stages": (4,)},
    "groups that are never coded": {"k_stages": (3, 2, 2), "v_stages": (2, 2)},
    "one group, many stages": {"k_groups": 1, "k_stages": (1,) * 5, "v_groups": 1, "v_stages": (1, 1)},
    "byte codes": {"k_stages": (4,), "v_stages": (4,), "k_entries": 256, "v_entries": 256},
    "no sinks, block of one": {"k_stages": (4,), "v_stages": (4,), "sinks": 0, "block": 1},
}


@pytest.mark.parametrize("key_space", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("tables", ["head", "layer"])
@pytest.mark.parametrize("shape", SHAPES)
def test_vqkv_attention_and_its_codes_equal_the_reference(shape: str, tables: str, key_space: str) -> None:
    config = VQKVConfig(**(SMALL | SHAPES[shape]), key_space=key_space, tables=tables)
    spec = layer()
    op, references = vqkv_setup(config, spec, 3)
    assert run(op, references, spec, geometry=config.geometry()) < 5e-6
    for b, reference in enumerate(references):
        for side, own in zip(("k", "v"), reference.codes, strict=True):
            entries = getattr(config, f"{side}_entries")
            got = op.state[f"codes_{side}"][b, :, : own.shape[1]].astype(int) + entries // 2
            assert own.shape[1] > 0 and (got == own.numpy()).all()


@pytest.mark.parametrize("key_space", ["pre_rope", "post_rope"])
@pytest.mark.parametrize("tables", ["head", "layer"])
def test_vqkv_attention_over_several_tiles_equals_the_reference(small_tiles: None, tables: str, key_space: str) -> None:
    shape = SHAPES["second stage on part of the groups"]
    config = VQKVConfig(**(SMALL | shape), key_space=key_space, tables=tables)
    spec = layer()
    op, references = vqkv_setup(config, spec, 3)
    assert run(op, references, spec, LONG, config.geometry()) < 5e-6


@pytest.mark.parametrize("key_space", ["pre_rope", "post_rope"])
def test_vqkv_attention_caps_the_scores_of_its_codes_too(small_tiles: None, key_space: str) -> None:
    config = VQKVConfig(**(SMALL | SHAPES["byte codes"]), key_space=key_space)
    spec = layer(softcap=5.0)
    op, references = vqkv_setup(config, spec, 3)
    assert run(op, references, spec, LONG, config.geometry()) < 5e-6


@pytest.mark.parametrize("k_stages", [(4,), (4, 2)])
def test_vqkv_codes_in_tiles_are_the_same_codes(small_tiles: None, k_stages: tuple[int, ...]) -> None:
    shape = {"k_stages": k_stages, "v_stages": (4,), "k_entries": 256, "v_entries": 256, "block": 16}
    config = VQKVConfig(**(SMALL | shape), key_space="post_rope", layout="tiles")
    spec = layer()
    op, references = vqkv_setup(config, spec, 3)
    assert run(op, references, spec, LONG, config.geometry()) < 5e-6
    for b, reference in enumerate(references):
        rows = len(reference.codes[0][0])
        state = {n: torch.from_numpy(op.state[n][b, :, : rows // TILE_ROWS]) for n in ("codes_k", "codes_v")}
        for own, found in zip(reference.codes, stored_rows(config, state), strict=True):
            assert rows > 0 and torch.equal(own, found)


def test_byte_values_are_the_nearest_halves_of_two_equal_bytes() -> None:
    books = torch.randn(3, 50) * torch.tensor([1e-4, 1.0, 300.0])[:, None]
    found = byte_values(books)
    bits = found.half().view(torch.int16).int() & 0xFFFF
    assert torch.equal(found, found.half().float()) and torch.equal(bits >> 8, bits & 255)
    halves = (torch.arange(256, dtype=torch.int32) * 257).to(torch.int16).view(torch.float16).float()
    halves = halves[halves.isfinite()]
    best = (books[..., None] - halves).abs().amin(-1)
    torch.testing.assert_close((books - found).abs(), best, rtol=0, atol=0)
    assert 0.03 < float((books - found)[1].norm() / books[1].norm()) < 0.08


def test_a_sequence_does_not_depend_on_the_others_of_its_batch() -> None:
    config = VQKVConfig(**(SMALL | SHAPES["second stage on part of the groups"]))
    spec, generator = layer(), torch.Generator().manual_seed(4)
    together, alone = vqkv_setup(config, spec, 3)[0], vqkv_setup(config, spec, 1)[0]
    geometry, trash = config.geometry(), config.geometry().encoded(CAPACITY)
    past = np.zeros(3, np.int32)
    for counts in STEPS:
        new = np.array(counts, np.int32)
        q, k, v = (
            torch.randn(3, h, max(new), DIM, generator=generator).numpy() for h in (spec.num_heads, HEADS, HEADS)
        )
        outs = []
        for op, members in ((together, slice(0, 3)), (alone, slice(2, 3))):
            source, target = geometry.schedule(past[members], new[members], trash)
            live = np.array(-(-past[members].max() // 8) * 8, np.int32)
            outs.append(
                op.step(
                    q=q[members], k=k[members], v=v[members], past_len=past[members], new_len=new[members], live=live,
                    enc_src=source, enc_dst=target,
                )[-1]
            )  # fmt: skip
        np.testing.assert_allclose(outs[0], outs[1], atol=2e-6)
        past = past + new
    rows = geometry.encoded(int(past[2]))
    for side in ("codes_k", "codes_v"):
        np.testing.assert_array_equal(together.state[side][2, :, :rows], alone.state[side][0, :, :rows])


def test_appending_in_chunks_of_any_size_gives_the_same_codes() -> None:
    config = VQKVConfig(**(SMALL | SHAPES["byte codes"]))
    spec = layer()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, 40, DIM, generator=generator) for h in (spec.num_heads, HEADS, HEADS))
    states = []
    for sizes in ([40], [1] * 40, [13, 1, 1, 25]):
        op, _ = vqkv_setup(config, spec, 1)
        past = 0
        for size in sizes:
            span = slice(past, past + size)
            source, target = config.geometry().schedule(
                np.array([past]), np.array([size]), config.geometry().encoded(CAPACITY)
            )
            op.step(
                q=q[:, :, span].numpy(), k=k[:, :, span].numpy(), v=v[:, :, span].numpy(),
                past_len=np.array([past], np.int32), new_len=np.array([size], np.int32),
                live=np.array(-(-past // 8) * 8, np.int32), enc_src=source, enc_dst=target,
            )  # fmt: skip
            past += size
        states.append(op.state)
    rows = config.geometry().encoded(40)
    for other in states[1:]:
        for side in ("codes_k", "codes_v"):
            assert (other[side][:, :, :rows] == states[0][side][:, :, :rows]).all()
        np.testing.assert_array_equal(other["ring_k"], states[0]["ring_k"])
