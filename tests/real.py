"""Engines of the built-in model and what slow tests measure on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from export.cli import main
from runtime import Engine
from runtime.canary import log_softmax


def built(out: Path, *options: str) -> Path:
    """`export build` with exact rows in float32, so that the engine can be held to the reference."""
    assert main(["build", *options, "--kv-dtype", "fp32", "--out", str(out)]) == 0
    return out


def losses(folder: Path, windows: Sequence[Sequence[int]], decoded: int) -> list[float]:
    """Per window the engine's mean negative log-likelihood (nats) of the last `decoded` tokens, fed one by one."""
    found = []
    with Engine.open(folder) as engine:
        for window in windows:
            start = len(window) - decoded
            with engine.session() as session:
                session.prefill(window[:start])
                logits = np.stack([session.decode([token])[0] for token in window[start:-1]])
            target = np.asarray(window[start + 1 :])
            found.append(-float(log_softmax(logits)[np.arange(len(target)), target].mean()))
    return found


def run(script: str, *arguments: str, **environment: str) -> list[int]:
    """The integers that a Python script prints, run in a process of its own with these variables set as well."""
    command, variables = [sys.executable, "-c", script, *arguments], {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def prefill_peak(folder: Path, tokens: int) -> int:
    """Bytes by which the prefill of a prompt raises the highest resident memory of a process."""
    script = (
        "import sys\n"
        "from runtime import Engine\n"
        "def peak():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(status.split('VmHWM:')[1].split()[0])\n"
        "with Engine.open(sys.argv[1]) as engine, engine.session() as session:\n"
        "    session.prefill([5] * 32)\n"
        "    open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak starts anew
        "    before = peak()\n"
        "    session.prefill([7] * int(sys.argv[2]))\n"
        "    print(peak() - before)\n"
    )
    return run(script, str(folder), str(tokens))[0] * 1024


def cache_bytes(folder: Path, tokens: int) -> tuple[int, int]:
    """Bytes of the cache of a session with `tokens` tokens: what the session says, and what the process grew by."""
    script = (
        "import sys\n"
        "from runtime import Engine\n"
        "from runtime.bench import resident_bytes\n"
        "with Engine.open(sys.argv[1]) as engine:\n"
        "    with engine.session(capacity=256) as session:\n"
        "        session.fill(256)\n"
        "    before = resident_bytes()\n"
        "    with engine.session(capacity=int(sys.argv[2])) as session:\n"
        "        session.fill(int(sys.argv[2]))\n"
        "        print(session.nbytes, resident_bytes() - before)\n"
    )
    # every larger array gets pages of its own, which go back to the system when it is freed
    said, grown = run(script, str(folder), str(tokens), MALLOC_MMAP_THRESHOLD_="65536")
    return said, grown
