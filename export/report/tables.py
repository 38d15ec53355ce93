"""The tables of a report, as rows of words: the page and the terminal draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .view import View, average, fraction, nats, number, percent, pooled

MIB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """text, and smaller beside it `note`; best: no subject of at most as many bytes does as well."""

    text: str
    note: str = ""
    best: bool = False


@dataclass
class Table:
    """The first column names the row; the others are numbers."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""

    def trimmed(self) -> Table:
        """Without the columns that say nothing in any row."""
        kept = [place for place in range(len(self.columns)) if any(row[place].text for row in self.rows)]
        rows = [[row[place] for place in kept] for row in self.rows]
        return Table(self.title, [self.columns[place] for place in kept], rows, self.note)


@dataclass(frozen=True)
class _Column:
    """read(label) -> (value, note). less: is less better? (None: nothing is marked). exact: of the uncompressed."""

    name: str
    read: Callable[[str], tuple[float, str]]
    show: Callable[[float], str]
    less: bool | None
    exact: str = ""


def losses(view: View, length: int) -> Table:
    """Bytes, perplexity per text and on average, KL and top-1 of every subject at one length."""
    share, *sizes = _byte_columns(view, length)
    columns = [share]
    for text in view.texts:

        def change(label: str, text: str = text) -> tuple[float, str]:
            score = pooled([cell for cell in view.find(label, "ppl", length) if str(cell.get("text") or "") == text])
            return (score.value, _interval(score, percent)) if score else (math.nan, "")

        exact = [
            number(cell.get("exact"))
            for cell in view.cells
            if (cell["task"], cell["length"], str(cell.get("text") or "")) == ("ppl", length, text)
        ]
        columns.append(_Column(f"ppl, {_stem(text)}", change, percent, True, _plain(average(exact), ".2f")))

    def loss(task: str, show: Callable[[float], str]) -> Callable[[str], tuple[float, str]]:
        def read(label: str) -> tuple[float, str]:
            score = view.score(label, task, length)
            return (score.value, _interval(score, show)) if score else (math.nan, "")

        return read

    def top1(label: str) -> tuple[float, str]:
        return average(number(cell.get("top1")) for cell in view.find(label, "kld", length)), ""

    if len(view.texts) > 1:
        columns.append(_Column("ppl, mean", loss("ppl", percent), percent, True))
    columns.append(_Column("KL, nats", loss("kld", nats), nats, True, "0"))
    columns.append(_Column("top-1", top1, _share, False, "100 %"))
    columns += sizes
    note = "ppl: rise over the uncompressed cache, whose own perplexity stands in its row. Small print: 95 % intervals."
    return _table(view, length, f"What is lost at {length:,} tokens", columns, note)


def accuracies(view: View, length: int) -> Table | None:
    """Share of right answers per task; None without any such task."""
    tasks = view.tasks(length)
    if not tasks:
        return None
    columns = _byte_columns(view, length)[:1]
    for task, variant in tasks:

        def right(label: str, task: str = task, variant: str = variant) -> tuple[float, str]:
            score = view.score(label, task, length, variant)
            return (score.value, _interval(score, lambda value: f"{100 * value:.0f}")) if score else (math.nan, "")

        scores = [score for label in view.labels(length) if (score := view.score(label, task, length, variant))]
        exact = average(score.exact for score in scores)
        columns.append(_Column(f"{task} {variant}".strip(), right, _share, False, _plain(exact, ".0%", " %")))
    return _table(
        view, length, f"Right answers at {length:,} tokens", columns, "Small print: 95 % intervals in per cent."
    )


def overview(said: Sequence[Mapping[str, Any]]) -> Table | None:
    """Of verdicts: who loses less KL at no more bytes, a row per model and length; None without any."""
    judged = [entry for entry in said if entry["task"] == "kld"]
    baselines = list(dict.fromkeys(entry["baseline"] for entry in judged))
    table = Table("Who loses less at no more bytes", ["model", *(f"against {name}" for name in baselines)])
    table.note = "By KL divergence from the uncompressed cache, in nats. Bold: deltakv or vqkv loses less."
    for model, length in dict.fromkeys((entry["model"], entry["length"]) for entry in judged):
        row = {entry["baseline"]: entry for entry in judged if (entry["model"], entry["length"]) == (model, length)}
        table.rows.append([Cell(model, f"{length:,} tokens"), *(_judged(row.get(name)) for name in baselines)])
    return table if judged else None


def subjects(view: View) -> Table:
    """What was measured: configurations, where from, tables."""
    table = Table("What was measured", ["subject", "configuration", "fit", "run as", "exact rows", "tables", "digest"])
    for subject in view.subjects:
        fit = " ".join(str(subject.get(name) or "") for name in ("fit", "effort")).strip()
        source = {"engine": "engine", "codec": "simulated codec"}.get(str(subject.get("source")), "")
        words = [subject["label"], subject.get("summary"), fit, source, subject.get("kv_dtype")]
        words += [mib(number(subject.get("fixed_bytes"))), str(subject.get("digest") or "")[:12]]
        table.rows.append([Cell(str(word or "")) for word in words])
    return table.trimmed()


