"""Pooling over texts, merging evaluations, and who loses less at no more bytes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import report_data

from export.report import verdicts
from export.report.view import pooled, views, wilson

KL = {"task": "kld", "variant": "", "length": 4096, "samples": 16}


def report(*subjects: tuple[str, str, float, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of (label, method, fraction, cells without their common parts)."""
    evaluation = {"model": {"name": "tiny"}, "seed": 0, "texts": [], "subjects": [], "cells": []}
    for label, method, share, cells in subjects:
        evaluation["subjects"].append({"label": label, "method": method, "fractions": {"4096": share}})
        evaluation["cells"] += [{"length": 4096, "samples": 16, "subject": label, **cell} for cell in cells]
    return {"format": 1, "evaluations": [evaluation], "benches": []}


def kl(value: float, text: str = "a") -> dict[str, Any]:
    return {"task": "kld", "text": text, "value": value, "interval": [0.9 * value, 1.1 * value]}


def ppl(change: float, half: float, text: str = "a") -> dict[str, Any]:
    return {"task": "ppl", "text": text, "value": 1.0, "change": change, "interval": [change - half, change + half]}


def by_task(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["task"]: entry for entry in found}


def test_the_subject_with_the_lowest_divergence_at_no_more_bytes_is_compared() -> None:
    found = verdicts(
        report(
            ("int4", "int4", 0.311, [kl(0.0024)]),
            ("deltakv 0.45", "deltakv", 0.45, [kl(0.0001)]),
            ("deltakv 0.29", "deltakv", 0.293, [kl(0.0027)]),
            ("vqkv 0.28", "vqkv", 0.28, [kl(0.0030)]),
        )
    )
    assert len(found) == 1
    sentence = found[0].pop("sentence")
    assert found[0] == {
        "model": "tiny",
        "length": 4096,
        "task": "kld",
        "baseline": "int4",
        "baseline_bytes": 0.311,
        "baseline_value": 0.0024,
        "best": "deltakv 0.29",
        "best_bytes": 0.293,
        "best_value": 0.0027,
        "winner": "baseline",
    }
    start = "At no more bytes than int4 (0.311), deltakv 0.29 (0.293) loses KL 0.0027 against 0.0024: int4 loses less"
    assert sentence == f"{start}, though the intervals overlap."


@pytest.mark.parametrize(
    ("value", "winner"), [(0.002, "ours"), (0.00239, "tie"), (0.00243, "tie"), (0.003, "baseline")]
)
def test_divergences_within_two_per_cent_tie(value: float, winner: str) -> None:
    (found,) = verdicts(report(("int4", "int4", 0.3, [kl(0.0024)]), ("vqkv", "vqkv", 0.3, [kl(value)])))
    assert found["winner"] == winner


@pytest.mark.parametrize(("share", "best"), [(0.3019, "vqkv"), (0.3021, None)])
def test_bytes_may_exceed_the_baselines_by_two_thousandths(share: float, best: str | None) -> None:
    (found,) = verdicts(report(("int4", "int4", 0.3, [kl(0.0024)]), ("vqkv", "vqkv", share, [kl(0.001)])))
    assert found["best"] == best
    assert found["winner"] == ("ours" if best else None)


def test_perplexities_and_accuracies_tie_where_intervals_overlap() -> None:
    right = {"task": "niah", "variant": "single", "text": "a", "exact": 1.0}
    found = by_task(
        verdicts(
            report(
                ("kivi2", "kivi2", 0.22, [ppl(0.05, 0.01), {**right, "value": 0.4, "interval": [0.2, 0.6]}]),
                ("vqkv", "vqkv", 0.2, [ppl(0.035, 0.004), {**right, "value": 0.9, "interval": [0.7, 1.0]}]),
            )
        )
    )
    assert (found["ppl"]["winner"], found["niah/single"]["winner"]) == ("ours", "ours")
    found = by_task(
        verdicts(
            report(
                ("kivi2", "kivi2", 0.22, [ppl(0.05, 0.01), {**right, "value": 0.6, "interval": [0.4, 0.8]}]),
                ("vqkv", "vqkv", 0.2, [ppl(0.035, 0.006), {**right, "value": 0.9, "interval": [0.7, 1.0]}]),
            )
        )
    )
    assert (found["ppl"]["winner"], found["niah/single"]["winner"]) == ("tie", "tie")


def test_without_one_of_ours_there_is_no_verdict() -> None:
    assert verdicts(report(("int4", "int4", 0.3, [kl(0.0024)]), ("int3", "int3", 0.25, [kl(0.01)]))) == []


def test_every_baseline_of_the_full_report_is_judged_at_every_length() -> None:
    found = verdicts(report_data.full())
    judged = {(entry["model"], entry["length"], entry["baseline"]) for entry in found if entry["task"] == "kld"}
    assert len(judged) == 2 * 2 * 4


def test_losses_of_texts_are_averaged_and_their_errors_add_in_squares() -> None:
    score = pooled([{**KL, **kl(1.0), "interval": [0.7, 1.3]}, {**KL, **kl(2.0), "interval": [1.6, 2.4]}])
    assert score is not None
    assert (score.value, score.low, score.high) == pytest.approx((1.5, 1.25, 1.75))
    assert score.samples == 32


def test_questions_of_texts_are_pooled() -> None:
    cells = [
        {"task": "niah", "value": value, "exact": 1.0, "samples": samples, "interval": [0, 1]}
        for value, samples in ((1.0, 6), (0.5, 4))
    ]
    score = pooled(cells)
    assert score is not None
    assert (score.value, score.low, score.high) == pytest.approx((0.8, 0.490157, 0.943319), abs=1e-6)


def test_wilsons_interval() -> None:
    # 8 of 10: (0.8 + 1.9208/10 +- 1.96 sqrt(0.016 + 0.009604)) / 1.38416
    assert wilson(8, 10) == pytest.approx((0.490157, 0.943319), abs=1e-6)
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == 1
    assert all(math.isnan(end) for end in wilson(0, 0))


def test_cells_that_are_not_finite_are_left_out() -> None:
    assert pooled([{**KL, **kl(math.nan)}, {**KL, "value": None}]) is None
    score = pooled([{**KL, **kl(math.nan)}, {**KL, **kl(2.0)}])
    assert score is not None and score.value == 2.0


def test_evaluations_of_one_model_and_texts_become_one_view() -> None:
    first = report_data.evaluation({"name": "a", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8}, 0, (4096,))
    second = copy.deepcopy(first)
    second["subjects"] = [subject for subject in second["subjects"] if subject["method"] == "int4"]
    second["cells"] = [{**cell, "length": 8192} for cell in second["cells"] if cell["subject"] == "int4"]
    (view,) = views({"evaluations": [first, second]})
    assert view.lengths == [4096, 8192]
    assert view.labels(8192) == ["int4"]
    assert len(view.subjects) == len(first["subjects"])
    second["subjects"][0]["digest"] = "another"
    (view,) = views({"evaluations": [first, second]})
    assert view.labels(8192) == ["int4 (2)"]
    second["seed"] = 1
    assert len(views({"evaluations": [first, second]})) == 2
