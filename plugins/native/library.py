"""Where the built native library is, and whether it can run an engine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.cache import cache_folder
from plugins.errors import UserError
from plugins.native.abi import ABI, Library
from plugins.native.faces import ONNXRUNTIME, Face
from plugins.native.nodes import OPS, uncovered

ROOT = Path(__file__).parent
VARIABLE = "KVPACK_LIBRARY"
OFF = "none"  # its value for no library at all
HALF = {"fp16": "float16", "bf16": "bfloat16"}


def default_path() -> Path:
    """Where `python -m plugins build` puts the library of these sources: others have another name."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "kvpack.h", *(p for p in (ROOT / "src").iterdir() if p.is_file())]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_folder() / "native" / f"libkvpack-{ABI}-{digest.hexdigest()[:16]}.so"


def find(library: str | Path | bool | None = None) -> Path:
    """The library's file: the one named, KVPACK_LIBRARY's, or that of `python -m plugins build`.

    False, or KVPACK_LIBRARY=none: no library. Raises UserError with the reason when there is none.
    """
    given = os.environ.get(VARIABLE) or None
    if library is False or (library in (None, True) and given == OFF):
        raise UserError("native kernels were not wanted")
    if library in (None, True):
        if given is None:
            path = default_path()
            if not path.is_file():
                raise UserError("no native library was built: run `python -m plugins build`")
            return path
        library = given
    path = Path(library)
    if not path.is_file():
        raise UserError(f"there is no native library {path}: run `python -m plugins build`")
    return path.absolute()  # a bare name would be searched for elsewhere


def choose(config: Mapping[str, Any], library: str | Path | bool | None = None) -> tuple[Path | None, str]:
    """The library that runs every attention of the engine with this config.json; None, and why there is none.

    Raises UserError instead when `library` names a file.
    """
    try:
        path = find(library)
        check(path, config)
        return path, ""
    except UserError as error:
        if isinstance(library, str | Path):
            raise
        return None, str(error)


def check(path: Path, config: Mapping[str, Any], face: Face = ONNXRUNTIME) -> None:
    """Raises UserError, with the reason, when the library of `path` does not run every attention of an engine by a
    framework."""
    dtype, kv_dtype = config["dtype"], config["kv_dtype"]
    if dtype != kv_dtype or dtype not in HALF:
        raise UserError(
            f"the native kernels compute in fp16 or bf16 throughout, and this engine has dtype {dtype} with a cache in "
            f"{kv_dtype}: build it with --dtype bf16"
        )
    if "nodes" not in config:
        raise UserError("this engine does not tell its attentions: build it again")
    opened = Library(path)
    if not hasattr(opened.handle, face.symbol):
        raise UserError(
            f"{path} was compiled without {face.framework}'s headers: run `python -m plugins build {face.option}`"
        )
    seen: list[Any] = []
    for node in config["nodes"]:
        if node in seen:  # most layers are alike
            continue
        seen.append(node)
        op, attributes = node["op"], node["attributes"]
        if reason := uncovered(opened, op, attributes, HALF[dtype]) if op in OPS else "it is unknown to this kvpack":
            raise UserError(f"{path} has no kernel for an {op} of this engine ({reason})")