def latency(bench: Mapping[str, Any]) -> Table:
    """Milliseconds of a latency bench, decoding at each fixed past as a column."""
    pasts = list(dict.fromkeys(spot.get("past") for engine in bench["engines"] for spot in engine.get("decode") or ()))
    columns = ["engine", "TTFT, ms", "TPOT, ms", "ITL p50", "ITL p90", "ITL p99"]
    columns += [f"decode at {past:,}, ms" for past in pasts] + ["cache", "peak resident"]
    table = Table("Latency", columns, note=_settings(bench))
    for engine in bench["engines"]:
        ratios, gaps = engine.get("ratios") or {}, engine.get("itl_ms") or {}
        row = [Cell(str(engine.get("label") or ""))]
        row += [_timed(number(engine.get(f"{name}_ms")), number(ratios.get(name))) for name in ("ttft", "tpot")]
        row += [_timed(number(gaps.get(name)), math.nan) for name in ("p50", "p90", "p99")]
        steps = {spot.get("past"): spot for spot in engine.get("decode") or ()}
        for past in pasts:
            spot = steps.get(past) or {}
            row.append(_timed(number(spot.get("ms")), number(spot.get("ratio"))))
        row += [Cell(mib(number(engine.get(name)))) for name in ("cache_bytes", "peak_resident_bytes")]
        table.rows.append(row)
    return table.trimmed()


def oom(bench: Mapping[str, Any]) -> Table:
    """The longest contexts of an oom-length bench, their bounds and gains."""
    columns = ["engine", "longest", "bound by bytes", "of bound", "gain", "gain by bytes", "of that", "real prefill"]
    table = Table("Longest context that fits", [*columns, "base"], note=_settings(bench))
    for engine in bench["engines"]:
        counts = [_plain(number(engine.get(name)), ",.0f") for name in ("found", "bound")]
        gains = [_plain(number(engine.get(name)), ".2f", "×") for name in ("gain", "allowed_gain")]
        words = [str(engine.get("label") or ""), *counts, _share(number(engine.get("of_bound"))), *gains]
        words += [_share(number(engine.get("of_gain"))), _plain(number(engine.get("prefill_found")), ",.0f")]
        table.rows.append([Cell(word) for word in [*words, mib(number(engine.get("base_bytes")))]])
    return table.trimmed()


def mib(size: float) -> str:
    if not math.isfinite(size):
        return ""
    if size < MIB:
        return f"{size / 1024:,.0f} KiB"
    return f"{size / MIB:,.1f} MiB" if size < 1000 * MIB else f"{size / MIB / 1024:,.2f} GiB"


def _judged(entry: Mapping[str, Any] | None) -> Cell:
    if entry is None:
        return Cell("")
    if entry["best"] is None:
        return Cell("nothing as small")
    ours, theirs = nats(entry["best_value"]), nats(entry["baseline_value"])
    if entry["winner"] == "ours":
        return Cell(entry["best"], f"{ours} against {theirs}", True)
    first = entry["baseline"] if entry["winner"] == "baseline" else "the same"
    return Cell(first, f"{theirs} against {ours} ({entry['best']})")


def _byte_columns(view: View, length: int) -> list[_Column]:
    def share(label: str) -> tuple[float, str]:
        return fraction(view.subject(label), length), ""

    def size(label: str) -> tuple[float, str]:
        return number((view.subject(label).get("bytes") or {}).get(str(length))), ""

    def fixed(label: str) -> tuple[float, str]:
        return number(view.subject(label).get("fixed_bytes")), ""

    return [
        _Column("bytes, of fp16", share, lambda value: f"{value:.3f}", None, "1"),
        _Column("one sequence", size, mib, None),
        _Column("tables", fixed, mib, None),
    ]


def _table(view: View, length: int, title: str, columns: Sequence[_Column], note: str) -> Table:
    labels = view.labels(length)
    values = {column.name: {label: column.read(label) for label in labels} for column in columns}
    kept = [column for column in columns if any(math.isfinite(value) for value, _ in values[column.name].values())]
    sizes = {label: fraction(view.subject(label), length) for label in labels}
    table = Table(title, ["subject", *(column.name for column in kept)], note=note)
    table.note += " Bold: no subject of at most as many bytes does as well." if len(labels) > 1 else ""
    table.rows.append([Cell("uncompressed"), *(Cell(column.exact) for column in kept)])
    for label in labels:
        row = [Cell(label)]
        for column in kept:
            value, interval = values[column.name][label]
            best = len(labels) > 1 and _leads(label, column, values[column.name], sizes)
            row.append(Cell(column.show(value), interval, best) if math.isfinite(value) else Cell(""))
        table.rows.append(row)
    return table


def _leads(label: str, column: _Column, values: Mapping[str, tuple[float, str]], sizes: Mapping[str, float]) -> bool:
    own = values[label][0]
    if column.less is None or not math.isfinite(own) or not math.isfinite(sizes[label]):
        return False
    sign = 1 if column.less else -1
    others = [other for other in values if other != label and math.isfinite(values[other][0])]
    return not any(
        sign * values[other][0] < sign * own or (values[other][0] == own and sizes[other] < sizes[label])
        for other in others
        if sizes[other] <= sizes[label]
    )


def _interval(score: Any, show: Callable[[float], str]) -> str:
    if not score.has_interval:
        return ""
    low, high = (show(end).removesuffix(" %") for end in (score.low, score.high))
    return f"{low} .. {high}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %".replace(".0 %", " %") if math.isfinite(value) else ""


def _plain(value: float, form: str, suffix: str = "") -> str:
    if not math.isfinite(value):
        return ""
    return format(value, form).removesuffix("%") + suffix


def _timed(value: float, ratio: float) -> Cell:
    return Cell(_plain(value, ",.4g"), _plain(ratio, ".2f", "×"))


def _settings(bench: Mapping[str, Any]) -> str:
    words = []
    for name, value in (bench.get("settings") or {}).items():
        if value is None or value is False or isinstance(value, Mapping):
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        size = isinstance(value, (int, float)) and "memory" in name
        words.append(f"{name.replace('_', '-')} {mib(number(value)) if size else shown}")
    return "; ".join(words)


def _stem(text: str) -> str:
    return text.rsplit(".", 1)[0] if "." in text else text
