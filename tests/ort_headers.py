"""ONNX Runtime's C headers, which no package of pip's has: found on the machine, or fetched from Debian's archive."""

from __future__ import annotations

from pathlib import Path

import debian

from plugins.cache import cache_folder
from plugins.native.faces import ONNXRUNTIME, find_headers

SUITE, PACKAGE = "trixie", "libonnxruntime-dev"  # 85 KB; Debian 12 has none


def find() -> Path:
    """The folder of onnxruntime_c_api.h. Raises debian.Unavailable."""
    installed = find_headers(ONNXRUNTIME)
    if installed is not None:
        return installed
    root = cache_folder() / "onnxruntime-headers"
    if not root.is_dir():
        debian.unpack(PACKAGE, root, "usr/include/onnxruntime/onnxruntime_c_api.h", SUITE)
    return root / "usr/include/onnxruntime"
