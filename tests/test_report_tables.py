"""The tables of a report, and how they are printed."""

from __future__ import annotations

import io
from typing import Any

import report_data
from rich.console import Console

from export import report
from export.report import tables
from export.report.view import View, nats, percent, views


def view_of(subjects: dict[str, tuple[float, float]]) -> View:
    """One text, one length; label -> (fraction, KL)."""
    cells = [
        {"subject": label, "task": "kld", "text": "a.txt", "length": 64, "samples": 1, "value": loss, "interval": None}
        for label, (_, loss) in subjects.items()
    ]
    found = [{"label": label, "method": "vqkv", "fractions": {"64": share}} for label, (share, _) in subjects.items()]
    return views({"evaluations": [{"model": {"name": "m"}, "subjects": found, "cells": cells}]})[0]


def column(table: tables.Table, name: str) -> dict[str, tables.Cell]:
    place = table.columns.index(name)
    return {row[0].text: row[place] for row in table.rows}


def test_a_value_is_marked_where_no_smaller_cache_does_as_well() -> None:
    view = view_of({"a": (0.5, 0.002), "b": (0.3, 0.002), "c": (0.2, 0.01), "d": (0.25, 0.02), "e": (0.6, 0.001)})
    cells = column(tables.losses(view, 64), "KL, nats")
    assert {label for label, cell in cells.items() if cell.best} == {"e", "b", "c"}


def test_the_largest_cache_comes_first_after_the_uncompressed_one() -> None:
    table = tables.losses(view_of({"a": (0.2, 0.1), "b": (0.5, 0.2)}), 64)
    assert [row[0].text for row in table.rows] == ["uncompressed", "b", "a"]


def test_columns_without_a_number_are_left_out() -> None:
    table = tables.losses(view_of({"a": (0.2, 0.1)}), 64)
    assert table.columns == ["subject", "bytes, of fp16", "KL, nats"]
    assert tables.accuracies(view_of({"a": (0.2, 0.1)}), 64) is None


def test_losses_stand_per_text_with_their_intervals() -> None:
    (view, _) = views(report_data.full())
    cell = next(
        cell
        for cell in view.find("int4", "ppl", 4096)
        if cell["text"] == "austen.txt"
    )  # fmt: skip
    shown = column(tables.losses(view, 4096), "ppl, austen")["int4"]
    low, high = cell["interval"]
    assert shown.text == f"{100 * cell['change']:+.2f} %"
    assert shown.note == f"{100 * low:+.2f} .. {100 * high:+.2f}"
    assert column(tables.losses(view, 4096), "ppl, austen")["uncompressed"].text == "26.60"


def test_accuracies_stand_beside_the_uncompressed_ones() -> None:
    (view, _) = views(report_data.full())
    table = tables.accuracies(view, 4096)
    assert table is not None
    assert column(table, "kvrecall pairs")["uncompressed"].text == "60 %"
    assert table.columns[2:] == [f"{task} {variant}" for task, variant, _ in report_data.QUESTIONS]


def test_the_overview_names_who_loses_less() -> None:
    data = report_data.full()
    said = report.verdicts(data)
    table = tables.overview(said)
    assert table is not None
    assert table.columns == ["model", "against int8", "against int4", "against int3", "against kivi2"]
    assert len(table.rows) == 4
    entry = next(entry for entry in said if entry["task"] == "kld" and entry["baseline"] == "kivi2")
    cell = table.rows[0][4]
    assert (entry["winner"], cell.text, cell.best) == ("ours", entry["best"], True)
    assert (table.rows[0][1].text, table.rows[0][1].best) == ("int8", False)
    assert tables.overview([]) is None


def test_bench_tables_hold_what_was_measured() -> None:
    (row, *_) = tables.latency(report_data.latency()).rows
    assert [row[0].text, row[1].text, row[1].note, row[2].text] == ["none", "1,850", "1.00×", "21"]
    table = tables.oom(report_data.oom())
    assert column(table, "longest")["none"].text == "288,000"
    assert column(table, "of bound")["none"].text == "96 %"
    assert "memory 8.00 GiB" in table.note
    bench = report_data.oom()
    for engine in bench["engines"]:
        engine["prefill_found"] = None
    assert "real prefill" in table.columns and "real prefill" not in tables.oom(bench).columns


def test_what_rounds_to_nothing_has_no_sign() -> None:
    shown = [percent(value) for value in (0.0123, -0.0123, -1e-9, 12.0)]
    assert shown == ["+1.23 %", "-1.23 %", "0.00 %", "+1,200.00 %"]
    assert [nats(value) for value in (0.00271, 0.000271, -6e-10)] == ["0.0027", "2.7e-04", "0"]


def printed(data: dict[str, Any], width: int) -> str:
    out = Console(file=io.StringIO(), width=width)
    report.show(data, out)
    return out.file.getvalue()


def test_the_terminal_shows_tables_verdicts_and_benches() -> None:
    data = report_data.full()
    text = printed(data, 200)
    assert "Qwen2.5-Coder-0.5B-Instruct: What is lost at 8,192 tokens" in text
    assert "Longest context that fits" in text
    sentence = next(entry["sentence"] for entry in report.verdicts(data) if entry["task"] == "kld")
    assert sentence in text
    low, high = views(data)[0].find("int8", "kld", 4096)[0]["interval"]
    assert low < high and ".." in text


def test_a_narrow_terminal_gets_no_intervals() -> None:
    assert ".." not in printed(report_data.full(), 100).replace("...", "")


def test_an_empty_report_prints_nothing() -> None:
    assert printed({"format": 1, "evaluations": [], "benches": []}, 100) == ""
