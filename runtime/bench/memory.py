"""What a process holds and may hold: resident memory on a CPU, device memory on a CUDA GPU."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from plugins.errors import UserError
from runtime.device import device

GIB = 1 << 30


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most bytes of this process that were in memory at once."""
    return _status("VmHWM")


def untouched_bytes() -> int:
    """Bytes of private writable mappings that take no memory: stacks and buffers nobody used, weights read in place."""
    return max(_status("VmData") - _status("RssAnon"), 0)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def held_bytes(provider: str) -> int:
    """Resident memory, or on CUDA the device memory in use by anyone, which is never given back to the device."""
    if provider != "cuda":
        return resident_bytes()
    return device().total_bytes() - device_free()


def give_back() -> None:
    """Return the free pages of this process's heap to the system, where the C library can (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Limit:
    """Holds this process to `memory` bytes from now on; on CUDA all of the device but that is taken by a ballast.

    untouched: bytes that an engine maps without using them, which the system counts as data all the same.
    """

    def __init__(self, memory: int, provider: str, untouched: int) -> None:
        self.memory = memory
        self.provider = provider
        if provider == "cuda":
            self._fill_device()
            self.start = held_bytes(provider)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (memory + untouched,) * 2)
            self.start = 0
            with suppress(OSError):  # should the machine itself run short, this process is the one to go
                Path("/proc/self/oom_score_adj").write_text("1000")

    def peak(self) -> int:
        """The most bytes held since the limit was set."""
        return held_bytes("cuda") - self.start if self.provider == "cuda" else peak_bytes()

    def _fill_device(self) -> None:
        free = device_free()
        if free < self.memory:
            raise UserError(
                f"--memory is {self.memory / GIB:.1f} GiB and the device has {free / GIB:.1f} GiB free: lower it."
            )
        device().allocate(free - self.memory)  # a ballast that goes with the process


def device_free() -> int:
    return device().free_bytes()
