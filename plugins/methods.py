"""The compression methods by name. A method is the folder plugins/<name>; what it consists of is imported when asked.

config.py: `Config`, a MethodConfig. reference.py (torch): `LayerCodec`, one layer's fitted tables, and `LayerCache`.
onnx_body.py (onnx_ir): `plan` and `tables`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from plugins.errors import UserError

if TYPE_CHECKING:
    from plugins.config import MethodConfig

DEFAULT_RATIOS = {"deltakv": 0.29, "vqkv": 0.172}
METHODS = tuple(DEFAULT_RATIOS)
DEFAULT_METHOD = "deltakv"


def config_class(method: str) -> type[MethodConfig]:
    """The configuration class of a method. Raises UserError for an unknown one."""
    return _part(method, "config").Config


def reference(method: str) -> ModuleType:
    return _part(method, "reference")


def onnx_body(method: str) -> ModuleType:
    return _part(method, "onnx_body")


def _part(method: str, part: str) -> ModuleType:
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown: use one of {', '.join(METHODS)}")
    return import_module(f"plugins.{method}.{part}")
