"""The JSON that the benches return: who was measured, on what, with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plugins.methods import label
from runtime.artefact import Artefact
from runtime.machine import describe


def entries(artefacts: Sequence[Artefact]) -> list[dict[str, Any]]:
    """The keys with which each engine's entry begins. Equal labels are told apart by a number."""
    found: list[dict[str, Any]] = []
    for artefact in artefacts:
        config = artefact.config
        method, ratio = config["method"]["name"], config["method"]["ratio"]
        name = label(method, ratio)
        same = sum(entry["label"].partition(" (")[0] == name for entry in found)
        found.append(
            {
                "engine": str(artefact.path),
                "label": f"{name} ({same + 1})" if same else name,
                "method": method,
                "ratio": ratio,
                "model": config["model"]["name"],
                "dtype": config["dtype"],
                "kv_dtype": config["kv_dtype"],
                "max_length": artefact.max_length,
            }
        )
    return found


def spot(batch: int, past: int, visits: Sequence[Sequence[float] | None], base: float | None) -> dict[str, Any]:
    """Decode steps of `batch` sequences at `past` tokens: visits, seconds of each; None: it did not fit in memory.

    base: milliseconds that the first engine took; None where it took none.
    """
    found = {"batch": batch, "past": past, "ms": None, "mean_ms": None, "tokens_per_second": None, "ratio": None}
    if all(visits):
        steps = 1e3 * np.concatenate(visits)
        took = float(np.median(steps))
        found |= {"ms": took, "mean_ms": float(steps.mean()), "tokens_per_second": 1e3 * batch / took}
        found["ratio"] = took / base if base else None
    return found


def document(bench: str, settings: dict[str, Any], engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"bench": bench, "machine": describe(), "settings": settings, "engines": list(engines)}


def opened(paths: Sequence[str | Path]) -> list[Artefact]:
    """The engines' checked folders, without reading their files: the workers verify those."""
    return [Artefact.open(path, verify=False) for path in paths]
