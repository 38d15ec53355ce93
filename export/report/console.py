"""The report's tables and verdicts in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from . import tables
from .comparison import verdicts
from .view import views

NARROW = 110  # columns of a terminal below which tables leave out intervals


def console(stderr: bool = False) -> Console:
    """A terminal as wide as it is, a file or pipe as wide as the tables are."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=max(found.width, 180))


def show(report: Mapping[str, Any], out: Console | None = None) -> None:
    """Print the tables and verdicts of every model and length, then the benches."""
    out = out or console()
    said = verdicts(report)
    for view in views(report):
        for length in view.lengths:
            for table in (tables.losses(view, length), tables.accuracies(view, length)):
                if table and len(table.columns) > 1:
                    _print(out, table, f"{view.name}: {table.title}")
            own = [entry for entry in said if (entry["model"], entry["length"]) == (view.name, length)]
            for entry in own:
                if entry["task"] in ("kld", "ppl") or entry["winner"] != "tie":
                    tint = {"ours": "green", "baseline": "yellow"}.get(entry["winner"], "default")
                    out.print(f"[{tint}]•[/] {escape(entry['sentence'])}")
            if own:
                out.print()
    glance = tables.overview(said)
    if glance:
        _print(out, glance, glance.title)
    for bench in report.get("benches") or ():
        make = {"latency": tables.latency, "oom-length": tables.oom}.get(str(bench.get("bench")))
        if make and bench.get("engines"):
            table = make(bench)
            _print(out, table, table.title)


def _print(out: Console, table: tables.Table, title: str) -> None:
    drawn = RichTable(box=box.SIMPLE_HEAD, title=escape(title), caption=escape(table.note), title_justify="left")
    drawn.caption_justify, drawn.title_style, drawn.caption_style = "left", "bold", "dim"
    for number, name in enumerate(table.columns):
        drawn.add_column(escape(name), justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        drawn.add_row(*(_words(cell, out.width >= NARROW) for cell in row))
    out.print(drawn)


def _words(cell: tables.Cell, notes: bool) -> str:
    text = f"[bold]{escape(cell.text)}[/]" if cell.best else escape(cell.text)
    return f"{text}\n[dim]{escape(cell.note.replace(' .. ', '..'))}[/]" if cell.note and notes else text
