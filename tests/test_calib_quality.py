import math

import numpy as np
import pytest
import torch
from families import VOCAB, tiny

from calib.codec import Codec, CodecInfo
from calib.quality import Prefill, Score, bootstrap, compressed_mask, decode, measure, prefill
from calib.reference import ReferenceModel
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


def test_the_mask_marks_what_is_coded_once_the_query_is_fed():
    geometry = Geometry(sinks=2, window=8, block=4)
    mask = compressed_mask(geometry, 20, 60)
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
