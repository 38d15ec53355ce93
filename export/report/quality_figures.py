"""The figures about quality and memory: each takes a view (and a length) and draws nothing it has no data for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import ink
from .view import ROUNDING, Score, View, average, fraction, number

MIB = 1 << 20
LINEAR = 0.02  # a rise of perplexity up to which its axis is linear when others rise more
_TICKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100)


def frontier(axes: Any, view: View, length: int, task: str) -> None:
    from matplotlib.ticker import NullLocator

    points = frontier_points(view, length, task)
    for family in dict.fromkeys(key for key, *_ in points):
        own = sorted(point[1:] for point in points if point[0] == family)
        method = view.subject(own[0][2]).get("method", "")
        tint = ink.colour(method)
        xs, scores = [x for x, _, _ in own], [score for _, score, _ in own]
        line = "--" if family[1] == "quality" else "-"
        axes.plot(xs, [score.value for score in scores], line, color=tint, marker=ink.marker(method), zorder=3)
        if task == "ppl":
            _whiskers(axes, xs, scores, tint)
    title = "KL divergence, nats" if task == "kld" else "Rise of perplexity"
    values = [score.value for _, _, score, _ in points]
    if task == "kld":
        axes.set_yscale("log")
        ink.log_axis(axes.yaxis, values)
    else:
        axes.axhline(0, color=ink.FAINT, linewidth=0.9, zorder=2)
        if max(map(abs, values)) > LINEAR:
            title += f" (linear up to {100 * LINEAR:.0f} %, then logarithmic)"
            axes.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
            axes.set_yticks([sign * spot for sign in (-1, 1) for spot in _TICKS] + [0])
            axes.yaxis.set_minor_locator(NullLocator())
            ends = [end for _, _, score, _ in points for end in (score.value, score.low, score.high) if end == end]
            axes.set_ylim(min(-0.004, 1.2 * min(ends)), max(0.004, 1.5 * max(ends)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+,.6g} %" if value else "0")
    axes.margins(x=0.12, y=0.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("bytes of one sequence, of an fp16 cache")
    axes.set_title(title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    ink.label_points(
        axes,
        [(x, score.value, label, ink.colour(view.subject(label).get("method", ""))) for _, x, score, label in points],
    )


def positions(axes: Any, view: View, length: int) -> None:
    """KL over the decoded positions, mean of the texts."""
    axes.set_yscale("log")
    ends, seen = [], []
    for label in view.labels(length):
        spots = position_means(view, label, length)
        if not spots:
            continue
        method = str(view.subject(label).get("method") or "")
        xs, ys = zip(*spots, strict=True)
        axes.plot(xs, ys, color=ink.colour(method), linewidth=1.3, marker=ink.marker(method), markersize=3)
        ends.append((xs[-1], ys[-1], label, ink.colour(method)))
        seen += ys
    ink.log_axis(axes.yaxis, seen)
    axes.set_xlabel("tokens decoded since the prefill")
    axes.set_title("KL divergence, nats")
    _end_labels(axes, ends)


def position_means(view: View, label: str, length: int) -> list[tuple[float, float]]:
    """(middle of a bucket of decoded tokens, mean KL of the texts) where it can be drawn on a log axis."""
    buckets: dict[float, list[float]] = {}
    for cell in view.find(label, "kld", length):
        for spot in cell.get("positions") or ():
            middle = (number(spot.get("from")) + number(spot.get("to"))) / 2
            buckets.setdefault(middle, []).append(number(spot.get("kl")))
    means = [(middle, average(values)) for middle, values in sorted(buckets.items())]
    return [(middle, mean) for middle, mean in means if math.isfinite(middle) and mean > ROUNDING]


def memory(axes: Any, view: View) -> None:
    """Bytes of one sequence over its length, per subject and for a plain fp16 cache."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lines = {subject["label"]: sizes(subject) for subject in view.subjects}
    dense = {
        tokens: size / fraction(subject, tokens)
        for subject in view.subjects
        for tokens, size in lines[subject["label"]]
        if fraction(subject, tokens) > 0
    }
    ends = []
    for label, spots, tint in [
        ("fp16", sorted(dense.items()), ink.INK),
        *((name, spots, ink.colour(view.subject(name).get("method", ""))) for name, spots in lines.items()),
    ]:
        if spots:
            xs, ys = [tokens for tokens, _ in spots], [size / MIB for _, size in spots]
            axes.plot(xs, ys, color=tint, marker="o", markersize=3, linewidth=1.3)
            ends.append((xs[-1], ys[-1], label, tint))
    tokens = sorted({count for spots in lines.values() for count, _ in spots})
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
    axes.set_xlabel("tokens of the sequence")
    axes.set_title("MiB of one sequence")
    _end_labels(axes, ends)


