"""A report as `export eval` and the benches write it, with invented numbers of a plausible shape."""

from __future__ import annotations

import math
import random
from typing import Any

DEPTHS = ("0.1", "0.3", "0.5", "0.7", "0.9")
TEXTS = ("austen.txt", "kdoc.txt")
QUESTIONS = (
    ("niah", "single", 1.0),
    ("kvrecall", "pairs", 0.6),
    ("kvrecall", "uuid", 0.5),
    ("multiturn", "first", 1.0),
    ("multiturn", "again", 0.95),
    ("ruler", "niah_multikey", 0.8),
    ("ruler", "vt", 0.4),
    ("ruler", "cwe", 0.3),
)
# label, method, ratio, fit, fraction at 4096 tokens, KL in nats
SUBJECTS = (
    ("int8", "int8", None, "", 0.541, 0.00006),
    ("deltakv 0.45", "deltakv", 0.41, "fast", 0.449, 0.0003),
    ("int4", "int4", None, "", 0.311, 0.0024),
    ("deltakv 0.29 quality", "deltakv", 0.25, "quality", 0.293, 0.0025),
    ("deltakv 0.29", "deltakv", 0.25, "fast", 0.292, 0.0027),
    ("vqkv 0.28", "vqkv", 0.25, "", 0.280, 0.0028),
    ("int3", "int3", None, "", 0.251, 0.0121),
    ("kivi2", "kivi2", None, "", 0.222, 0.0420),
    ("deltakv 0.2", "deltakv", 0.156, "fast", 0.204, 0.0059),
    ("vqkv 0.19", "vqkv", 0.156, "", 0.190, 0.0090),
    ("vqkv 0.125", "vqkv", 0.094, "", 0.132, 0.0205),
)
MACHINE = {
    "cpu": "Invented CPU",
    "cores": 2,
    "memory_bytes": 24 << 30,
    "gpu": None,
    "python": "3.11.9",
    "platform": "Linux",
    "versions": {"numpy": "2.4.6", "onnxruntime": "1.32.0"},
}


def full() -> dict[str, Any]:
    """Two models, eleven subjects, two lengths, every task, both benches."""
    models = [
        {"name": "SmolLM2-135M-Instruct", "num_layers": 30, "num_kv_heads": 3, "head_dim": 64},
        {"name": "Qwen2.5-Coder-0.5B-Instruct", "num_layers": 24, "num_kv_heads": 2, "head_dim": 64},
    ]
    return {
        "format": 1,
        "evaluations": [evaluation(model, seed) for seed, model in enumerate(models)],
        "benches": [latency(), oom()],
    }


def evaluation(model: dict[str, Any], seed: int, lengths: tuple[int, ...] = (4096, 8192)) -> dict[str, Any]:
    dice = random.Random(seed)
    dense = 4 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"]
    subjects, cells = [], []
    for label, method, ratio, fit, share, loss in SUBJECTS:
        fractions = {str(length): share - 0.015 * math.log2(length / 4096) for length in lengths}
        subjects.append(
            {"label": label, "method": method, "ratio": ratio, "summary": f"{method}: an invented configuration"}
            | {"fit": fit, "effort": "full", "source": "codec", "path": f"codecs/{label}", "digest": f"{label:x<64}"}
            | {"kv_dtype": "fp16", "fixed_bytes": 3 << 20, "fractions": fractions}
            | {"bytes": {name: int(dense * int(name) * part) for name, part in fractions.items()}}
        )
        for length in lengths:
            for text in TEXTS:
                cells += losses(label, text, length, loss * dice.uniform(0.8, 1.2), dice)
            cells += [answers(label, *question, length, loss, dice) for question in QUESTIONS]
    return {
        "format": 1,
        "model": {**model, "sha256": f"{seed}" * 64, "architecture": "LlamaForCausalLM"},
        "command": "python -m export eval --engine int8/ --against int4/ --tasks ppl,kld,niah --out results/",
        "machine": MACHINE,
        "seed": 0,
        "texts": [{"name": name, "sha256": "ab" * 32} for name in TEXTS],
        "lengths": list(lengths),
        "tasks": ["ppl", "kld", "niah", "kvrecall", "multiturn", "ruler"],
        "subjects": subjects,
        "cells": cells,
    }


