"""Engines of published shapes with random weights: they open, step, and have the sizes that they claim."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import shape_engine

from runtime import Engine

TINY = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("method", ["none", "vqkv"])
def test_an_engine_of_a_shape_has_its_sizes_and_runs(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shape_engine.SHAPES, "tiny", TINY)
    settings = ["window=32", "k_entries=16", "v_entries=16"] if method == "vqkv" else []
    asked = {"shape": "tiny", "layers": None, "max_length": 512, "method": method, "ratio": None, "settings": settings}
    shape_engine.graph(argparse.Namespace(**asked, dtype="fp32", out=tmp_path / "engine"))
    shape_engine.weights(tmp_path / "engine")
    with Engine.open(tmp_path / "engine") as engine, engine.session(batch=2) as session:
        logits = session.prefill([[1, 2, 3] * 30, [999] * 50])
        assert logits.shape == (2, 1, 1000) and np.isfinite(logits).all()
        assert np.isfinite(session.decode([5, 6])).all()
        assert engine.artefact.max_length == 512
