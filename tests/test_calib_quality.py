import math

import numpy as np
import pytest
import torch
from families import VOCAB, tiny

from calib.codec import Codec, CodecInfo
from calib.quality import (
    Prefill,
    Score,
    bootstrap,
    compressed_mask,
    decode,
    measure,
    prefill,
    selected_mask,
    steps_past,
)
from calib.reference import ReferenceModel
from plugins.deltakv.config import DeltaKVConfig
from plugins.deltakv.reference import LayerCodec as DeltaKVLayer
from plugins.geometry import Geometry
from plugins.vqkv import VQKVConfig
from plugins.vqkv.reference import LayerCodec, Quantiser

CONFIG = VQKVConfig(
    head_dim=32, k_groups=8, v_groups=8, k_stages=(8, 4), v_stages=(8,), k_entries=16, v_entries=16,
    sinks=2, window=8, block=4,
)  # fmt: skip


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def random_codec(layers, **changes) -> Codec:
    config = CONFIG.override([f"{key}={value}" for key, value in changes.items()])
    generator = torch.Generator().manual_seed(1)

    def side(lookups: int, stages: tuple[int, ...]) -> Quantiser:
        turn = torch.linalg.qr(torch.randn(2, 32, 32, generator=generator)).Q
        books = torch.randn(2, lookups, 16, 4, generator=generator)
        return Quantiser(books, turn, turn.mT.contiguous(), torch.randn(2, 32, generator=generator), stages)

    made = {layer: LayerCodec(config, side(12, (8, 4)), side(8, (8,))) for layer in layers}
    return Codec(CodecInfo("vqkv", config, {}, [], "quick", 0, 64, 0), made)


def deltakv_codec(layers, **changes) -> Codec:
    settings = {"latents": "32x4", "stride": 4, "neighbors": 2, "sinks": 2, "window": 8, "block": 4}
    config = DeltaKVConfig(head_dim=32, kv_heads=2, **(settings | changes))
    generator = torch.Generator().manual_seed(1)

    def table(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == "compress":
            return torch.linalg.qr(torch.randn(shape, generator=generator)).Q
        return torch.randn(shape, generator=generator) * shape[0] ** -0.5

    made = {}
    for layer in layers:
        tables = {name: table(name, shape) for name, shape in DeltaKVLayer.shapes(config, 2).items()}
        made[layer] = DeltaKVLayer(config, **(tables | {"decompress": tables["compress"].T.contiguous()}))
    return Codec(CodecInfo("deltakv", config, {}, [], "quick", 0, 64, 0), made)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "phi3", "smollm3"])
def test_without_codes_decoding_gives_the_exact_logits(family):
    model, ids = tiny(family), tokens(2, 60)
    start = prefill(model, ids, 24)
    torch.testing.assert_close(start.logits, model(input_ids=ids).logits[:, -24:], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(decode(model, start, random_codec([])), start.logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "layers", "key_space"),
    [
        ("llama", (0, 1, 2, 3), "pre_rope"),
        ("llama", (0, 2), "post_rope"),
        ("qwen2", (1, 3), "pre_rope"),
        ("gemma2", (1, 3), "pre_rope"),
        ("smollm3", (0, 1, 2, 3), "post_rope"),
    ],
)
def test_all_tokens_at_once_equal_tokens_fed_one_by_one_through_the_reference_cache(family, layers, key_space):
    model, ids, codec = tiny(family), tokens(1, 60), random_codec(layers, key_space=key_space)
    start = prefill(model, ids, 24)
    at_once = decode(model, start, codec)[0]
    reference = ReferenceModel(model, codec, 64)
    reference.step(ids[0, :36].tolist())
    one_by_one = torch.cat([reference.step([token]) for token in ids[0, 36:].tolist()])
    torch.testing.assert_close(at_once, one_by_one, atol=5e-4, rtol=1e-4)
    assert (at_once - start.logits[0]).abs().max() > 0.1  # the codes do change the result


