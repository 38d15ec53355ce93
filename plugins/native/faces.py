"""The native library's faces: its ops for a framework, compiled in where that framework's headers are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import UserError


@dataclass(frozen=True)
class Face:
    """The ops for one framework, compiled in where its headers are.

    framework: its name. source: in src/. symbol: what a library with it exports. header: what shows the folder of the
    headers. option, variable: what name that folder. folders: where it is looked for. inside: below each of them and
    below what was named, too. least: the oldest version that will do, by VERSION_HEADER; () where any does.
    """

    framework: str
    source: str
    symbol: str
    header: str
    option: str
    variable: str
    folders: tuple[str, ...]
    inside: tuple[str, ...] = ("",)
    least: tuple[int, ...] = ()


ONNXRUNTIME = Face(
    "ONNX Runtime",
    "onnxruntime.cc",
    "RegisterCustomOps",
    "onnxruntime_c_api.h",
    "--onnxruntime-include",
    "ONNXRUNTIME_INCLUDE_DIR",
    ("/usr/include", "/usr/local/include"),
    ("", "onnxruntime", "include", "core/session", "onnxruntime/core/session"),
)
TENSORRT = Face(
    "TensorRT",
    "tensorrt.cc",
    "getCreators",
    "NvInferRuntime.h",
    "--tensorrt-include",
    "TENSORRT_INCLUDE_DIR",
    ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/local/include", "/usr/local/tensorrt"),
    ("", "include"),
    (10, 3),  # plugins whose outputs are aliases of inputs
)
VERSION_HEADER = "NvInferVersion.h"


def find_headers(face: Face, given: str | Path | None = None) -> Path | None:
    """The folder of a face's headers: the one given, its variable's or a system folder; None: nowhere.

    Raises UserError when it is not where it was said, or too old.
    """
    for name, value in {face.option: given, face.variable: os.environ.get(face.variable)}.items():
        if value:
            for folder in _holders(face, value):
                if not _new_enough(face, folder):
                    least = ".".join(map(str, face.least))
                    raise UserError(f"{name} {value} is of a {face.framework} before {least}: give a newer one's")
                return folder
            raise UserError(
                f"{name} {value} holds no {face.header}: give the folder include/ of a release of {face.framework}"
            )
    found = (folder for place in face.folders for folder in _holders(face, place) if _new_enough(face, folder))
    return next(found, None)


def _holders(face: Face, place: str | Path) -> Iterator[Path]:
    """The folders of a place that have the face's header."""
    yield from (folder for inner in face.inside if ((folder := Path(place) / inner) / face.header).is_file())


def _new_enough(face: Face, folder: Path) -> bool:
    if not face.least:
        return True
    try:
        text = (folder / VERSION_HEADER).read_text(encoding="utf-8")
    except OSError:
        return False
    found = dict(re.findall(r"#define (?:NV_TENSORRT|TRT)_(MAJOR|MINOR)\w* (\d+)", text))
    return (int(found.get("MAJOR", 0)), int(found.get("MINOR", 0))) >= face.least
