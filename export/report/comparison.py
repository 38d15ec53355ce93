"""Who loses less at no more bytes: each baseline against the best of deltakv and vqkv, in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .view import BASELINES, OURS, Score, View, fraction, nats, percent, views

TOLERANCE = 0.002  # of an fp16 cache: a subject within it has "no more bytes"
EQUAL_KL = 0.02  # relative: nearer than this, two KL divergences count as equal


def verdicts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per model, length, baseline and task ("kld", "ppl", else "task" or "task/variant").

    best: the subject of deltakv or vqkv with the lowest KL divergence (without any, the lowest perplexity change) among
    those of at most the baseline's bytes + 0.002; None where there is none. winner: "ours", "baseline" or "tie", and
    None without `best`. KL divergences within 2 % of each other tie; perplexity changes and accuracies tie where their
    95 % intervals overlap. bytes are fractions of an fp16 cache; "sentence" says it in words.
    """
    found: list[dict[str, Any]] = []
    for view in views(report):
        for length in view.lengths:
            labels = view.labels(length)
            for baseline in labels:
                if view.subject(baseline).get("method") in BASELINES:
                    found += _against(view, length, baseline, labels)
    return found


def _against(view: View, length: int, baseline: str, labels: list[str]) -> list[dict[str, Any]]:
    limit = fraction(view.subject(baseline), length)
    tasks = [("kld", ""), ("ppl", ""), *view.tasks(length)]
    scores = {task: score for task in tasks if (score := view.score(baseline, task[0], length, task[1]))}
    if not scores or not math.isfinite(limit):
        return []
    smaller = [
        label
        for label in labels
        if view.subject(label).get("method") in OURS and fraction(view.subject(label), length) <= limit + TOLERANCE
    ]
    best = _best(view, length, smaller)
    common = {"model": view.name, "length": length, "baseline": baseline, "baseline_bytes": limit}
    if best is None:
        if not any(view.subject(label).get("method") in OURS for label in labels):
            return []
        sentence = f"Nothing of deltakv or vqkv that was measured has as few bytes as {baseline} ({limit:.3f})."
        (task, variant), score = next(iter(scores.items()))
        nothing = {"best": None, "best_bytes": None, "best_value": None, "winner": None, "sentence": sentence}
        return [{**common, "task": _name(task, variant), "baseline_value": score.value, **nothing}]
    found = []
    for (task, variant), theirs in scores.items():
        ours = view.score(best, task, length, variant)
        if ours is None:
            continue
        winner = _winner(task, ours, theirs)
        entry = {**common, "task": _name(task, variant), "baseline_value": theirs.value, "best": best}
        entry |= {"best_bytes": fraction(view.subject(best), length), "best_value": ours.value, "winner": winner}
        found.append({**entry, "sentence": _sentence(entry, task, ours.overlaps(theirs))})
    return found


def _best(view: View, length: int, labels: list[str]) -> str | None:
    for task in ("kld", "ppl"):
        scored = [(score.value, label) for label in labels if (score := view.score(label, task, length))]
        if scored:
            return min(scored)[1]
    return labels[0] if labels else None


def _winner(task: str, ours: Score, theirs: Score) -> str:
    if task == "kld":
        tie = abs(ours.value - theirs.value) <= EQUAL_KL * max(ours.value, theirs.value)
    else:
        tie = ours.overlaps(theirs)
    if tie:
        return "tie"
    ahead = ours.value < theirs.value if task in ("kld", "ppl") else ours.value > theirs.value
    return "ours" if ahead else "baseline"


def _sentence(entry: Mapping[str, Any], task: str, overlap: bool) -> str:
    best, baseline = entry["best"], entry["baseline"]
    start = f"At no more bytes than {baseline} ({entry['baseline_bytes']:.3f}), {best} ({entry['best_bytes']:.3f})"
    ours, theirs = entry["best_value"], entry["baseline_value"]
    first = {"ours": best, "baseline": baseline}.get(entry["winner"])
    if task == "kld":
        end = f"{first} loses less" if first else "they lose the same"
        note = ", though the intervals overlap" if first and overlap else ""
        return f"{start} loses KL {nats(ours)} against {nats(theirs)}: {end}{note}."
    if task == "ppl":
        end = f"{first} loses less" if first else "the intervals overlap"
        return f"{start} changes perplexity by {percent(ours)} against {percent(theirs)}: {end}."
    end = f"{first} answers more" if first else "the intervals overlap"
    name = entry["task"].replace("/", " ")
    return f"{start} answers {100 * ours:.0f} % of {name} against {100 * theirs:.0f} %: {end}."


def _name(task: str, variant: str) -> str:
    return f"{task}/{variant}" if variant else task
