"""An engine's plan in the place of its ONNX graph."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from plugins.errors import UserError
from plugins.native import library as native
from plugins.native.faces import TENSORRT

from .graph import write_graph
from .options import PlanOptions, own_capability, timing_cache
from .packages import PACKAGES
from .process import ask

MODEL, WEIGHTS = "model.onnx", "model.onnx.data"
GRAPH, PLAN, PLUGINS = "plan.onnx", "engine.plan", "libkvpack_tensorrt.so"
TOLD = ("layers", "states", "memory", "warnings", "seconds", "bytes")


def check_plugins(config: dict[str, Any], backend: str, options: PlanOptions) -> Path | None:
    """The library whose plugins run every attention of an engine with this config.json; None where the backend takes
    none. Raises UserError."""
    if not PACKAGES[backend].plugins:
        return None
    path = native.find(options.library)
    native.check(path, config, TENSORRT)
    return path


def make(folder: Path, config: dict[str, Any], backend: str, options: PlanOptions) -> dict[str, Any]:
    """Build the plan of the engine whose graph is in `folder`, and make `config` the plan's.

    The graph and its weights go, unless they are asked for, or needed as those of a plan without weights. Returns what
    the report tells of the plan, as JSON. Raises UserError.
    """
    package, limit = PACKAGES[backend], config["limits"]["max_length"]
    library = check_plugins(config, backend, options)
    if library is not None:
        shutil.copyfile(library, folder / PLUGINS)
    profiles = [profile.to_json() for profile in options.profiles(backend, limit)]
    sm = options.capabilities(backend)
    write_graph(folder / MODEL, folder / GRAPH, package.plugins)
    request = {
        "backend": backend,
        "graph": str(folder / GRAPH),
        "plan": str(folder / PLAN),
        "inputs": config["inputs"],
        "outputs": config["outputs"],
        "geometry": config["geometry"],
        "limit": limit,
        "profiles": profiles,
        "sm": sm,
        "flags": options.flags(backend),
        "hardware_compatible": options.hardware_compatible,
        "library": str(folder / PLUGINS) if library else None,
        "timing_cache": str(timing_cache(sm)) if package.plugins else None,
    }
    result = ask("build", request)
    config["target"] = {
        "backend": backend,
        "versions": {**config["target"]["versions"], package.name: result["version"]},
        "sm": sm,
        "plan": PLAN,
        "plugins": PLUGINS if library else None,
        "profiles": profiles,
        "in_place": package.plugins,
        "version_compatible": options.version_compatible,
        "hardware_compatible": options.hardware_compatible,
        "weights": GRAPH if options.strip_weights else None,
    }
    kept = {MODEL, WEIGHTS} if options.keep_onnx else set()
    kept |= {GRAPH, WEIGHTS} if options.strip_weights else set()
    for name in {MODEL, WEIGHTS, GRAPH} - kept:
        (folder / name).unlink(missing_ok=True)
    return {name: result[name] for name in TOLD}


def look(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The layers and states of an engine's plan, by opening it. Raises UserError where that is not possible."""
    target = config["target"]
    if own_capability() is None:
        raise UserError("there is no NVIDIA GPU here to open it on")
    return ask(
        "inspect",
        {
            "backend": target["backend"],
            "plan": str(folder / target["plan"]),
            "library": str(folder / target["plugins"]) if target["plugins"] else None,
            "aliases": {entry["name"]: entry["alias"] for entry in config["inputs"] if entry["alias"]},
        },
    )
