"""How fast engines are: time to the first token, time per token, and throughput of prefill and of decode, apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import UserError
from runtime.artefact import Artefact
from runtime.backend import provider_for
from runtime.bench import static_cache
from runtime.bench.memory import held_bytes, peak_bytes
from runtime.bench.process import OutOfMemory, asked, engine_of, measure, progress, ran_out
from runtime.bench.report import document, entries, opened, spot
from runtime.session import StepFailed

WARMUP = 3  # decode steps before those that are timed
DECODE_STEPS = 32  # timed decode steps at each past length and repeat: one of them encodes a block
REPLAYED = 3  # on a GPU a kind of step is replayed from its third on: as many blocks are decoded before, too
PERCENTILES = (50, 90, 99)


def latency(
    engines: Sequence[str | Path],
    *,
    input_len: int = 1024,
    output_len: int = 64,
    batch: int = 1,
    past: Sequence[int] = (1024, 4096),
    decode: Sequence[tuple[int, int]] = (),
    prefill: Sequence[int] = (),
    repeats: int = 3,
    provider: str | None = None,
    threads: int | None = None,
    library: str | bool | None = None,
    cuda_graphs: bool = True,
    verify: bool = True,
    self_check: bool = False,
    seed: int = 0,
    transformers: str | Path | None = None,
    progress_bar: bool = False,
) -> dict[str, Any]:
    """Speed of each engine beside the first one, as JSON-ready numbers.

    A repeat visits every engine, each time starting with the next one; a visit is a process of its own, which opens the
    engine, warms up (one prefill of `input_len` tokens and WARMUP decode steps, not timed) and measures:
    * a generation of `output_len` tokens (greedy) after a prompt of `input_len` random ones, in `batch` sequences: TTFT
      is the time of the prefill and of picking the token, ITL every gap between tokens after it, TPOT their mean;
    * the prefill alone of fresh prompts of the lengths `prefill` (default: input_len);
    * DECODE_STEPS decode steps, after WARMUP more, at each of the `past` lengths, which synthetic content fills; and
      the same for each (sequences, tokens) of `decode`, whose times are None where that does not fit in memory.
    Times are medians over the repeats (and steps), ITL is of all gaps together. Ratios are to the first engine, more
    than 1 is slower. "peak_resident_bytes" is the most memory (on CUDA, of the device) that a visit's process held up
    to the end of the generation, loading included. provider, library, cuda_graphs: as for `Engine.open`, but that all
    engines run where one of them must. transformers: a Hugging Face folder, whose decode steps with a static cache are
    measured beside, in the first engine's dtype (`runtime.bench.static_cache`). Raises UserError.
    """
    artefacts = opened(engines)
    provider = provider_for(artefacts, provider)
    prefill = tuple(prefill) or (input_len,)
    settings = {
        "input_len": input_len, "output_len": output_len, "batch": batch, "past": list(past), "prefill": list(prefill),
        "decode": [list(one) for one in decode],
        "repeats": repeats, "provider": provider, "threads": threads, "library": library, "cuda_graphs": cuda_graphs,
        "seed": seed,
        "warmup": f"per visit, not timed: a prefill of {input_len} tokens and {WARMUP} decode steps; {WARMUP} decode "
        "steps at each past length",
        "decode_steps": DECODE_STEPS,
    }  # fmt: skip
    _check(artefacts, settings)
    visits: list[list[dict[str, Any]]] = [[] for _ in artefacts]
    heads = entries(artefacts)
    plain: list[dict[str, Any]] = []
    turns = len(artefacts) + (transformers is not None)
    with progress("latency", repeats * turns, progress_bar) as say:
        for repeat in range(repeats):
            for turn in range(len(artefacts)):
                number = (repeat + turn) % len(artefacts)
                head = heads[number]
                say(f"{head['label']}, repeat {repeat + 1}")
                first = repeat == 0
                check = (verify and first, self_check and first)
                job = asked(head["engine"], provider, threads, *check, library, cuda_graphs)
                try:
                    visits[number].append(measure({"task": "latency", **job, **settings}))
                except OutOfMemory as error:
                    raise UserError(
                        f"{head['engine']} ran out of memory ({error}): use a smaller --input-len, --batch or --past."
                    ) from None
            if transformers is not None:
                say(f"{static_cache.LABEL}, repeat {repeat + 1}")
                plain.append(measure(_plain_job(transformers, heads[0]["dtype"], settings)))
    report = document("latency", settings, _summaries(heads, visits, settings))
    if plain:
        report["transformers"] = static_cache.summary(plain, settings, report["engines"][0])
    return report


def _plain_job(model: str | Path, dtype: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The job of `static_cache.visit`."""
    steps = {"steps": DECODE_STEPS, "warmup": WARMUP}
    return {"task": "static cache", "engine": str(model), "model": str(model), "dtype": dtype, **settings, **steps}


