"""The bench itself: every case and every baseline at every batch and length, as one JSON document."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import UserError

try:
    import torch
except ImportError:
    raise UserError('the bench needs torch: pip install "kvpack[build]"') from None

from plugins.bench import baselines, cases, timing
from plugins.bench.step import BoundStep
from plugins.layer import LayerSpec
from plugins.native.abi import Library
from plugins.native.library import find

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS_TIMED = 5  # repeats of a whole prompt, which takes milliseconds
Progress = Callable[[int], AbstractContextManager[Callable[[str], None]]]


def kernels(
    library: Path | None,
    methods: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    shape: tuple[int, int, int],
    dtype: str,
    repeats: int,
    prompts: Sequence[int],
    progress: Progress,
) -> dict[str, Any]:
    """Times are microseconds of one layer. Raises UserError without a GPU, a library or a method of that name.

    "decode": per batch and length and row the time of a step of one token, the bytes it reads, how many times as fast
    as the best 16-bit attention it is ("faster"), which part of it reading those bytes takes at the speed of a copy
    ("of_roof"), and what encoding a block adds ("encode_us"). "prefill": per prompt and method the time of a fresh
    prompt, encoding included, over that of flash attention ("of_flash"), and beyond the uncompressed layer's
    ("encode_us"). Rows that could not be measured have "why" instead of numbers.
    """
    chosen, spec, kind = cases.chosen(methods), cases.layer_spec(shape), DTYPES[dtype]
    if not torch.cuda.is_available():
        raise UserError("the bench needs an NVIDIA GPU that torch can use, and torch.cuda.is_available() says no")
    opened = _open(library)
    places = [(batch, length) for batch in batches for length in lengths]
    reading = [case for case in chosen if case.prompts]
    total = len(places) * (len(chosen) + len(baselines.BASELINES)) + len(prompts) * (len(reading) + 1)
    decode, prefill = [], []
    with progress(total) as done, torch.inference_mode():
        bandwidth = timing.copy_bandwidth(repeats)
        for batch, length in places:
            rows = []
            problem = baselines.Problem(spec, batch, length, kind)
            for baseline in baselines.BASELINES:
                rows.append(_attempt(lambda b=baseline, p=problem: _baseline(b, p, repeats), baseline.name))
                done(baseline.name)
            for case in chosen:
                rows.append(_attempt(lambda c=case, p=problem: _decode(c, p, opened, repeats), case.name))
                done(case.name)
            _compare(rows, bandwidth)
            decode += [{"batch": batch, "length": length, **row} for row in rows]
        for length in prompts:
            rows = [_attempt(lambda n=length: _flash(spec, n, kind), "torch SDPA, flash")]
            done("prefill, flash")
            for case in reading:
                rows.append(_attempt(lambda c=case, n=length: _prefill(c, spec, n, kind, opened), case.name))
                done(f"prefill, {case.name}")
            _compare_prompts(rows)
            prefill += [{"length": length, **row} for row in rows]
    return {
        "bench": "kernels",
        "machine": _machine(),
        "settings": {
            "num_kv_heads": spec.num_kv_heads, "num_heads": spec.num_heads, "head_dim": spec.head_dim, "dtype": dtype,
            "repeats": repeats, "library": str(opened.path), "rotated_bytes": timing.ROTATED,
        },
        "copy_bytes_per_second": bandwidth,
        "configurations": {case.name: cases.described(case, spec) for case in chosen},
        "decode": decode,
        "prefill": prefill,
    }  # fmt: skip


def _open(path: Path | None) -> Library:
    return Library(find(path))


def _decode(case: cases.Case, problem: baselines.Problem, library: Library, repeats: int) -> dict[str, Any]:
    spec, batch = problem.spec, problem.batch
    config = case.make(spec)
    geometry = None if config is None else config.geometry()
    past = cases.settled(problem.length, geometry)
    capacity = past + (1 if geometry is None else geometry.block)
    layers = [cases.make_layer(case, spec, library, batch, capacity, problem.dtype)]
    read = cases.bytes_read(layers[0], past)
    held = sum(x.numel() * x.element_size() for x in (*layers[0].states.values(), *layers[0].tables.values()))
    for _ in range(timing.copies(read, held) - 1):
        layers.append(cases.make_layer(case, spec, library, batch, capacity, problem.dtype))
    steps = []
    for number, layer in enumerate(layers):
        layer.fill(past, seed=number)
        steps.append(BoundStep(layer, past, selected=cases.random_selection(layer, past), seed=number))
    row = {"us": timing.replayed(steps, repeats), "bytes": read, "instances": len(layers), "past": past}
    row |= {"workspace_bytes": steps[0].workspace_bytes, "finite": bool(steps[0].out.isfinite().all())}
    if geometry is not None and not case.observes:
        before = past - 1  # the token after these completes a block
        steps = [BoundStep(layer, before, selected=cases.random_selection(layer, before)) for layer in layers]
        row |= {"encoded": steps[0].encodes, "encode_us": timing.replayed(steps, repeats) - row["us"]}
    return {"kind": "16 bits" if geometry is None else "kvpack", **row}


def _baseline(baseline: baselines.Baseline, problem: baselines.Problem, repeats: int) -> dict[str, Any]:
    read = problem.cache_bytes(baseline.itemsize)
    first = baseline.make(problem)
    first()  # says here why it cannot run
    torch.cuda.synchronize()
    calls = [first, *(baseline.make(problem) for _ in range(timing.copies(read, read) - 1))]
    kind = "16 bits" if baseline.itemsize == 2 else "fp8"
    return {"kind": kind, "us": timing.replayed(calls, repeats), "bytes": read, "instances": len(calls)}


def _prefill(case: cases.Case, spec: LayerSpec, length: int, dtype: torch.dtype, library: Library) -> dict[str, Any]:
    layer = cases.make_layer(case, spec, library, 1, length, dtype)
    step = BoundStep(layer, 0, length)
    row = {"us": timing.called(step, PROMPTS_TIMED), "workspace_bytes": step.workspace_bytes, "encoded": step.encodes}
    kind = "16 bits" if layer.geometry is None else "kvpack"
    return {"kind": kind, **row, "finite": bool(step.out.isfinite().all())}


def _flash(spec: LayerSpec, length: int, dtype: torch.dtype) -> dict[str, Any]:
    call = baselines.causal_flash(spec, 1, length, dtype)
    return {"kind": "16 bits", "us": timing.called(call, PROMPTS_TIMED)}


def _compare(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Add the speed against the best 16-bit attention of these rows, and against the memory's."""
    best = min((row["us"] for row in rows if row.get("kind") == "16 bits"), default=None)
    for row in rows:
        if "us" in row:
            row["faster"] = None if best is None else best / row["us"]
            row["of_roof"] = row["bytes"] / bandwidth * 1e6 / row["us"]


def _compare_prompts(rows: Sequence[dict[str, Any]]) -> None:
    """Add the time over that of flash attention, the first row, and what is beyond the uncompressed layer's."""
    flash = rows[0].get("us")
    plain = next((row["us"] for row in rows if row["name"] == "none" and "us" in row), None)
    for row in rows:
        if "us" in row and flash:
            row["of_flash"] = row["us"] / flash
        if "us" in row and plain and row["kind"] == "kvpack":
            row["encode_us"] = row["us"] - plain


def _attempt(measure: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
    """What was measured, or why it was not; its memory is free afterwards."""
    with _freed():
        try:
            return {"name": name, **measure()}
        except ImportError as error:
            return {"name": name, "why": f"not installed ({error})"}
        except Exception as error:  # whatever other people's kernels raise
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if "illegal memory access" in said or "unspecified launch failure" in said:
                raise UserError(f"{name} failed on the GPU, which nothing can run on any more: {said}") from error
            return {"name": name, "why": said[:200]}


@contextmanager
def _freed() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def _machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
