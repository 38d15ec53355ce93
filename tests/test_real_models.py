"""The built-in model at real lengths. `python -m pytest -m slow`; the model is downloaded on first use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import Engine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batch", [1, 3])
def test_the_uncompressed_engine_equals_the_eager_model(none: Path, loaded, ids: list[int], batch: int) -> None:
    prompts = (300, 41, 170)[:batch]
    rows = [ids[1000 * b : 1000 * b + n + 64] for b, n in enumerate(prompts)]
    with torch.no_grad():
        expected = [
            loaded.model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float().numpy() for row in rows
        ]
    worst = 0.0
    with Engine.open(none) as engine, engine.session(batch=batch) as session:
        logits = session.prefill([row[:n] for row, n in zip(rows, prompts, strict=True)], logits="all")
        for b, n in enumerate(prompts):
            worst = max(worst, float(np.abs(logits[b, :n] - expected[b][:n]).max()))
        for step in range(64):
            logits = session.decode([row[n + step] for row, n in zip(rows, prompts, strict=True)])
            worst = max(worst, *(float(np.abs(logits[b] - expected[b][n + step]).max()) for b, n in enumerate(prompts)))
    print(f"batch {batch}: largest difference of logits {worst:.2e}")
    assert worst <= 2e-4
