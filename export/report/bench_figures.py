"""The figures about the benches: latency, and the longest context that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import ink
from .view import number


def latency(panels: Any, bench: Mapping[str, Any]) -> None:
    """panels: two axes, for TTFT and TPOT. The ratios are to the first engine."""
    engines = list(bench.get("engines") or ())[::-1]
    for axes, name, title in zip(
        panels, ("ttft", "tpot"), ("Time to first token, ms", "Time per token, ms"), strict=True
    ):
        values = [number(engine.get(f"{name}_ms")) for engine in engines]
        ratios = [number((engine.get("ratios") or {}).get(name)) for engine in engines]
        _bars(axes, engines, values)
        for place, (value, ratio) in enumerate(zip(values, ratios, strict=True)):
            if math.isfinite(value):
                note = f"{value:,.4g}" + (f"  ({ratio:.2f}×)" if math.isfinite(ratio) else "")
                axes.annotate(note, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        _finish(axes, title, max((value for value in values if math.isfinite(value)), default=1) * 1.45)


def oom(axes: Any, bench: Mapping[str, Any]) -> None:
    """Bars to the longest context found, a tick at the bound by bytes."""
    engines = list(bench.get("engines") or ())[::-1]
    found = [number(engine.get("found")) for engine in engines]
    bounds = [number(engine.get("bound")) for engine in engines]
    _bars(axes, engines, found)
    for place, (engine, value, bound) in enumerate(zip(engines, found, bounds, strict=True)):
        if math.isfinite(bound):
            axes.plot([bound, bound], [place - 0.36, place + 0.36], color=ink.INK, linewidth=1.6)
        if math.isfinite(value):
            gain = number(engine.get("gain"))
            note = f"{value:,.0f}" + (f"  ({gain:.2f}×)" if math.isfinite(gain) else "")
            right = max(value, bound) if math.isfinite(bound) else value
            axes.annotate(note, (right, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    _finish(axes, "Longest context, tokens", max([*_finite(found), *_finite(bounds)], default=1) * 1.3)
    axes.xaxis.set_major_locator(_few())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def resident(axes: Any, bench: Mapping[str, Any]) -> None:
    """Measured growth of resident memory over the planned bytes of the same session."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    spots = []
    for engine in bench.get("engines") or ():
        tint, mark = ink.colour(str(engine.get("method") or "")), ink.marker(str(engine.get("method") or ""))
        curve = [
            (number(spot.get("planned_bytes")), number(spot.get("resident_bytes")))
            for spot in engine.get("curve") or ()
        ]
        curve = [(x / (1 << 20), y / (1 << 20)) for x, y in curve if x > 0 and y > 0]
        if curve:
            xs, ys = zip(*curve, strict=True)
            axes.plot(xs, ys, mark, color=tint, markersize=4.5, alpha=0.85)
            spots += [*xs, *ys]
    if spots:
        ends = [min(spots), max(spots)]
        axes.plot(ends, ends, color=ink.FAINT, linewidth=0.9, zorder=1)
        axes.annotate("equal", (ends[1], ends[1]), (-4, -12), textcoords="offset points", color=ink.FAINT, fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:.2g}")
    axes.set_xlabel("planned MiB of the session")
    axes.set_title("Resident growth, MiB")


def _bars(axes: Any, engines: list[Mapping[str, Any]], values: list[float]) -> None:
    tints = [ink.colour(str(engine.get("method") or "")) for engine in engines]
    drawn = [value if math.isfinite(value) else 0.0 for value in values]
    axes.barh(range(len(engines)), drawn, height=0.6, color=tints, alpha=0.8)
    axes.set_yticks(range(len(engines)), [str(engine.get("label") or "") for engine in engines])


def _finish(axes: Any, title: str, right: float) -> None:
    axes.set_title(title)
    axes.set_xlim(0, right)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(_few())


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
