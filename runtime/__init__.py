"""kvpack's runtime: opens an engine, owns its cache, steps it, samples. Public names load on first use."""

from __future__ import annotations

_HOME = {
    "Engine": "runtime.engine",
    "Session": "runtime.session",
    "Snapshot": "runtime.state",
    "SelfCheckFailed": "runtime.canary",
    "ContextOverflow": "runtime.session",
    "Artefact": "runtime.artefact",
    "SamplingParams": "runtime.sampling",
    "Token": "runtime.generate",
    "Completion": "runtime.generate",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
