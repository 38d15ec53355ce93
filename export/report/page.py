"""report.json and report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.progress import track

from plugins.errors import UserError
from plugins.files import write_whole

from . import tables
from .comparison import verdicts
from .console import console
from .drawings import Drawing, drawings
from .view import View, views

FORMAT = 1


def write(report: Mapping[str, Any], folder: Path) -> None:
    if report.get("format") != FORMAT:
        raise UserError(
            f"this report is of format {report.get('format')!r}; this version of kvpack reads format {FORMAT}"
        )
    report = {**report, "verdicts": verdicts(report)}
    page = render(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "report.json", json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")
        write_whole(folder / "report.html", page)
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder} ({error.strerror}); choose another --out") from error


def render(report: Mapping[str, Any]) -> str:
    """The page of a report that has its verdicts."""
    bar = console(stderr=True)
    drawn = track(drawings(report), "drawing", console=bar, transient=True, disable=not bar.is_terminal)
    pictures = [(drawing, _picture(drawing)) for drawing in drawn]
    models = [
        _model(view, [picture for drawing, picture in pictures if drawing.section == f"model {number}"], report)
        for number, view in enumerate(views(report))
    ]
    benches = [
        _bench(bench, [picture for drawing, picture in pictures if drawing.section == f"bench {number}"])
        for number, bench in enumerate(report.get("benches") or ())
        if bench.get("engines")
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.lstrip_blocks = True
    return environment.get_template("page.html.jinja").render(
        models=models, benches=benches, overview=tables.overview(report["verdicts"])
    )


def _model(view: View, pictures: list[dict[str, Any]], report: Mapping[str, Any]) -> dict[str, Any]:
    lengths = []
    for length in view.lengths:
        said = [entry for entry in report["verdicts"] if (entry["model"], entry["length"]) == (view.name, length)]
        found = [tables.losses(view, length), tables.accuracies(view, length)]
        lengths.append(
            {
                "length": length,
                "verdicts": [entry for entry in said if entry["task"] in ("kld", "ppl") or entry["winner"] != "tie"],
                "tables": [table for table in found if table and len(table.columns) > 1],
                "pictures": [picture for picture in pictures if picture["length"] == length],
            }
        )
    shape = [
        f"{view.model[key]} {words}"
        for key, words in (("num_layers", "layers"), ("num_kv_heads", "KV heads"), ("head_dim", "values a head"))
        if view.model.get(key)
    ]
    return {
        "name": view.name,
        "about": ", ".join([*filter(None, [view.model.get("architecture")]), *shape]),
        "lengths": lengths,
        "pictures": [picture for picture in pictures if not picture["length"]],
        "subjects": tables.subjects(view),
        "notes": _notes(view.evaluations),
        "facts": [fact for evaluation in view.evaluations for fact in _facts(evaluation)],
    }


def _bench(bench: Mapping[str, Any], pictures: list[dict[str, Any]]) -> dict[str, Any]:
    make = {"latency": tables.latency, "oom-length": tables.oom}.get(str(bench.get("bench")))
    models = dict.fromkeys(str(engine.get("model") or "") for engine in bench["engines"])
    return {
        "table": make(bench) if make else tables.Table(str(bench.get("bench")), []),
        "pictures": pictures,
        "models": ", ".join(filter(None, models)),
        "machine": _machine(bench.get("machine") or {}),
    }


def _picture(drawing: Drawing) -> dict[str, Any]:
    # the SVG is matplotlib's own, which escapes its texts
    return {**vars(drawing), "svg": Markup(drawing.svg())}


def _notes(evaluations: Iterable[Mapping[str, Any]]) -> list[str]:
    found = [evaluation.get("notes") or [] for evaluation in evaluations]
    return list(dict.fromkeys(str(note) for notes in found for note in ([notes] if isinstance(notes, str) else notes)))


def _facts(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    texts = [f"{text.get('name')} (sha256 {str(text.get('sha256'))[:12]})" for text in evaluation.get("texts") or ()]
    facts = [
        ("command", evaluation.get("command")),
        ("texts", ", ".join(texts)),
        ("seed", evaluation.get("seed")),
        ("model's sha256", (evaluation.get("model") or {}).get("sha256")),
        ("machine", _machine(evaluation.get("machine") or {})),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _machine(machine: Mapping[str, Any]) -> str:
    memory = machine.get("memory_bytes")
    versions = [f"{name} {version}" for name, version in (machine.get("versions") or {}).items() if version]
    words = [
        machine.get("gpu"),
        machine.get("cpu"),
        f"{machine['cores']} cores" if machine.get("cores") else "",
        f"{memory / (1 << 30):.0f} GiB" if memory else "",
        f"Python {machine['python']}" if machine.get("python") else "",
        *versions,
    ]
    return ", ".join(str(word) for word in words if word)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
