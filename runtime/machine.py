"""What a measurement ran on: processor, memory, accelerator and package versions, for reports."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "kvpack",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu13-bindings",
    "tokenizers",
    "torch",
    "transformers",
    "onnx",
)
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def describe() -> dict[str, Any]:
    """A JSON-ready description of this machine; nothing is imported and what cannot be found out is None or left out.

    "cpu": model name. "cores": those this process may use. "memory_bytes": of the machine, or of the control group
    where that is less. "gpu": name and memory of the first one, as nvidia-smi tells, or None. "python", "platform".
    "versions": package name -> version, of the installed ones among PACKAGES.
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
    }


def memory_bytes() -> int:
    """Bytes of memory that processes here may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, _control_group("memory.max", physical))


def available_bytes() -> int:
    """Bytes of memory that are free now or would be freed for whoever asks."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else memory_bytes()
    limit = _control_group("memory.max", 0)
    return min(free, limit - _control_group("memory.current", 0)) if limit else free


def _control_group(name: str, otherwise: int) -> int:
    """A number of the control group as it is mounted in a container; `otherwise` when there is none or no limit."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return otherwise
    return int(text) if text.isdigit() else otherwise


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpu() -> str | None:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
        name, mebibytes = done.stdout.splitlines()[0].rsplit(",", 1)
        return f"{name.strip()}, {int(mebibytes) / 1024:.0f} GiB"
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
