"""One report of what compressed caches lose, hold and cost: a self-contained page, tables for a terminal, figures.

report = {"format": 1, "evaluations": [of export.eval, ...], "benches": [JSON of `runtime bench`, ...]}; numbers may be
missing or not finite, and what they would show is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .comparison import verdicts
from .console import show

__all__ = ["figures", "save_figures", "show", "verdicts", "write"]


def write(report: Mapping[str, Any], folder: str | Path) -> None:
    """Write report.json (with its "verdicts") and report.html, each of which appears whole or not at all.

    The page needs no network and no script. Raises UserError when the report is of another format or cannot be written.
    """
    from .page import write

    write(report, Path(folder))


def figures(report: Mapping[str, Any]) -> dict[str, str]:
    """Name -> <svg> element; the page it stands in may set the colours --ink, --faint, --grid, --blue, ..."""
    from .drawings import drawings

    return {drawing.name: drawing.svg() for drawing in drawings(report)}


def save_figures(report: Mapping[str, Any], folder: str | Path, format: str = "png") -> list[Path]:
    """Write every figure as FOLDER/NAME.png or .svg, on white, and return the paths."""
    from .drawings import save

    return save(report, Path(folder), format)
