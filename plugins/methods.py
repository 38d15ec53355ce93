"""The compression methods by name. A method lives in a folder of plugins/, which is imported when asked.

config.py: its MethodConfig. reference.py (torch): `LayerCodec`, one layer's fitted tables, and `LayerCache`.
onnx_body.py (onnx_ir): `plan` and `tables`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from plugins.errors import UserError

if TYPE_CHECKING:
    from plugins.config import MethodConfig

DEFAULT_RATIOS = {"deltakv": 0.29, "vqkv": 0.172}  # of the methods that --ratio configures
DEFAULT_METHOD = "deltakv"
# Name -> folder and configuration class. The integer methods are one folder's presets.
_HOMES = {
    "deltakv": ("deltakv", "DeltaKVConfig"),
    "vqkv": ("vqkv", "VQKVConfig"),
    "int8": ("intkv", "Int8Config"),
    "int4": ("intkv", "Int4Config"),
    "int3": ("intkv", "Int3Config"),
    "kivi2": ("intkv", "KIVI2Config"),
}
METHODS = tuple(_HOMES)


def label(method: str, ratio: float) -> str:
    """How tables and pictures call a cache: "deltakv 0.29", "vqkv 0.172", "none", "int4"."""
    return f"{method} {round(ratio, 3):g}" if method in DEFAULT_RATIOS else method


def folder(method: str) -> str:
    """The folder of a method, which is also its module in calib/. Raises UserError for an unknown method."""
    return _home(method)[0]


def config_class(method: str) -> type[MethodConfig]:
    """The configuration class of a method. Raises UserError for an unknown one."""
    name = _home(method)[1]
    return getattr(_part(method, "config"), name)


def reference(method: str) -> ModuleType:
    return _part(method, "reference")


def onnx_body(method: str) -> ModuleType:
    return _part(method, "onnx_body")


def _part(method: str, part: str) -> ModuleType:
    return import_module(f"plugins.{folder(method)}.{part}")


def _home(method: str) -> tuple[str, str]:
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown: use one of {', '.join(METHODS)}")
    return _HOMES[method]
