"""What an engine holds and costs: method, tensors, aliases, bytes, break-even length; and what its plan does."""

from __future__ import annotations

import json
from typing import Any

from plugins.errors import UserError
from runtime.artefact import Artefact, fp16_bytes, state_bytes

LENGTHS = (4096, 32768, 131072)


def memory_table(artefact: Artefact) -> list[dict[str, float | bool]]:
    """Bytes of one sequence, as the runtime holds them, at the engine's limit and at LENGTHS (even past the limit)."""
    limit = artefact.max_length
    rows = []
    for tokens in sorted({*LENGTHS, limit}):
        held, dense = state_bytes(artefact, tokens), fp16_bytes(artefact, tokens)
        fixed = artefact.config["fixed_bytes"]
        rows.append(
            {
                "tokens": tokens,
                "within_limit": tokens <= limit,
                "bytes": held,
                "bytes_per_token": held / tokens,
                "fp16_bytes": dense,
                "ratio": held / dense,
                "ratio_with_fixed": (held + fixed) / dense,
            }
        )
    return rows


def describe(artefact: Artefact) -> dict[str, Any]:
    """Everything `inspect` prints, as JSON."""
    config = artefact.config
    described = {
        "model": config["model"],
        "method": config["method"],
        "dtype": config["dtype"],
        "kv_dtype": config["kv_dtype"],
        "max_length": artefact.max_length,
        "geometry": config["geometry"],
        "tensors": [spec.to_json() for spec in (*artefact.inputs, *artefact.outputs)],
        "aliases": {spec.name: spec.alias for spec in artefact.states},
        "fixed_bytes": config["fixed_bytes"],
        "memory": memory_table(artefact),
        "break_even": artefact.break_even,
        "target": config["target"],
    }
    if config["target"].get("plan"):
        described["plan"] = describe_plan(artefact)
    return described


def describe_plan(artefact: Artefact) -> dict[str, Any]:
    """What report.json tells of a plan, see `export.tensorrt.plan.make`; layers and states from the plan itself where
    it can be opened. "unopened": why it was not; then they are what TensorRT said when it built the plan."""
    from .tensorrt.plan import TOLD, look

    report = json.loads((artefact.path / "report.json").read_text(encoding="utf-8"))
    told = {name: report["plan"][name] for name in TOLD} | {"unopened": None}
    try:
        return told | look(artefact.path, artefact.config)
    except UserError as error:
        return told | {"unopened": str(error)}
