"""Decoding with plain transformers and its static cache, the way to decode without any engine: measured in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError
from runtime.bench.report import spot

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LABEL = "transformers, static cache"


def visit(job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of each decode step: {"decode": {past: [seconds] or None}, "more": [the same], "graph": captured}.

    job: "model", a Hugging Face folder (one without weights gets random ones, which serve for speed), "dtype",
    "batch", "past", "decode" (pairs of sequences and tokens), "steps", "warmup", "provider", "seed". Attention is SDPA.
    On a GPU the step is captured in a CUDA graph where that works. None: that does not fit in memory.
    """
    import torch

    device = "cuda" if job["provider"] == "cuda" else "cpu"
    torch.manual_seed(job["seed"])
    model = _model(Path(job["model"]), getattr(torch, DTYPES[job["dtype"]]), device)
    graphs = []

    def decoded(batch: int, past: int) -> list[float] | None:
        taken = None
        try:
            taken, captured = _decode(model, batch, past, job, device)
            graphs.append(captured)
        except torch.OutOfMemoryError:
            pass  # freed below, once the error and what it holds are gone
        if device == "cuda":
            torch.cuda.empty_cache()
        return taken

    found = {past: decoded(job["batch"], past) for past in job["past"]}
    return {"decode": found, "more": [decoded(*one) for one in job["decode"]], "graph": all(graphs) and bool(graphs)}


def _model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
    if any(folder.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        return model.to(device).eval().requires_grad_(False)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


def _decode(model: Any, batch: int, past: int, job: Mapping[str, Any], device: str) -> tuple[list[float], bool]:
    """Seconds of each step after `past` random tokens, and whether they were replays of a CUDA graph."""
    import torch
    from transformers import StaticCache

    steps = job["warmup"] + job["steps"]
    cache = StaticCache(config=model.config, max_cache_len=past + steps + 8)
    tokens = torch.randint(model.config.vocab_size, (batch, 1), device=device)
    with torch.inference_mode():

        def step() -> torch.Tensor:
            return model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

        step()  # allocates the cache
        for layer in cache.layers:
            for side in (layer.keys, layer.values):
                side.zero_()
                side[:, :, :past].normal_()
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(past)
        run, captured = (step, False) if device == "cpu" else _captured(step)
        taken = []
        for _ in range(steps):
            started = time.perf_counter()
            run().cpu()
            taken.append(time.perf_counter() - started)
    return taken[job["warmup"] :], captured


def _captured(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], bool]:
    """`step` as the replay of a CUDA graph, or `step` itself where it cannot be captured."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = step()
    except RuntimeError:  # a version that reads lengths on the host
        torch.cuda.synchronize()
        return step, False

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay, True


def summary(visits: list[dict[str, Any]], settings: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The visits in the form of an engine's entry, as far as it has those numbers."""
    decode = [
        spot(settings["batch"], past, [one["decode"][str(past)] for one in visits], first["decode"][place]["ms"])
        for place, past in enumerate(settings["past"])
    ]
    more = [
        spot(*point, [one["more"][place] for one in visits], first["more"][place]["ms"])
        for place, point in enumerate(settings["decode"])
    ]
    return {"label": LABEL, "decode": decode, "more": more, "graph": all(one["graph"] for one in visits)}
