"""How figures look: colours, labels that keep apart, and SVG that follows the page's colour scheme."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1d2126", "#6a727c", "#dfe3e8"
# after Okabe and Ito's palette, which people with any colour vision tell apart; names are the page's CSS variables
COLOURS = {"blue": "#0072b2", "orange": "#d55e00", "green": "#009e73", "pink": "#b8568f", "amber": "#b07d00"}
FAMILIES = {"deltakv": "blue", "vqkv": "orange", "int8": "green", "int4": "green", "int3": "green", "kivi2": "pink"}
MARKERS = {"deltakv": "o", "vqkv": "s", "kivi2": "D"}
_VARIABLES = {INK: "ink", FAINT: "faint", GRID: "grid", **{value: name for name, value in COLOURS.items()}}
_STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "kvpack",
    "figure.constrained_layout.use": True,
}


def colour(method: str) -> str:
    """Of a method's family: the integer methods share one, methods unknown here another; `none` is drawn like text."""
    return INK if method == "none" else COLOURS[FAMILIES.get(method, "amber")]


def marker(method: str) -> str:
    return MARKERS.get(method, "^")


@contextmanager
def style() -> Iterator[None]:
    """matplotlib in the report's style; figures are made, drawn and saved inside."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of width x height inches with its axes, apart from pyplot and its windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element: ids begin with `name`, text is text, colours are variables with a fallback."""
    target = io.StringIO()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it has done its work, and would do it again for every draw
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    # the first selector of matplotlib's own <style> would reach every element of a page
    text = re.sub(r"<style[^>]*>\*\{(.*?)\}</style>", "", text, flags=re.S)
    for value, variable in _VARIABLES.items():
        text = re.sub(rf"{value}\b", f"var(--{variable}, {value})", text, flags=re.I)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px; font-family: system-ui, sans-serif", text)
    text = re.sub(r"<svg ", f'<svg role="img" aria-label="{_attribute(description)}" ', text, count=1)
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """The positions moved as little as needed so that neighbours are at least `gap` apart, their order kept."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    groups: list[list[float]] = []  # [sum of wanted first places, count]
    for index in order:
        groups.append([positions[index], 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] + groups[-2][1] * gap > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total - count * groups[-1][1] * gap
            groups[-1][1] += count
    placed = [total / count + place * gap for total, count in groups for place in range(int(count))]
    result = [0.0] * len(positions)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result


def log_axis(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers at the decades of a log axis, and between them where `values` span less than two."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    kept = [value for value in values if value > 0]
    wide = not kept or max(kept) > 100 * min(kept)
    axis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def label_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside each point: clear of points and other texts, and of lines where that can be."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    spots = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    lines = [spot for line in axes.lines for spot in _along(line.get_transform().transform(line.get_xydata()))]
    taken: list[Bbox] = []
    for number, ((x, y, words, tint), own) in enumerate(zip(points, spots, strict=True)):
        choices = []
        for dx, dy, side in _OFFSETS:
            text = axes.annotate(
                words, (x, y), (dx, dy), textcoords="offset points", color=tint, fontsize=8, ha=side, va="center"
            )
            text.set_in_layout(False)
            text.set_gid(f"label-{number}")
            box = text.get_window_extent(renderer)
            out = (
                box.x0 < frame.x0
                or box.x1 > min(frame.x1 + 24 * scale, figure.bbox.x1 - 2 * scale)
                or box.y0 < frame.y0
                or box.y1 > frame.y1
            )
            covered = sum(box.overlaps(other) for other in taken)
            covered += sum(box.padded(3 * scale).contains(*spot) for spot in spots if spot is not own)
            crossed = sum(box.contains(*spot) for spot in lines)
            choices.append((out, covered, crossed + (abs(dx) + abs(dy)) / 3, len(choices), text, box))
            if not out and not covered and not crossed:
                break
        chosen = min(choices, key=lambda choice: choice[:4])
        for choice in choices:
            if choice is not chosen:
                choice[4].remove()
        taken.append(chosen[5])


def _along(corners: Any) -> Iterator[tuple[float, float]]:
    """Spots 4 pixels apart on a line through `corners` [N, 2]."""
    for (x0, y0), (x1, y1) in zip(corners[:-1], corners[1:], strict=True):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        count = max(1, int(length / 4)) if length < 1e5 else 1
        for step in range(count + 1):
            yield x0 + (x1 - x0) * step / count, y0 + (y1 - y0) * step / count


_OFFSETS: tuple[tuple[float, float, str], ...] = (
    (7, 0, "left"),
    (-7, 0, "right"),
    (5, 9, "left"),
    (5, -9, "left"),
    (-5, 9, "right"),
    (-5, -9, "right"),
    (0, 12, "center"),
    (0, -12, "center"),
    (5, 15, "left"),
    (5, -15, "left"),
    (-5, 15, "right"),
    (-5, -15, "right"),
    (8, 18, "left"),
    (8, -18, "left"),
    (-8, 18, "right"),
    (-8, -18, "right"),
    (0, 26, "center"),
    (0, -26, "center"),
    (12, 34, "left"),
    (-12, -34, "right"),
    (12, 46, "left"),
    (-12, -46, "right"),
)


def family_name(subject: Mapping[str, Any]) -> str:
    """deltakv, vqkv, kivi2, "int" for the integer methods, else the method's name."""
    method = str(subject.get("method") or "")
    return "int" if method in ("int8", "int4", "int3") else method


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def encode(figure: Figure, format: str) -> bytes:
    """The figure as a file of its own, on white."""
    target = io.BytesIO()
    options = {"metadata": {"Date": None, "Creator": None}} if format == "svg" else {"dpi": 192}
    figure.savefig(target, format=format, facecolor="white", **options)
    return target.getvalue()
