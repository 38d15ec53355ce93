"""The tables that the benches print for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.bench.memory import GIB


def show(report: dict[str, Any]) -> None:
    """Print what `latency` or `oom_length` returned."""
    console = Console()
    for table in {"latency": _latency, "oom-length": _oom}[report["bench"]](report):
        console.print(table)


def _latency(report: dict[str, Any]) -> list[Table]:
    settings, engines = report["settings"], report["engines"]
    shape = f"{settings['input_len']} tokens in, {settings['output_len']} out, batch {settings['batch']}"
    whole = Table(
        *("engine", "TTFT ms", "TPOT ms", "ITL ms\np50 / p90 / p99", "cache\nMiB", "peak\nMiB"),
        title=f"Latency: {shape}, median of {settings['repeats']}",
        caption=f"In brackets the ratio to the first engine. Warm-up {settings['warmup']}.",
    )
    if settings["provider"] == "cuda":
        whole.caption += "".join(f"\n{entry['label']}: {entry['kernels']}." for entry in engines)
    apart = Table("engine", title="Prefill and decode apart, tokens/s")
    for length in settings["prefill"]:
        apart.add_column(f"prefill of\n{length:,}", justify="right")
    for length in settings["past"]:
        apart.add_column(f"decode at\n{length:,}", justify="right")
    for entry in engines:
        ratios, sizes = entry["ratios"], (entry["cache_bytes"], entry["peak_resident_bytes"])
        whole.add_row(
            entry["label"],
            *(f"{_short(entry[f'{name}_ms'])} ({ratios[name]:.2f})" for name in ("ttft", "tpot")),
            " / ".join(_short(entry["itl_ms"][name]) for name in ("p50", "p90", "p99")),
            *(_short(size / 2**20) for size in sizes),
        )
        prefill = (_short(x["tokens_per_second"]) for x in entry["prefill"])
        apart.add_row(entry["label"], *prefill, *map(_step, entry["decode"]))
    plain = report.get("transformers")
    if plain:
        apart.add_row(plain["label"], *("" for _ in settings["prefill"]), *map(_step, plain["decode"]))
    if not settings["decode"]:
        return [whole, apart]
    several = Table("engine", title="Decode of several sequences, tokens/s")
    for batch, length in settings["decode"]:
        several.add_column(f"{batch:,} x\n{length:,}", justify="right")
    for entry in [*engines, *([plain] if plain else [])]:
        several.add_row(entry["label"], *map(_step, entry["more"]))
    return [whole, apart, several]


def _step(spot: dict[str, Any]) -> str:
    if spot["ms"] is None:
        return "out of memory"
    ratio = "" if spot["ratio"] is None else f", {spot['ratio']:.2f}"
    return f"{_short(spot['tokens_per_second'])} ({_short(spot['ms'])} ms{ratio})"


def _oom(report: dict[str, Any]) -> list[Table]:
    settings, engines = report["settings"], report["engines"]
    found = Table("engine", title=f"Longest context in {settings['memory'] / GIB:,.2f} GiB on {settings['provider']}")
    found.caption = "The bound is what fits beside the base: all that the process holds but the cache."
    names = ["tokens", "bound", "of\nbound", "gain", "bytes\nallow", "of\nthat", "base\nGiB"]
    for name in [*names, "real\nprompt"] if settings["prefill"] else names:
        found.add_column(name, justify="right", no_wrap=True)
    curve = Table("engine", "tokens", "planned MiB", "resident MiB", "ratio", title="Memory of one sequence")
    for entry in engines:
        found.add_row(
            entry["label"],
            f"{entry['found']:,}",
            f"{entry['bound']:,}",
            _share(entry["of_bound"]),
            *("" if entry[key] is None else f"{entry[key]:.2f}" for key in ("gain", "allowed_gain")),
            _share(entry["of_gain"]),
            f"{entry['base_bytes'] / GIB:.2f}",
            *([] if entry["prefill_found"] is None else [f"{entry['prefill_found']:,}"]),
        )
        for point in entry["curve"]:
            planned, resident = point["planned_bytes"], point["resident_bytes"]
            numbers = (f"{planned / 2**20:,.1f}", f"{resident / 2**20:,.1f}", f"{resident / planned:.3f}")
            curve.add_row(entry["label"], f"{point['tokens']:,}", *numbers)
    return [found, curve]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