@pytest.mark.parametrize(
    ("family", "full", "changes"),
    [
        ("llama", (), {"latents": "32x4"}),
        ("llama", (0,), {"latents": "32x16", "compressor": "swiglu", "hidden": 24}),
        ("qwen2", (0, 2), {"latents": "8x8+24x2", "select_fraction": 0.3}),
        ("llama", (0,), {"latents": "32x8", "select_count": 5, "reference_bits": 8}),
        ("llama", (0, 1), {"latents": "32x4", "select_count": 1000}),
        ("gemma2", (1,), {"latents": "32x4"}),
        ("smollm3", (0, 2), {"latents": "32x4", "select_fraction": 0.2}),
    ],
)
def test_deltakv_at_once_equals_tokens_fed_one_by_one(family, full, changes):
    model, ids = tiny(family), tokens(1, 60)
    sliding = (0, 2) if family == "gemma2" else ()
    layers = [layer for layer in range(4) if layer not in full + sliding]
    codec = deltakv_codec(layers, full_layers=full, **changes)
    start = prefill(model, ids, 24)
    at_once = decode(model, start, codec)[0]
    reference = ReferenceModel(model, codec, 64)
    reference.step(ids[0, :36].tolist())
    one_by_one = torch.cat([reference.step([token]) for token in ids[0, 36:].tolist()])
    torch.testing.assert_close(at_once, one_by_one, atol=1e-3, rtol=1e-3)
    assert (at_once - start.logits[0]).abs().max() > 0.05
    if codec.config.selects and changes.get("select_count") != 1000:
        everything = deltakv_codec(layers, full_layers=full, **{k: v for k, v in changes.items() if "select" not in k})
        assert (decode(model, start, everything)[0] - at_once).abs().max() > 0.05


