"""Measuring in processes of their own: the parent's side, and what they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from plugins import terminal
from plugins.errors import UserError
from runtime.engine import Engine

# Every larger array gets pages of its own, and what is freed goes back to the system at once.
TIDY = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
SIGKILL = 9
BAD_INPUT = 2
NO_MEMORY = (
    "bad_alloc", "bad allocation", "out of memory", "failed to allocate", "cannot allocate", "memoryerror", "no memory"
)  # fmt: skip


class OutOfMemory(Exception):
    """The process could not have the memory it asked for."""


def measure(job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `job` (see `runtime.bench.worker`) in a fresh process and return what it measured.

    environment: variables to set for it. TIDY makes memory measurable, at the price of speed.
    Raises OutOfMemory when the process ran out of memory or was killed for it, and UserError for any other failure.
    """
    command = [sys.executable, "-m", "runtime.bench.worker", json.dumps(job)]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        answer = json.loads(done.stdout.splitlines()[-1])
        if "out_of_memory" in answer:
            raise OutOfMemory(answer["out_of_memory"])
        return answer
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == BAD_INPUT:
        raise UserError(last.removeprefix("error: "))
    if done.returncode == -SIGKILL:
        raise OutOfMemory("killed, as the kernel does when memory runs out")
    if ran_out(done.stderr):
        raise OutOfMemory(last)
    raise UserError(f"measuring {job['engine']} failed with exit code {done.returncode} ({last}).")


def ran_out(text: str) -> bool:
    """Whether an error message is about memory."""
    return any(phrase in text.lower() for phrase in NO_MEMORY)


@contextmanager
def engine_of(job: Mapping[str, Any]) -> Iterator[Engine]:
    """The engine that a job names, opened as it says."""
    with Engine.open(
        job["engine"],
        provider=job["provider"],
        threads=job["threads"],
        verify=job["verify"],
        library=job["library"],
        cuda_graphs=job["cuda_graphs"],
    ) as engine:
        if job["self_check"]:
            engine.self_check()
        yield engine


def asked(
    engine: str,
    provider: str,
    threads: int | None,
    verify: bool,
    self_check: bool,
    library: str | bool | None = None,
    cuda_graphs: bool = True,
) -> dict[str, Any]:
    """The part of a job that `engine_of` reads; library and cuda_graphs as for `Engine.open`."""
    return {
        "engine": engine, "provider": provider, "threads": threads, "verify": verify, "self_check": self_check,
        "library": library, "cuda_graphs": cuda_graphs,
    }  # fmt: skip


@contextmanager
def progress(title: str, total: int | None, shown: bool) -> Iterator[Any]:
    """Yields a function to call with what comes next, once per piece of work; draws a bar on stderr if `shown`."""
    if not shown:
        yield lambda what: None
        return
    with terminal.bar(title, total) as update:
        begun = [False]

        def step(what: str) -> None:
            update(what, int(begun[0]))
            begun[0] = True

        yield step
        update("", int(begun[0]))