def visit(job: Mapping[str, Any]) -> dict[str, Any]:
    """One visit, in a worker: seconds of each part of it."""
    rng = np.random.default_rng(job["seed"])
    batch = job["batch"]
    with engine_of(job) as engine:
        prompts = rng.integers(engine.artefact.vocab_size, size=(batch, max(job["input_len"], *job["prefill"])))

        def timed(length: int, steps: int) -> tuple[list[float], int]:
            """Seconds of a prefill with the pick of a token, then of each decode step; and the bytes of the cache."""
            with engine.session(batch) as session:
                taken, started = [], time.perf_counter()
                tokens = session.prefill(prompts[:, :length].tolist())[:, -1].argmax(-1)
                for _ in range(steps):
                    taken.append(time.perf_counter() - started)
                    started = time.perf_counter()
                    tokens = session.decode(tokens).argmax(-1)
                return [*taken, time.perf_counter() - started], session.nbytes

        timed(job["input_len"], WARMUP)
        (ttft, *gaps), cache = timed(job["input_len"], job["output_len"] - 1)
        peak = held_bytes("cuda") if job["provider"] == "cuda" else peak_bytes()
        alone = {}
        for length in job["prefill"]:
            with engine.session(batch) as session:
                started = time.perf_counter()
                session.prefill(prompts[:, :length].tolist())
                alone[length] = time.perf_counter() - started
        warmup = WARMUP
        if job["provider"] == "cuda" and engine.artefact.geometry is not None:
            warmup += REPLAYED * engine.artefact.geometry.block

        def decoded(several: int, past: int) -> list[float]:
            """Seconds of each decode step of `several` sequences after `past` synthetic tokens each."""
            with engine.session(several) as session:
                session.allocate(past + warmup + DECODE_STEPS)
                session.fill(past, job["seed"])
                taken = []
                for tokens in rng.integers(engine.artefact.vocab_size, size=(warmup + DECODE_STEPS, several)):
                    started = time.perf_counter()
                    session.decode(tokens)
                    taken.append(time.perf_counter() - started)
            return taken[warmup:]

        found = {past: decoded(batch, past) for past in job["past"]}
        more: list[list[float] | None] = []
        for several, past in job["decode"]:
            try:
                more.append(decoded(several, past))
            except UserError as error:
                if not isinstance(error, StepFailed) and not ran_out(str(error)):
                    raise
                more.append(None)
    return {
        "kernels": engine.kernels, "ttft": ttft, "gaps": gaps, "prefill": alone, "decode": found, "more": more,
        "cache_bytes": cache, "peak": peak,
    }  # fmt: skip


def _check(artefacts: Sequence[Artefact], settings: Mapping[str, Any]) -> None:
    sizes = ("input_len", "batch", "repeats")
    if any(settings[name] < 1 for name in sizes) or settings["output_len"] < 2:
        told = ", ".join(f"{name} {settings[name]}" for name in (*sizes, "output_len"))
        raise UserError(f"{told}: each must be at least 1, and output_len 2.")
    if not artefacts:
        raise UserError("there is no engine to measure: pass --engine.")
    if any(length < 1 for length in (*settings["past"], *settings["prefill"])):
        raise UserError("the past and prefill lengths must be at least 1.")
    generated = settings["input_len"] + settings["output_len"] - 1
    if any(min(one) < 1 for one in settings["decode"]):
        raise UserError("what is decoded beside must be at least 1 sequence of 1 token, like 8x65536.")
    lengths = [*settings["past"], *(past for _, past in settings["decode"])]
    base = max(generated, settings["input_len"] + WARMUP, *settings["prefill"])
    for artefact in artefacts:
        block = artefact.geometry.block if settings["provider"] == "cuda" and artefact.geometry else 0
        needed = max([base, *(length + WARMUP + REPLAYED * block + DECODE_STEPS for length in lengths)])
        if needed > artefact.max_length:
            raise UserError(
                f"these lengths need {needed} tokens and {artefact.path} allows {artefact.max_length}: lower "
                "--input-len, --output-len, --prefill or --past, or export with a larger --max-length."
            )


def _summaries(
    heads: Sequence[dict[str, Any]], visits: Sequence[Sequence[dict[str, Any]]], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    batch, found = settings["batch"], []

    def rate(length: int, milliseconds: float) -> float:
        return 1e3 * batch * length / milliseconds

    def measured(name: str, place: int, point: Sequence[int], steps: list[list[float] | None]) -> dict[str, Any]:
        own = spot(*point, steps, found[0][name][place]["ms"] if found else None)
        return own if found or own["ms"] is None else own | {"ratio": 1.0}

    for head, seen in zip(heads, visits, strict=True):
        first = found[0] if found else None
        gaps = 1e3 * np.concatenate([one["gaps"] for one in seen])
        ttft = 1e3 * float(np.median([one["ttft"] for one in seen]))
        tpot = 1e3 * float(np.median([np.mean(one["gaps"]) for one in seen]))
        prefill, decode = [], []
        for length in settings["prefill"]:
            took = 1e3 * float(np.median([one["prefill"][str(length)] for one in seen]))
            prefill.append({"length": length, "ms": took, "tokens_per_second": rate(length, took)})
        for place, length in enumerate(settings["past"]):
            decode.append(measured("decode", place, (batch, length), [one["decode"][str(length)] for one in seen]))
        more = [
            measured("more", place, point, [one["more"][place] for one in seen])
            for place, point in enumerate(settings["decode"])
        ]
        percentiles = np.percentile(gaps, PERCENTILES)
        found.append(
            {
                **head,
                "kernels": seen[0].get("kernels"),
                "ttft_ms": ttft,
                "tpot_ms": tpot,
                "itl_ms": {
                    "mean": float(gaps.mean()),
                    **{f"p{p}": float(x) for p, x in zip(PERCENTILES, percentiles, strict=True)},
                },
                "prefill": prefill,
                "decode": decode,
                "more": more,
                "ratios": {
                    "ttft": ttft / first["ttft_ms"] if first else 1.0,
                    "tpot": tpot / first["tpot_ms"] if first else 1.0,
                },
                "cache_bytes": seen[0]["cache_bytes"],
                "peak_resident_bytes": max(one["peak"] for one in seen),
            }
        )
    return found