@pytest.mark.parametrize("method", ["vqkv", "deltakv"])
def test_steps_of_several_tokens_equal_those_of_the_reference_cache(method):
    model, ids = tiny("llama"), tokens(1, 80)
    codec = (
        random_codec((0, 2)) if method == "vqkv" else deltakv_codec((1, 2, 3), full_layers=(0,), select_fraction=0.2)
    )
    feeds = (1, 1, 1, 19, 1, 1, 6, *(1,) * 14)
    start = prefill(model, ids, 44)
    at_once = decode(model, start, codec, steps_past(36, feeds))[0]
    reference, place, steps = ReferenceModel(model, codec, 80), 36, []
    reference.step(ids[0, :36].tolist())
    for size in feeds:
        steps.append(reference.step(ids[0, place : place + size].tolist()))
        place += size
    torch.testing.assert_close(at_once, torch.cat(steps), atol=1e-3, rtol=1e-3)
    assert (at_once - decode(model, start, codec)[0]).abs().max() > 0.05  # than one by one
    picks = [40, 41, 70]
    some = decode(model, start, codec, steps_past(36, feeds), picks)[0]
    torch.testing.assert_close(some, at_once[[4, 5, 34]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prefill(model, ids, 44, picks).logits, start.logits[:, [4, 5, 34]], atol=1e-5, rtol=1e-5)


def test_windows_of_a_batch_choose_what_they_read_by_themselves():
    model, ids = tiny("llama"), tokens(3, 60)
    codec = deltakv_codec((1, 2, 3), full_layers=(0,), select_fraction=0.25)
    together = decode(model, prefill(model, ids, 24), codec)
    alone = torch.cat([decode(model, prefill(model, ids[row : row + 1], 24), codec) for row in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=1e-3)


def test_a_query_reads_the_rows_that_receive_most_and_the_lower_of_equals():
    geometry = Geometry(sinks=2, window=4, block=2, select_count=2)
    coded = compressed_mask(geometry, np.arange(12, 14), 14)
    assert coded.sum(1).tolist() == [6, 6]
    received = torch.tensor(
        [[9.0, 9, 1, 3, 3, 0, 3, 2, 9, 9, 9, 9, 9, 9], [9.0, 9, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9, 9, 9]]
    )
    read = selected_mask(geometry, received[None], coded, np.arange(12, 14))[0]
    assert [row.nonzero()[:, 0].tolist() for row in read] == [[3, 4], [2, 3]]
    quarter = Geometry(sinks=2, window=4, block=2, select_fraction=0.2)  # 0.2 of 6 rows, rounded up
    assert selected_mask(quarter, received[None], coded, np.arange(12, 14)).sum(-1).tolist() == [[2, 2]]
    early = np.arange(5, 7)
    assert selected_mask(quarter, received[None, :, :7], compressed_mask(geometry, early, 7), early).sum() == 0


def test_the_mask_marks_what_is_coded_once_the_query_is_fed():
    geometry = Geometry(sinks=2, window=8, block=4)
    mask = compressed_mask(geometry, np.arange(20, 60), 60)
    for row, past in enumerate(range(20, 60)):
        coded = [2 <= position < 2 + geometry.encoded(past) for position in range(60)]
        assert mask[row].tolist() == coded
        assert past - max(np.flatnonzero(coded)) >= 8  # the window stays exact


def test_scores_are_those_of_their_definitions():
    ids = torch.tensor([[3, 1, 2]])
    exact, coded = torch.randn(2, 1, 3, 5, generator=torch.Generator().manual_seed(0))
    score = Score([], [], [], [])
    score.add(Prefill(ids, {}, {}, {}, exact), coded)
    p, q = torch.softmax(exact[0].double(), -1), torch.softmax(coded[0].double(), -1)
    assert score.exact[0] == pytest.approx(-float(p[0, 1].log() + p[1, 2].log()) / 2, rel=1e-5)
    assert score.coded[0] == pytest.approx(-float(q[0, 1].log() + q[1, 2].log()) / 2, rel=1e-5)
    assert score.kl[0] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert score.top1[0] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def test_a_summary_compares_perplexities_of_the_same_windows():
    summary = Score([1.0, 2.0], [1.1, 2.3], [0.1, 0.3], [0.9, 1.0]).summary()
    assert summary["ppl_exact"] == pytest.approx(math.exp(1.5))
    assert summary["ppl"] == pytest.approx(math.exp(1.7))
    assert summary["increase"] == pytest.approx(math.exp(0.2) - 1)
    assert (summary["kl"], summary["top1"], summary["windows"]) == (pytest.approx(0.2), pytest.approx(0.95), 2)
    low, high = summary["interval"]
    assert low == pytest.approx(math.exp(0.1) - 1) and high == pytest.approx(math.exp(0.3) - 1)


def test_the_bootstrap_interval_is_that_of_the_mean():
    difference = np.random.default_rng(1).normal(0.02, 0.01, 400)
    low, high = bootstrap(difference)
    error = 1.96 * difference.std() / 20
    assert low == pytest.approx(np.expm1(difference.mean() - error), abs=2e-4)
    assert high == pytest.approx(np.expm1(difference.mean() + error), abs=2e-4)


def test_measuring_counts_every_window_once():
    seen = []
    score = measure(tiny("llama"), random_codec([0]), tokens(3, 60).tolist(), 24, lambda: seen.append(1))
    assert len(score.kl) == len(seen) == 3 and min(score.kl) > 0


def test_a_batch_of_windows_scores_as_they_do_one_at_a_time():
    windows, codec = tokens(5, 60).tolist(), random_codec([0, 2])
    alone, batched = measure(tiny("llama"), codec, windows, 24), measure(tiny("llama"), codec, windows, 24, batch=2)
    np.testing.assert_allclose(alone.kl, batched.kl, rtol=1e-3)
    np.testing.assert_allclose(alone.coded, batched.coded, rtol=1e-4)