def sizes(subject: Mapping[str, Any]) -> list[tuple[int, float]]:
    counted = [(int(tokens), number(size)) for tokens, size in (subject.get("bytes") or {}).items()]
    return sorted((tokens, size) for tokens, size in counted if size > 0)


def accuracy(panels: Sequence[Any], view: View, length: int) -> None:
    """One panel per task and variant; panels: at least as many axes."""
    labels = view.labels(length)[::-1]
    places = range(len(labels))
    tasks = view.tasks(length)
    for axes, (task, variant) in zip(panels, tasks, strict=False):
        scores = [view.score(label, task, length, variant) for label in labels]
        exact = average(score.exact for score in scores if score)
        for place, label, score in zip(places, labels, scores, strict=True):
            if score is None:
                continue
            axes.barh(
                place, score.value, height=0.62, color=ink.colour(view.subject(label).get("method", "")), alpha=0.75
            )
            if score.has_interval:
                axes.plot([score.low, score.high], [place, place], color=ink.INK, linewidth=1)
        if math.isfinite(exact):
            axes.axvline(exact, color=ink.INK, linewidth=1.2, linestyle=(0, (3, 2)))
        axes.set_title(f"{task} {variant}".strip().replace("_", " "))
        axes.set_xlim(0, 1.02)
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        axes.set_yticks(places, labels)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)


def needle_map(panels: Sequence[Any], view: View, labels: Sequence[str]) -> None:
    """Accuracy by depth of the needle and length, one panel per subject."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("accuracy", ["#f7e3d4", "#7fb2d2", "#0b6aa8"])
    for axes, label in zip(panels, labels, strict=False):
        table = needle_table(view, label)
        lengths = sorted({length for length, _ in table})
        depths = sorted({depth for _, depth in table})
        for (length, depth), value in table.items():
            x, y = lengths.index(length), depths.index(depth)
            axes.barh(y, 0.96, left=x - 0.48, height=0.94, color=shades(value))
            # the colour of the words is the shade's, not the page's
            axes.text(
                x, y, f"{100 * value:.0f}", ha="center", va="center", color="#fffffe" if value > 0.7 else "#101010"
            )
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(depths) - 0.5, -0.5)
        axes.set_title(label)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    for axes in panels[len(labels) :]:
        axes.set_visible(False)


def needle_table(view: View, label: str) -> dict[tuple[int, float], float]:
    """(length, depth) -> accuracy, the mean of the texts and variants."""
    found: dict[tuple[int, float], list[float]] = {}
    for cell in view.cells:
        if cell["subject"] == label and cell["task"] == "niah":
            for depth, value in (cell.get("by_depth") or {}).items():
                found.setdefault((int(cell["length"]), float(depth)), []).append(number(value))
    means = {key: average(values) for key, values in found.items()}
    return {key: mean for key, mean in means.items() if math.isfinite(mean)}


def frontier_points(view: View, length: int, task: str) -> list[tuple[tuple[str, str], float, Score, str]]:
    """(family and fit, fraction, score, label) of what can be drawn: for kld, on a log axis."""
    found = []
    for label in view.labels(length):
        subject, score = view.subject(label), view.score(label, task, length)
        x = fraction(subject, length)
        if score and math.isfinite(x) and (task == "ppl" or score.value > ROUNDING):
            found.append(((ink.family_name(subject), str(subject.get("fit") or "")), x, score, label))
    return found


def _whiskers(axes: Any, xs: Sequence[float], scores: Sequence[Score], tint: str) -> None:
    for x, score in zip(xs, scores, strict=True):
        if score.has_interval:
            axes.plot([x, x], [score.low, score.high], color=tint, linewidth=1, alpha=0.55, zorder=2)


def _end_labels(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right ends of lines, moved apart where they would touch."""
    axes.figure.draw_without_rendering()
    to_points = 72 / axes.figure.dpi
    heights = [axes.transData.transform((x, y))[1] * to_points for x, y, _, _ in ends]
    for (x, y, label, tint), height, place in zip(ends, heights, ink.spread(heights, 10.5), strict=True):
        axes.annotate(
            label, (x, y), (7, place - height), textcoords="offset points", color=tint, fontsize=8, va="center"
        )
