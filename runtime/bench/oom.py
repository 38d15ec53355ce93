"""The longest context that fits into an amount of memory, found by trying, with the bound that arithmetic gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import UserError
from runtime.artefact import Artefact, state_bytes
from runtime.backend import is_plan, provider_for
from runtime.bench.memory import GIB, Limit, give_back, held_bytes, untouched_bytes
from runtime.bench.process import TIDY, OutOfMemory, asked, engine_of, measure, progress
from runtime.bench.report import document, entries, opened
from runtime.engine import Engine
from runtime.machine import available_bytes

STEP = 256  # tokens; lengths are multiples of it
FINENESS = 256  # ... or of about this fraction of the bound, where that is coarser
FOLLOWED = 4  # times that the search follows what a trial tells about the room it left
SHORTEST_CURVE = 1024
LONGEST = 1 << 27  # tokens that no search goes beyond: positions are int32


def oom_length(
    engines: Sequence[str | Path],
    *,
    memory: int,
    prefill: bool = False,
    provider: str | None = None,
    threads: int | None = None,
    library: str | bool | None = None,
    cuda_graphs: bool = True,
    verify: bool = True,
    self_check: bool = False,
    seed: int = 0,
    progress_bar: bool = False,
) -> dict[str, Any]:
    """The longest context of one sequence that each engine holds in `memory` bytes, as JSON-ready numbers.

    A trial is a process of its own that is limited to `memory` (on a CPU by its measured peak of resident memory, and
    by RLIMIT_DATA, which also counts what is mapped and never touched, so that much is added; on CUDA the device, by a
    ballast), opens the engine, fills a session with synthetic content and runs one decode step, so that it ends with
    that many tokens. Running out of memory, a failed step and a kill are results. The engine's own limit of length is
    lifted for this but for TensorRT plans, and glibc is told to give freed memory back ("allocator"). Lengths are
    multiples of "step" tokens.
    Per engine:
    * "found": the longest that fits (0: not even one step). "trials": each one tried, and why it did not fit.
    * "base_bytes": what a process holds after one decode step at 256 tokens, without that session's cache. "bound":
      the longest whose planned cache fits beside it. "of_bound": found / bound.
    * "gain": found over that of the first `none` engine (or the first engine). "allowed_gain": the gain that the bytes
      per token at the found lengths allow. "of_gain": gain / allowed_gain.
    * "curve": planned bytes of the cache and what the process grew by, at powers of two.
    * "prefill_found": with `prefill`, the longest real prompt of random tokens within the engine's own limit that fits.
    Raises UserError.
    """
    artefacts = opened(engines)
    if not artefacts:
        raise UserError("there is no engine to measure: pass --engine.")
    if memory < 1:
        raise UserError(f"--memory is {memory} bytes: it must be positive.")
    provider = provider_for(artefacts, provider)
    if provider == "cpu" and (free := available_bytes()) < memory:
        raise UserError(
            f"--memory is {memory / GIB:.1f} GiB and this machine has {free / GIB:.1f} GiB available: lower it."
        )
    settings = {
        "memory": memory, "prefill": prefill, "provider": provider, "threads": threads, "library": library,
        "cuda_graphs": cuda_graphs, "seed": seed,
    }  # fmt: skip
    about = {**settings, "allocator": TIDY}
    found = []
    with progress("oom-length", None, progress_bar) as say:
        for artefact, head in zip(artefacts, entries(artefacts), strict=True):

            def name(what: str, label: str = head["label"]) -> None:
                say(f"{label}, {what}")

            job = {**settings, **asked(head["engine"], provider, threads, False, False, library, cuda_graphs)}
            checked = {**job, "verify": verify, "self_check": self_check}
            found.append({**head, **_search(artefact, checked, job, name)})
    _compare(found, artefacts)
    return document("oom-length", about, found)


def _search(
    artefact: Artefact, checked: Mapping[str, Any], job: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything about one engine but what needs another: see `oom_length`."""
    memory = job["memory"]
    say("base")
    measured = measure({"task": "base", **checked}, TIDY)
    base_bytes, job = measured["base"], {**job, "untouched": measured["untouched"]}
    bound = longest_planned(artefact, memory - base_bytes)
    step = max(STEP, bound // FINENESS // STEP * STEP)
    trials: list[dict[str, Any]] = []

    def spare(tokens: int, task: str) -> int | None:
        """Tokens that a trial of `tokens` leaves room for, by its peak; below 0: it did not fit; None: it failed."""
        say(f"{task} of {tokens:,} tokens")
        try:
            peak = measure({"task": "trial", "what": task, "tokens": tokens, **job}, TIDY)["peak"]
        except OutOfMemory as error:
            left, why = None, str(error)
        else:
            left = (memory - peak) * tokens // state_bytes(artefact, tokens)
            why = f"the process held {peak:,} bytes at its peak" if left < 0 else ""
        if task == "context":
            trials.append({"tokens": tokens, "fits": not why, "why": why})
        return left

    found, prompt = 0, 0 if job["prefill"] else None
    if bound:
        found = longest(lambda tokens: spare(tokens, "context"), bound - step, step, reach(artefact))
    else:
        trials.append({"tokens": STEP, "fits": False, "why": f"without a cache the process holds {base_bytes:,} bytes"})
    if bound and job["prefill"]:
        top = artefact.max_length // STEP * STEP
        prompt = longest(lambda tokens: spare(tokens, "prefill"), top, STEP, top)
    say("resident memory")
    lengths = [1 << power for power in range(SHORTEST_CURVE.bit_length() - 1, found.bit_length())]
    points = measure({"task": "curve", "lengths": lengths, **job}, TIDY)["curve"] if lengths else []
    return {
        "base_bytes": base_bytes, "found": found, "bound": bound, "of_bound": found / bound if bound else None,
        "prefill_found": prompt, "step": step, "curve": points, "trials": trials,
    }  # fmt: skip


def reach(artefact: Artefact) -> int:
    """Tokens that no search goes beyond: the profiles of a plan end at the engine's own limit."""
    return artefact.max_length if is_plan(artefact) else LONGEST


def longest_planned(artefact: Artefact, room: int) -> int:
    """The longest multiple of STEP tokens whose planned cache takes at most `room` bytes; 0 when none does."""
    low, high = 0, reach(artefact) // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if state_bytes(artefact, middle * STEP) <= room else (low, middle - 1)
    return low * STEP


def longest(spare: Callable[[int], int | None], guess: int, step: int, top: int) -> int:
    """The largest multiple of `step` tokens up to `top` that fits, if all below some length fit and none above.

    spare(tokens): how many more tokens than these would fit, as far as it can tell; negative when they do not fit,
    None when they do not and it cannot tell. Follows what it tells at first; then moves away from the last length by
    growing jumps until the answer is enclosed, and bisects. 0: nothing fits.
    """
    end = top // step + 1
    low, high = 0, end  # in steps: `low` fits or is 0, `high` does not fit or is out of reach
    at, jump, told = min(max(guess // step, 1), end - 1), 1, FOLLOWED
    while low + 1 < high:
        left = spare(at * step)
        fits = left is not None and left >= 0
        low, high = (at, high) if fits else (low, at)
        if left is not None and told:
            at, told = at + left // step, told - 1
        elif low > 0 and high < end:
            at = (low + high) // 2
        else:  # one side has not been seen yet
            at, jump = low + jump if fits else high - jump, 2 * jump
        at = min(max(at, low + 1), high - 1)
    return low * step


def _compare(found: Sequence[dict[str, Any]], artefacts: Sequence[Artefact]) -> None:
    """Add the gains over the first `none` engine, or over the first one."""
    place = next((number for number, entry in enumerate(found) if entry["method"] == "none"), 0)
    reference = found[place]["found"]
    per_token = [
        state_bytes(artefact, entry["found"]) / entry["found"] if entry["found"] else None
        for artefact, entry in zip(artefacts, found, strict=True)
    ]
    for entry, each in zip(found, per_token, strict=True):
        known = each is not None and reference > 0
        entry["gain"] = entry["found"] / reference if known else None
        entry["allowed_gain"] = per_token[place] / each if known else None
        entry["of_gain"] = entry["gain"] / entry["allowed_gain"] if known else None


def _lift(engine: Engine, tokens: int) -> None:
    """Let sessions of `engine` hold `tokens` tokens; positions beyond the engine's own limit repeat its last one."""
    artefact = engine.artefact
    engine.artefact = replace(artefact, max_length=max(artefact.max_length, tokens))


def base(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a worker, without a limit: bytes held after one decode step at STEP tokens, the session's cache left out."""
    start = held_bytes(job["provider"]) if job["provider"] == "cuda" else 0
    with engine_of(job) as engine, engine.session() as session:
        _lift(engine, STEP)
        session.allocate(STEP)
        session.fill(STEP - 1, job["seed"])
        session.decode([0])
        held = held_bytes(job["provider"]) - start
        return {"base": held - session.nbytes, "untouched": untouched_bytes()}


def trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a worker, under the limit: the peak of a context of job["tokens"] tokens, synthetic or really read."""
    tokens = job["tokens"]
    limit = Limit(job["memory"], job["provider"], job["untouched"])
    with engine_of(job) as engine, engine.session() as session:
        if job["what"] == "prefill":
            prompt = np.random.default_rng(job["seed"]).integers(engine.artefact.vocab_size, size=tokens)
            session.prefill(prompt)
        else:
            _lift(engine, tokens)
            session.allocate(tokens)
            session.fill(tokens - 1, job["seed"])
            session.decode([0])
        return {"peak": limit.peak()}


def curve(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a worker, without a limit: at each of job["lengths"] the planned bytes and what the process grew by."""
    points = []
    with engine_of(job) as engine:
        _lift(engine, max(job["lengths"]))
        with engine.session(capacity=STEP) as session:  # what a first use leaves behind is not the cache's
            session.fill(STEP - 1, job["seed"])
            session.decode([0])
        for tokens in job["lengths"]:
            give_back()
            before = held_bytes(job["provider"])
            with engine.session() as session:
                session.allocate(tokens)
                session.fill(tokens, job["seed"])
                grown = held_bytes(job["provider"]) - before
                points.append({"tokens": tokens, "planned_bytes": session.nbytes, "resident_bytes": grown})
    return {"curve": points}
