"""Evaluations and benches read back from disk, for one report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.errors import UserError

from .run import EVALUATION, FORMAT

REPORT = "report.json"
BENCHES = ("latency", "oom-length")


def read_evaluations(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The evaluations of folders that `export eval` or `export report` wrote, in order. Raises UserError."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        path = next((folder / name for name in (EVALUATION, REPORT) if (folder / name).is_file()), None)
        if path is None:
            raise UserError(f"{folder} holds no {REPORT}: name folders that `python -m export eval` wrote")
        content = _json(path)
        evaluations = content.get("evaluations") if path.name == REPORT else [content]
        if content.get("format") != FORMAT or not isinstance(evaluations, list):
            raise UserError(f"{path} is not readable here: make it again with `python -m export eval`")
        found += evaluations
    return found


def read_benches(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What `python -m runtime bench latency` and `oom-length` wrote with --out. Raises UserError."""
    found = [_json(path) for path in paths]
    for path, bench in zip(paths, found, strict=True):
        if bench.get("bench") not in BENCHES:
            raise UserError(
                f"--bench {path} is of neither {' nor '.join(BENCHES)}: make it with `python -m runtime bench`"
            )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: write it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: write it again")
    return content