def losses(label: str, text: str, length: int, loss: float, dice: random.Random) -> list[dict[str, Any]]:
    common = {"subject": label, "variant": "", "text": text, "length": length, "samples": 16}
    change, half = loss * dice.uniform(0.2, 1.4), 0.4 * loss + 0.0005
    spots = [
        {"from": 64 * spot, "to": 64 * spot + 64, "change": change * (0.6 + spot / 10)}
        | {"kl": loss * (0.6 + spot / 10) * dice.uniform(0.9, 1.1)}
        for spot in range(8)
    ]
    return [
        {**common, "task": "ppl", "exact": 26.6, "value": 26.6 * (1 + change), "change": change}
        | {"interval": [change - half, change + half], "positions": spots},
        {**common, "task": "kld", "value": loss, "interval": [0.9 * loss, 1.1 * loss], "exact": 0.0}
        | {"top1": 1 - 3 * loss**0.5 / 4, "positions": spots},
    ]


def answers(
    label: str, task: str, variant: str, exact: float, length: int, loss: float, dice: random.Random
) -> dict[str, Any]:
    by_depth = {depth: max(0, round(4 * (exact - 12 * loss * dice.random()))) / 4 for depth in DEPTHS}
    value = sum(by_depth.values()) / len(by_depth)
    cell = {"subject": label, "task": task, "variant": variant, "text": "austen.txt", "length": length, "samples": 20}
    cell |= {"exact": exact, "value": value, "interval": [max(0.0, value - 0.15), min(1.0, value + 0.12)]}
    cell |= {"log_likelihood": -0.03 - loss, "exact_log_likelihood": -0.03}
    return {**cell, "by_depth": by_depth} if task == "niah" else cell


def _entries() -> list[dict[str, Any]]:
    common = {"model": "SmolLM2-135M-Instruct", "dtype": "fp32", "kv_dtype": "fp16", "max_length": 8192}
    names = [("none", "none", None), ("deltakv 0.29", "deltakv", 0.29), ("vqkv 0.172", "vqkv", 0.172)]
    names.append(("int4", "int4", None))
    return [
        {"engine": f"engines/{label}", "label": label, "method": method, "ratio": ratio, **common}
        for label, method, ratio in names
    ]


def latency() -> dict[str, Any]:
    engines = []
    for entry, scale in zip(_entries(), (1.0, 1.35, 1.2, 1.1), strict=True):
        engines.append(
            {**entry, "ttft_ms": 1850 * scale**0.3, "tpot_ms": 21 * scale}
            | {"itl_ms": {"mean": 21 * scale, "p50": 20.8 * scale, "p90": 22 * scale, "p99": 26 * scale}}
            | {"prefill": [{"length": 1024, "ms": 1850 * scale**0.3, "tokens_per_second": 1024 / 1.85 / scale**0.3}]}
            | {
                "decode": [
                    {"past": past, "ms": 20 * scale + past / 1024, "tokens_per_second": 50 / scale, "ratio": scale}
                    for past in (1024, 4096)
                ]
            }
            | {"ratios": {"ttft": scale**0.3, "tpot": scale}, "cache_bytes": 25 << 20, "peak_resident_bytes": 900 << 20}
        )
    settings = {"input_len": 1024, "output_len": 64, "batch": 1, "past": [1024, 4096], "repeats": 3, "threads": 2}
    return {"bench": "latency", "machine": MACHINE, "settings": settings, "engines": engines}


def oom() -> dict[str, Any]:
    engines = []
    for entry, share in zip(_entries(), (1.0, 0.27, 0.16, 0.29), strict=True):
        bound = int(300_000 / share)
        found = int(bound * 0.96) // 256 * 256
        gain = {"gain": 0.98 / share, "allowed_gain": 1 / share, "of_gain": 0.98}
        curve = [
            {"tokens": 1 << power, "planned_bytes": int(23040 * share) << power}
            | {"resident_bytes": (int(23500 * share) << power) + (2 << 20)}
            for power in range(12, found.bit_length())
        ]
        engines.append(
            {**entry, "base_bytes": 700 << 20, "found": found, "bound": bound, "of_bound": found / bound}
            | {"prefill_found": 8192, **gain, "curve": curve}
            | {
                "trials": [
                    {"tokens": found, "fits": True, "why": ""},
                    {"tokens": bound, "fits": False, "why": "killed"},
                ]
            }
        )
    return {"bench": "oom-length", "machine": MACHINE, "settings": {"memory": 8 << 30}, "engines": engines}
