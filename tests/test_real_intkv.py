"""The integer baselines on the built-in model at real lengths. `python -m pytest -m slow`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engines import follow
from real import built, losses, prefill_peak

from calib import codec as codecs
from calib.quality import measure
from calib.texts import default_text, token_windows
from plugins.intkv import reference
from runtime import Engine

pytestmark = pytest.mark.slow

RATIOS = {"int4": 0.28125, "kivi2": 0.1875}


@pytest.fixture(scope="module")
def engines(home: Path) -> dict[str, Path]:
    options = ("--effort", "quick", "--context", "1024")
    return {method: built(home / method, "--method", method, *options) for method in RATIOS}


@pytest.mark.parametrize("method", RATIOS)
def test_a_built_engine_passed_its_checks_and_says_what_it_costs(engines: dict[str, Path], method: str) -> None:
    report = json.loads((engines[method] / "report.json").read_text(encoding="utf-8"))
    for check in report["checks"]:
        print(f"{check['name']}: {check['value']:.3g} of {check['limit']:.3g}; {check['detail']}")
    print(f"quality {report['quality']}; memory {report['memory']}")
    assert len(report["checks"]) >= 4 and all(check["ok"] for check in report["checks"])
    assert report["method"]["name"] == method and report["method"]["ratio"] == pytest.approx(RATIOS[method])
    assert report["codec"]["method"] == method and len(report["codec"]["errors"]) == 30
    assert 0 < report["quality"]["kl"] < {"int4": 0.01, "kivi2": 0.5}[method]
    longest = max(report["memory"], key=lambda row: row["tokens"])
    # at 131,072 tokens the exact rows and padding add little to codes, scales and zeros, which here are float32
    scales = {"int4": 0.5, "kivi2": 1.0}[method] / 16
    assert longest["ratio"] == pytest.approx(RATIOS[method] + scales, rel=0.02)


@pytest.mark.parametrize("method", RATIOS)
def test_the_engine_equals_the_reference_over_300_steps(
    engines: dict[str, Path], method: str, loaded, ids: list[int]
) -> None:
    prompts, steps = (400, 120, 30), 300
    rows = [ids[2000 * b : 2000 * b + n + steps] for b, n in enumerate(prompts)]
    with Engine.open(engines[method]) as engine:
        found = follow(engine, loaded.model, codecs.load(engines[method]), rows, prompts)
    print(found)
    assert found.difference <= 2e-3 and found.codes[1] <= 1e-6 * found.codes[0]


@pytest.mark.parametrize("method", RATIOS)
def test_the_simulation_equals_the_engine(
    engines: dict[str, Path], method: str, loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "STATE", torch.float32)  # what these engines are built with
    windows = token_windows(loaded.tokenizer, [default_text()], 1024, 2)
    score = measure(loaded.model, codecs.load(engines[method]), windows, decoded=256)
    found = losses(engines[method], windows, 256)
    print(f"losses of the engine {found}, of the simulation {score.coded}")
    assert found == pytest.approx(score.coded, rel=1e-3)


def test_prefill_memory_grows_with_the_prompt_not_with_its_square(engines: dict[str, Path]) -> None:
    grown = prefill_peak(engines["kivi2"], 8000)
    print(f"8,000 tokens took {grown / 2**20:.0f} MiB at their peak")
    assert grown < 9 * 8000 * 8000 * 4  # one layer's score matrix; an untiled body holds two or more at once
