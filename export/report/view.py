"""What the pages draw from: evaluations of one model put together, and their cells pooled over texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = ("deltakv", "vqkv")
BASELINES = ("int8", "int4", "int3", "kivi2")
LOSSES = ("ppl", "kld")
ROUNDING = 1e-7  # nats: a KL divergence below it is that of equal float32 logits


@dataclass(frozen=True)
class Score:
    """One subject's result at one length, over all texts.

    value: a relative increase of perplexity (ppl), nats (kld) or a share of right answers. low, high: its 95 %
    interval, or NaN. exact: the same of the uncompressed cache (for ppl, 0). samples: how many windows or questions.
    """

    value: float
    low: float
    high: float
    exact: float
    samples: int

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: Score) -> bool:
        """Whether the intervals have a point in common; without both intervals, whether the values are equal."""
        if self.has_interval and other.has_interval:
            return self.low <= other.high and other.low <= self.high
        return self.value == other.value


@dataclass
class View:
    """Evaluations of one model with the same seed and texts, as one: its subjects have unique labels."""

    model: Mapping[str, Any]
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    subjects: list[Mapping[str, Any]] = field(default_factory=list)
    cells: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.model.get("name") or "model")

    @property
    def lengths(self) -> list[int]:
        return sorted({int(cell["length"]) for cell in self.cells})

    @property
    def texts(self) -> list[str]:
        """Of the perplexity and KL cells, in the order of the evaluation."""
        return list(dict.fromkeys(str(cell.get("text") or "") for cell in self.cells if cell["task"] in LOSSES))

    def labels(self, length: int) -> list[str]:
        """Subjects measured at `length`, the largest cache first."""
        measured = {cell["subject"] for cell in self.cells if cell["length"] == length}
        found = [subject for subject in self.subjects if subject["label"] in measured]
        return [
            subject["label"] for subject in sorted(found, key=lambda subject: -_or(fraction(subject, length), math.inf))
        ]

    def subject(self, label: str) -> Mapping[str, Any]:
        return next(subject for subject in self.subjects if subject["label"] == label)

    def tasks(self, length: int | None = None) -> list[tuple[str, str]]:
        """Task and variant of every accuracy task, in the order of the evaluation."""
        return list(
            dict.fromkeys(
                (cell["task"], str(cell.get("variant") or ""))
                for cell in self.cells
                if cell["task"] not in LOSSES and length in (None, cell["length"])
            )
        )

    def find(self, label: str, task: str, length: int, variant: str | None = None) -> list[Mapping[str, Any]]:
        return [
            cell
            for cell in self.cells
            if (cell["subject"], cell["task"], cell["length"]) == (label, task, length)
            and variant in (None, str(cell.get("variant") or ""))
        ]

    def score(self, label: str, task: str, length: int, variant: str = "") -> Score | None:
        """Over all texts: the mean of the losses, or all questions together; None where nothing finite was measured."""
        return pooled(self.find(label, task, length, None if task in LOSSES else variant))


def views(report: Mapping[str, Any]) -> list[View]:
    """The report's evaluations by model, seed and texts. A subject met again is the same one if its digest is."""
    found: dict[tuple[Any, ...], View] = {}
    for evaluation in report.get("evaluations") or ():
        model = evaluation.get("model") or {}
        texts = tuple((text.get("name"), text.get("sha256")) for text in evaluation.get("texts") or ())
        view = found.setdefault((model.get("name"), model.get("sha256"), evaluation.get("seed"), texts), View(model))
        view.evaluations.append(evaluation)
        names = {subject["label"]: _add(view, subject) for subject in evaluation.get("subjects") or ()}
        for cell in evaluation.get("cells") or ():
            new = {**cell, "subject": names.get(cell["subject"], cell["subject"])}
            view.cells = [old for old in view.cells if _key(old) != _key(new)] + [new]
    return list(found.values())


def pooled(cells: Sequence[Mapping[str, Any]]) -> Score | None:
    """Of cells of one task (the texts)."""
    cells = [cell for cell in cells if math.isfinite(value_of(cell))]
    if not cells:
        return None
    values = [value_of(cell) for cell in cells]
    samples = sum(int(cell.get("samples") or 0) for cell in cells)
    intervals = [interval_of(cell) for cell in cells]
    if cells[0]["task"] not in LOSSES:
        weights = [int(cell.get("samples") or 0) or 1 for cell in cells]
        value, exact = _weighted(values, weights), _weighted([number(cell.get("exact")) for cell in cells], weights)
        low, high = intervals[0] if len(cells) == 1 else wilson(value * samples, samples)
        return Score(value, low, high, exact, samples)
    mean = sum(values) / len(values)
    # the texts are independent samples, so their errors add in squares
    below = math.sqrt(sum((value - low) ** 2 for value, (low, _) in zip(values, intervals, strict=True))) / len(cells)
    above = math.sqrt(sum((high - value) ** 2 for value, (_, high) in zip(values, intervals, strict=True))) / len(cells)
    return Score(mean, mean - below, mean + above, 0.0, samples)


def value_of(cell: Mapping[str, Any]) -> float:
    """What a cell's interval is about: the relative change for ppl, else its value."""
    return number(cell.get("change" if cell["task"] == "ppl" else "value"))


def interval_of(cell: Mapping[str, Any]) -> tuple[float, float]:
    low, high = cell.get("interval") or (None, None)
    return number(low), number(high)


def fraction(subject: Mapping[str, Any], length: int) -> float:
    """Bytes of one sequence of `length` tokens over an fp16 cache, NaN where it was not counted."""
    return number((subject.get("fractions") or {}).get(str(length)))


def wilson(right: float, samples: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share: Wilson's score interval."""
    if samples <= 0:
        return math.nan, math.nan
    share = right / samples
    scale = 1 + z * z / samples
    centre = (share + z * z / (2 * samples)) / scale
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def number(value: Any) -> float:
    """A float; NaN for whatever is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def nats(value: float) -> str:
    """Four decimals, or two digits where that is less; under 1e-7, which is rounding, 0."""
    if abs(value) < ROUNDING:
        return "0"
    return f"{value:.4f}" if abs(value) >= 0.00095 else f"{value:.1e}"


def percent(value: float) -> str:
    """A relative change with its sign, which nothing that rounds to 0 has."""
    words = f"{100 * value:+,.2f}"
    return f"{words[1:] if float(words.replace(',', '')) == 0 else words} %"


def average(values: Iterable[float]) -> float:
    """Of the finite ones; NaN without any."""
    kept = [value for value in values if math.isfinite(value)]
    return sum(kept) / len(kept) if kept else math.nan


def _add(view: View, subject: Mapping[str, Any]) -> str:
    label, count = str(subject["label"]), 1
    while any(old["label"] == label for old in view.subjects):
        old = view.subject(label)
        same = ("method", "digest", "kv_dtype", "source")
        if all(old.get(name) == subject.get(name) for name in same):
            merged = {**old, **subject, "label": label}
            for name in ("bytes", "fractions"):
                merged[name] = {**(old.get(name) or {}), **(subject.get(name) or {})}
            view.subjects[view.subjects.index(old)] = merged
            return label
        count += 1
        label = f"{subject['label']} ({count})"
    view.subjects.append({**subject, "label": label})
    return label


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell.get(name) or "" for name in ("subject", "task", "variant", "text", "length"))


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _or(value: float, instead: float) -> float:
    return value if math.isfinite(value) else instead
