"""Exported engines against the eager model and against the reference caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Agreement, follow, make_engine
from families import FAMILIES, VOCAB
from transformers import PreTrainedModel

from calib.codec import Codec
from plugins.deltakv.config import DeltaKVConfig
from plugins.intkv.config import Int4Config, Int8Config, KIVI2Config
from plugins.vqkv.config import VQKVConfig
from runtime import Engine
from runtime.canary import Check, log_softmax

PROMPTS = (150, 9, 40)  # with 64 more tokens they cross sliding windows and the ring
STEPS = 64


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, (batch, length))


def eager_logits(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()


@pytest.fixture(scope="module", params=list(FAMILIES))
def dense_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("dense") / request.param
    model, _ = make_engine(folder, request.param)
    with Engine.open(folder) as engine:
        yield model, engine


@pytest.mark.parametrize("batch", [1, 3])
def test_an_uncompressed_engine_equals_the_eager_model_at_every_step(dense_engine, batch: int) -> None:
    model, engine = dense_engine
    ids = tokens(batch, max(PROMPTS) + STEPS)
    expected = [eager_logits(model, row[: PROMPTS[b] + STEPS]) for b, row in enumerate(ids)]
    with engine.session(batch=batch) as session:
        logits = session.prefill([row[: PROMPTS[b]].tolist() for b, row in enumerate(ids)], logits="all")
        for b in range(batch):
            np.testing.assert_allclose(logits[b, : PROMPTS[b]], expected[b][: PROMPTS[b]], rtol=0, atol=2e-4)
        for step in range(STEPS):
            logits = session.decode([int(row[PROMPTS[b] + step]) for b, row in enumerate(ids)])
            for b in range(batch):
                np.testing.assert_allclose(logits[b], expected[b][PROMPTS[b] + step], rtol=0, atol=2e-4)


DEFAULT = VQKVConfig.from_ratio(0.172, 32)
VQKV = {
    "keys before RoPE": ("llama", DEFAULT, {"num_hidden_layers": 2, "num_attention_heads": 6}),
    "keys after RoPE, tables per layer, 7 heads a group": (
        "qwen2",
        VQKVConfig.from_ratio(0.125, 32, key_space="post_rope", tables="layer"),
        {"num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "sliding layers stay whole, soft-capped scores": ("gemma2", DEFAULT, {}),
    "partial rotary, a layer kept full": (
        "phi3",
        VQKVConfig.from_ratio(0.172, 32, full_layers=(0,)),
        {"num_hidden_layers": 2},
    ),
}


def check_steps(
    engine: Engine, model: PreTrainedModel, codec: Codec, prompts: tuple[int, ...], steps: int
) -> Agreement:
    """Logits, codes and selections of every step must equal those of the reference."""
    ids = tokens(len(prompts), max(prompts) + steps, seed=1)
    rows = [row[: n + steps].tolist() for row, n in zip(ids, prompts, strict=True)]
    found = follow(engine, model, codec, rows, prompts)
    assert found.difference <= 2e-3
    assert found.codes[0] > 0 and found.codes[1] == 0 and found.selections[1] == 0
    return found


@pytest.mark.parametrize("case", VQKV)
def test_a_vqkv_engine_equals_the_reference_over_300_steps(case: str, tmp_path: Path) -> None:
    family, config, changes = VQKV[case]
    model, codec = make_engine(tmp_path / "engine", family, config, **changes)
    with Engine.open(tmp_path / "engine") as engine:
        check_steps(engine, model, codec, (150, 9, 40), 300)


DELTAKV = {
    "linear, reads all tokens": ("llama", {"latents": "64x4", "full_layers": ()}, {"num_hidden_layers": 2}),
    "observed fraction, layers kept full, keys with a bias, 7 heads a group": (
        "qwen2",
        {"latents": "16x8+32x2", "stride": 7, "full_layers": (0, 2), "select_fraction": 0.3},
        {"num_hidden_layers": 4, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "observed count, SwiGLU, 8-bit references": (
        "qwen3",
        {"latents": "64x8", "compressor": "swiglu", "hidden": 96, "reference_bits": 8,
         "select_count": 40},
        {"num_hidden_layers": 3},
    ),
    "sliding layers stay whole, soft-capped scores, observed": (
        "gemma2", {"latents": "32x4+32x4", "full_layers": (1,), "select_fraction": 0.5}, {},
    ),
    "partial rotary, latents of 16 bits": (
        "phi3", {"latents": "30x16", "neighbors": 4}, {"num_hidden_layers": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", DELTAKV)
def test_a_deltakv_engine_equals_the_reference_over_400_steps(case: str, batch: int, tmp_path: Path) -> None:
    family, fields, changes = DELTAKV[case]
    config = DeltaKVConfig(head_dim=32, kv_heads=2, **fields)
    model, codec = make_engine(tmp_path / "engine", family, config, **changes)
    with Engine.open(tmp_path / "engine") as engine:
        found = check_steps(engine, model, codec, (150, 9, 40)[:batch], 400)
    assert (found.selections[0] > 0) == config.selects


INTKV = {
    "int4, keys before RoPE": ("llama", Int4Config(32), {"num_hidden_layers": 2, "num_attention_heads": 6}, 300),
    "kivi2, keys with a bias, 7 heads a group": (
        "qwen2",
        KIVI2Config(64, block=64),
        {"num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
        300,
    ),
    "8 and 3 bits per channel, partial rotary, a layer kept full": (
        "phi3",
        Int8Config(32, v_bits=3, k_axis="channel", group=8, full_layers=(0,)),
        {"num_hidden_layers": 2},
        64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INTKV)
def test_an_integer_engine_equals_the_reference_at_every_step(case: str, tmp_path: Path) -> None:
    family, config, changes, steps = INTKV[case]
    model, codec = make_engine(tmp_path / "engine", family, config, **changes)
    with Engine.open(tmp_path / "engine") as engine:
        found = check_steps(engine, model, codec, (300, 9, 150), steps)
    assert found.codes[2] <= found.codes[0] // 100


def test_a_fresh_prompt_of_a_deltakv_engine_is_that_of_an_uncompressed_one(tmp_path: Path) -> None:
    config = DeltaKVConfig(head_dim=32, kv_heads=2, latents="32x4", select_fraction=0.2)
    make_engine(tmp_path / "deltakv", "llama", config, num_hidden_layers=2)
    make_engine(tmp_path / "none", "llama", num_hidden_layers=2)
    ids = tokens(1, 700)[0].tolist()
    outs = []
    for name in ("deltakv", "none"):
        with Engine.open(tmp_path / name) as engine, engine.session() as session:
            outs.append(session.prefill(ids, logits="all"))
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=1e-5)


def test_a_fresh_prompt_of_a_vqkv_engine_is_exact(tmp_path: Path) -> None:
    model, _ = make_engine(tmp_path / "engine", "qwen3", DEFAULT, num_hidden_layers=2)
    ids = tokens(1, 700)[0]
    with Engine.open(tmp_path / "engine") as engine, engine.session() as session:
        logits = session.prefill(ids.tolist(), logits="all")[0]
    np.testing.assert_allclose(logits, eager_logits(model, ids), rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def vqkv_engine(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("vqkv") / "engine"
    model, codec = make_engine(folder, "llama", DEFAULT, {"kv_dtype": "fp16"}, num_hidden_layers=2)
    with Engine.open(folder) as engine:
        yield model, codec, engine


@pytest.mark.parametrize("length", [131, 132, 133, 163, 164, 165, 195, 196, 197, 255, 256, 257, 512])
def test_lengths_around_every_boundary_give_the_same_logits_however_they_are_fed(vqkv_engine, length: int) -> None:
    _, _, engine = vqkv_engine
    ids = tokens(1, length + 2, seed=length)[0].tolist()
    with engine.session() as whole, engine.session() as stepped:
        whole.prefill(ids[:length])
        stepped.prefill(ids[:length])
        one = [whole.decode([t])[0] for t in ids[length:]]
        two = stepped.prefill(ids[length:], logits="all")[0]
    # the second call sees the same old state; only the schedule of encoding within it may differ, never the codes
    np.testing.assert_allclose(one[0], two[0], atol=2e-4)


def test_a_step_after_reuse_of_a_prefix_equals_a_fresh_session_bit_for_bit(vqkv_engine) -> None:
    _, _, engine = vqkv_engine
    prefix, rest = tokens(1, 300)[0].tolist(), tokens(1, 20, seed=5)[0].tolist()
    with engine.session() as first, engine.session() as fresh:
        first.prefill(prefix)
        with first.fork() as reused:
            first.prefill([7, 8, 9])  # must not leak into the fork
            a = reused.prefill(rest, logits="all")
        fresh.prefill(prefix)
        b = fresh.prefill(rest, logits="all")
    np.testing.assert_array_equal(a, b)


def test_logits_do_not_depend_on_capacity(vqkv_engine) -> None:
    _, _, engine = vqkv_engine
    ids = tokens(1, 300)[0].tolist()
    with engine.session() as small, engine.session(capacity=4096) as large:
        np.testing.assert_array_equal(small.prefill(ids), large.prefill(ids))
        for token in ids[:40]:
            np.testing.assert_array_equal(small.decode([token]), large.decode([token]))


def test_a_half_precision_engine_stays_close_to_the_full_one(vqkv_engine, tmp_path: Path) -> None:
    _, _, full = vqkv_engine
    make_engine(tmp_path / "half", "llama", DEFAULT, {"kv_dtype": "fp16", "dtype": "fp16"}, num_hidden_layers=2)
    ids = tokens(1, 400)[0].tolist()
    outs = []
    for engine in (full, Engine.open(tmp_path / "half")):
        with engine.session() as session:
            prompt = session.prefill(ids[:300], logits="all")[0]
            outs.append(np.concatenate([prompt, *(session.decode([t]) for t in ids[300:])]))
    true, approx = (log_softmax(x) for x in outs)
    assert float((np.exp(true) * (true - approx)).sum(-1).mean()) < 1e-4
    assert float((outs[0].argmax(-1) == outs[1].argmax(-1)).mean()) >= 0.99


def test_a_check_fails_when_its_number_is_above_the_limit() -> None:
    assert (
        Check.at_most("x", 0.1, 0.2).ok and not Check.at_most("x", 0.3, 0.2).ok and not Check.at_most("x", np.nan, 1).ok
    )
