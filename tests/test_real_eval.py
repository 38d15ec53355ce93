"""Evaluation and benches on the built-in model. `python -m pytest -m slow`; the model is downloaded on first use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calib.texts import default_text, token_windows
from export.cli import main
from export.eval import evaluate
from runtime import bench

pytestmark = pytest.mark.slow


def test_perplexity_of_the_uncompressed_engine_is_that_of_a_plain_loop(none: Path, loaded, tmp_path: Path) -> None:
    length, count, decoded = 1024, 2, 256
    found = evaluate([none], tasks=("ppl",), lengths=(length,), samples=count, out=tmp_path / "out", progress=False)
    losses = []
    for ids in token_windows(loaded.tokenizer, [default_text()], length, count):
        window = torch.tensor([ids])
        with torch.no_grad():
            logits = loaded.model(input_ids=window).logits[0]
        first = length - decoded
        losses.append(torch.nn.functional.cross_entropy(logits[first:-1], window[0, first + 1 :]))
    plain = float(torch.stack(losses).mean().exp())
    cell = found["cells"][0]
    print(f"perplexity {cell['value']:.5f} by the engine, {plain:.5f} by a plain loop")
    assert (cell["task"], cell["samples"]) == ("ppl", count)
    assert cell["value"] == pytest.approx(plain, rel=1e-3) and cell["exact"] == pytest.approx(plain, rel=1e-3)


def test_the_context_that_fits_is_the_one_that_bytes_leave_room_for(home: Path) -> None:
    """In 1 GiB, of which the model takes more than half."""
    folders = []
    for method, options in (("none", ()), ("deltakv", ("--ratio", "0.29", "--fit", "fast", "--context", "1024"))):
        folders.append(home / f"bench-{method}")
        assert main(["build", "--method", method, *options, "--out", str(folders[-1])]) == 0
    report = bench.oom_length(folders, memory=1 << 30)
    for entry in report["engines"]:
        print({name: entry[name] for name in ("label", "base_bytes", "found", "of_bound", "gain", "of_gain")})
    assert all(entry["of_bound"] >= 0.95 for entry in report["engines"])
    assert report["engines"][1]["gain"] > 2
    for entry in report["engines"]:
        for point in entry["curve"]:
            if point["tokens"] >= 4096:
                assert point["resident_bytes"] == pytest.approx(point["planned_bytes"], rel=0.05)
