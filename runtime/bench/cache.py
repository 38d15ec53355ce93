"""Two measurements of the runtime itself: does decode time ignore capacity, does memory stay flat over sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from plugins.errors import UserError
from runtime.bench.memory import resident_bytes
from runtime.engine import Engine

WARMUP = 3
SETTLED = 100  # sessions after which memory should have stopped growing


def capacity(engine: Engine, length: int, capacities: Sequence[int], steps: int) -> dict[str, Any]:
    """Median seconds of a decode step at `length` stored tokens, for several allocated capacities.

    The steps of all capacities alternate, so that a slow moment of the machine hits all of them alike. Capacities may
    exceed the engine's limit; lengths may not.
    """
    last = length + WARMUP + steps
    limit = engine.artefact.max_length
    if length < 1 or steps < 1 or not capacities:
        raise UserError(f"length {length}, steps {steps} and the number of capacities must be at least 1.")
    if last > min(limit, *capacities):
        raise UserError(
            f"length {length} plus {WARMUP + steps} steps exceed {min(limit, *capacities)}, "
            "the smallest of the capacities and the engine's limit: lower --length or --steps."
        )
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        sessions = []
        for tokens in capacities:
            session = stack.enter_context(engine.session())
            session.allocate(tokens)
            session.fill(length)
            sessions.append(session)
        times: list[list[float]] = [[] for _ in sessions]
        for _ in range(WARMUP + steps):
            token = int(rng.integers(engine.artefact.vocab_size))
            for session, taken in zip(sessions, times, strict=True):
                started = time.perf_counter()
                session.decode([token])
                taken.append(time.perf_counter() - started)
        medians = [median(taken[WARMUP:]) for taken in times]
        held = [session.nbytes / 2**20 for session in sessions]
        rows = [
            {"capacity": tokens, "cache MiB": mebibytes, "median ms": 1e3 * middle, "ratio": middle / medians[0]}
            for tokens, mebibytes, middle in zip(capacities, held, medians, strict=True)
        ]
    return {"title": f"one decode step at length {length}, {steps} steps each", "length": length, "rows": rows}


def sessions(engine: Engine, count: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Resident memory while `count` sessions are opened, used and closed one after the other."""
    if count < 1 or prompt_len < 1 or steps < 0 or prompt_len + steps > engine.artefact.max_length:
        raise UserError(
            f"count {count}, prompt-len {prompt_len} and steps {steps} must be positive and fit the engine's limit of "
            f"{engine.artefact.max_length} tokens."
        )
    rng = np.random.default_rng(0)
    marks = sorted({1, min(SETTLED, count), count})
    rows = []
    for number in range(1, count + 1):
        with engine.session() as session:
            logits = session.prefill(rng.integers(engine.artefact.vocab_size, size=prompt_len))[:, 0]
            for _ in range(steps):
                logits = session.decode(logits.argmax(-1))
        if number in marks:
            rows.append({"sessions": number, "resident MiB": resident_bytes() / 2**20})
    settled = next(row for row in rows if row["sessions"] == min(SETTLED, count))
    growth = rows[-1]["resident MiB"] - settled["resident MiB"]
    return {"title": f"grown by {growth:.2f} MiB after the first {SETTLED}", "growth_mib": growth, "rows": rows}
