"""What a compressed cache answers and what it loses, beside the uncompressed one: `evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import evaluate

__all__ = ["evaluate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'export.eval' has no attribute {name!r}")
    from .run import evaluate

    return evaluate
