"""Which figures a report has, with their words, and how they become SVG or PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError
from plugins.files import write_whole

from . import bench_figures, ink, quality_figures
from .view import View, views

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF, WHOLE = 5.0, 10.4  # inches: two figures beside each other, or one


@dataclass(frozen=True)
class Drawing:
    """A figure and its words.

    name: unique in a report and fit for a file name. section: "model 0", ... in the order of view.views, or "bench 0".
    length: the one it shows, 0 for all. about: what it is of, for those who meet it without its section. draw: makes
    the matplotlib figure, within ink.style(). wide: it takes the page's whole width.
    """

    name: str
    section: str
    length: int
    title: str
    about: str
    caption: str
    draw: Callable[[], Figure]
    wide: bool = False

    def svg(self) -> str:
        """An <svg> element whose colours follow the page it stands in."""
        with ink.style():
            return ink.svg(self.draw(), self.name, f"{self.title}: {self.about}")


def drawings(report: Mapping[str, Any]) -> list[Drawing]:
    """Those of the report's figures that have something to show."""
    found: list[Drawing] = []
    for number, view in enumerate(views(report)):
        found += _of_model(view, f"model {number}", re.sub(r"[^a-z0-9]+", "-", view.name.lower()).strip("-"))
    for number, bench in enumerate(report.get("benches") or ()):
        if bench.get("engines"):
            found += _of_bench(bench, f"bench {number}", str(number))
    names: set[str] = set()
    unique = []
    for drawing in found:
        name, count = drawing.name, 1
        while name in names:
            count += 1
            name = f"{drawing.name}-{count}"
        names.add(name)
        unique.append(replace(drawing, name=name))
    return unique


def save(report: Mapping[str, Any], folder: Path, format: str) -> list[Path]:
    """Every figure as a file NAME.png (192 dots per inch, on white) or NAME.svg. Returns the paths."""
    if format not in ("png", "svg"):
        raise UserError(f"figures are written as png or svg, not as {format!r}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings(report):
        path = folder / f"{drawing.name}.{format}"
        with ink.style():
            write_whole(path, ink.encode(drawing.draw(), format))
        paths.append(path)
    return paths


def _of_model(view: View, section: str, stem: str) -> Iterator[Drawing]:
    def half(paint: Callable[..., None], *arguments: Any) -> Callable[[], Figure]:
        return lambda: _single(3.5, paint, view, *arguments)

    for length in view.lengths:
        at, tail = f"{view.name} at {length:,} tokens", f"{stem}-{length}"
        for task, title, words in (
            ("kld", "Divergence against bytes", "Nearer to the lower left is better."),
            ("ppl", "Perplexity against bytes", "Upright lines: 95 % intervals; 0 is the uncompressed cache."),
        ):
            if quality_figures.frontier_points(view, length, task):
                draw = half(quality_figures.frontier, length, task)
                yield Drawing(f"frontier-{task}-{tail}", section, length, title, at, words, draw)
        if view.tasks(length):
            words = "Per cent, all texts together. Dashed line: the uncompressed cache; thin lines: 95 % intervals."
            draw = partial(_accuracy, view, length)
            yield Drawing(f"accuracy-{tail}", section, length, "Right answers", at, words, draw, wide=True)
    for length in view.lengths:
        if any(quality_figures.position_means(view, label, length) for label in view.labels(length)):
            title, words = (
                f"Loss by position, {length:,} tokens",
                "Mean of the texts; a rising line is an error that builds up.",
            )
            draw = half(quality_figures.positions, length)
            yield Drawing(f"positions-{stem}-{length}", section, 0, title, view.name, words, draw)
    if len({tokens for subject in view.subjects for tokens, _ in quality_figures.sizes(subject)}) > 1:
        title, words = "Memory against context", "All that one sequence holds; an engine's tables are apart."
        yield Drawing(f"memory-{stem}", section, 0, title, view.name, words, half(quality_figures.memory))
    mapped = [subject["label"] for subject in view.subjects if quality_figures.needle_table(view, subject["label"])]
    if mapped:
        title, words = "Needle in a haystack", "Per cent found, by tokens (across) and depth of the needle (down)."
        draw = partial(_needles, view, mapped)
        yield Drawing(f"needle-{stem}", section, 0, title, view.name, words, draw, wide=True)


def _of_bench(bench: Mapping[str, Any], section: str, number: str) -> Iterator[Drawing]:
    count = len(bench["engines"])
    about = ", ".join(dict.fromkeys(str(engine.get("model") or "") for engine in bench["engines"]))
    if bench.get("bench") == "latency":
        words = "In brackets: over the first engine; more than 1 is slower."
        draw = partial(_latency, bench)
        yield Drawing(
            f"latency-{number}", section, 0, "Time to first token, and per token", about, words, draw, wide=True
        )
    if bench.get("bench") == "oom-length":
        height = max(2.6, 0.9 + 0.34 * count)
        words = "Bars: found by trial. Strokes: what the bytes of a sequence allow. In brackets: over the first engine."
        draw = partial(_single, height, bench_figures.oom, bench)
        yield Drawing(f"oom-length-{number}", section, 0, "Found, and allowed by bytes", about, words, draw)
        if any(engine.get("curve") for engine in bench["engines"]):
            words = "A point per engine and length; on the line, memory grows by exactly what was planned."
            draw = partial(_single, height, bench_figures.resident, bench)
            yield Drawing(f"resident-{number}", section, 0, "Resident memory", about, words, draw)


def _latency(bench: Mapping[str, Any]) -> Figure:
    figure, panels = ink.canvas(WHOLE, 0.9 + 0.34 * len(bench["engines"]), 1, 2, sharey=True)
    bench_figures.latency(panels, bench)
    return figure


def _single(height: float, paint: Callable[..., None], *arguments: Any) -> Figure:
    figure, axes = ink.canvas(HALF, height)
    paint(axes, *arguments)
    return figure


def _accuracy(view: View, length: int) -> Figure:
    count, bars = len(view.tasks(length)), len(view.labels(length))
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure, panels = ink.canvas(
        max(HALF, 2.0 + 2.2 * columns), rows * (0.75 + 0.2 * bars), rows, columns, sharey=True, squeeze=False
    )
    quality_figures.accuracy(panels.ravel(), view, length)
    return figure


def _needles(view: View, labels: list[str]) -> Figure:
    columns = min(len(labels), 6)
    rows = math.ceil(len(labels) / columns)
    width = max(HALF, 1.8 * columns)
    figure, panels = ink.canvas(width, 2.0 * rows, rows, columns, sharey=True, squeeze=False)
    quality_figures.needle_map(panels.ravel(), view, labels)
    return figure
