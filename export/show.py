"""What the export commands print for people."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.table import Column, Table

ALTERNATIVES = 5  # shown of those that a choice was made from

_out = Console()
_err = Console(stderr=True)


class Steps:
    """Names the step in progress on stderr and, when it ends, how long it took."""

    def __enter__(self) -> Steps:
        self._name, self._since = "", time.monotonic()
        return self

    def __call__(self, name: str) -> None:
        self._finish()
        self._name, self._since = name, time.monotonic()
        _err.print(f"{name} ...", style="dim", highlight=False)

    def _finish(self) -> None:
        if self._name:
            _err.print(f"{self._name}: {time.monotonic() - self._since:.0f} s", style="dim", highlight=False)
        self._name = ""

    def __exit__(self, *_: object) -> None:
        self._finish()


def show_checks(checks: Sequence[Mapping[str, Any]]) -> None:
    table = Table("check", "measured", "allowed", "", title="Verification")
    for check in checks:
        verdict = "[green]holds[/]" if check["ok"] else "[red]FAILS[/]"
        table.add_row(check["name"], f"{check['value']:.2e}", f"{check['limit']:.2e}", f"{verdict} {check['detail']}")
    _out.print(table)


def _memory(rows: Sequence[Mapping[str, Any]], fixed: int) -> Table:
    table = Table(
        *("tokens", "cache", "bytes/token", "fp16 cache", "of fp16", "of fp16, tables counted"),
        title=f"Memory of one sequence (tables of the engine: {_mib(fixed)})",
        caption=None if all(row["within_limit"] for row in rows) else "* beyond this engine's limit",
    )
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}" + ("" if row["within_limit"] else " *"),
            _mib(row["bytes"]),
            f"{row['bytes_per_token']:,.0f}",
            _mib(row["fp16_bytes"]),
            f"{row['ratio']:.4f}",
            f"{row['ratio_with_fixed']:.4f}",
        )
    return table


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def show_report(report: Mapping[str, Any], out: Path) -> None:
    """The table a build ends with."""
    if report.get("verified", True):
        show_checks(report["checks"])
    else:
        _out.print(f"Not verified: {report['unverified']}", style="yellow", highlight=False, soft_wrap=True)
    method, quality = report["method"], report["quality"]
    _out.print(_memory(report["memory"], report["fixed_bytes"]))
    if faster := report.get("faster_on_gpu"):
        _out.print(f"On an NVIDIA GPU the fastest kernel takes {faster}.", highlight=False, soft_wrap=True)
    if quality:
        table = Table(
            "perplexity", "compressed", "rise", "KL divergence", "same top token", title=_quality_title(quality)
        )
        table.add_row(
            f"{quality['ppl_exact']:.2f}",
            f"{quality['ppl']:.2f}",
            f"{quality['increase']:+.2%}",
            f"{quality['kl']:.4f} nats",
            f"{quality['top1']:.1%}",
        )
        _out.print(table)
    choice = (report["codec"] or {}).get("choice", {})
    if "alternatives" in choice:
        _show_choice(choice, choice.get("training"))
    if frozen := report["limits"]["frozen_rope"]:
        limit = report["limits"]["max_length"]
        _out.print(
            f"Rotary angles of type {', '.join(frozen)} are frozen as they are at {limit:,} tokens", highlight=False
        )
    if plan := report.get("plan"):
        _out.print(f"Plan: {_plan_size(plan)}, built in {plan['seconds']:.0f} s", highlight=False)
        _out.print(_sentence(plan["unverified"]), style="yellow", highlight=False, soft_wrap=True)
    _out.print(f"Method {method['name']}, ratio {method['ratio']:.4f}. Engine: {out}", highlight=False)


def _plan_size(plan: Mapping[str, Any]) -> str:
    needs = plan["memory"].get("activations")
    return _mib(plan["bytes"]) + (f", and {_mib(needs)} of memory while it runs" if needs else "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _show_choice(choice: Mapping[str, Any], trained: Mapping[str, Any] | None) -> None:
    """Why deltakv is configured as it is, see `calib.choose.choose`, and what training the codec brought."""
    best = sorted(choice["alternatives"], key=lambda item: item["error"])[:ALTERNATIVES]
    table = Table(
        *("full layers", "stride", "latents", "ratio", "expected error"),
        title="Best configurations",
        caption="error: squared change of the attention outputs, relative to their energy, summed over layers",
    )
    for item in best:
        chosen = item is best[0]
        table.add_row(
            (_ranges(item["full_layers"]) or "none") + (" (chosen)" if chosen else ""),
            str(item["stride"]),
            item["latents"],
            f"{item['ratio']:.4f}",
            f"{item['error']:.4f}",
        )
    _out.print(table)
    layers = choice["layers"]
    if any("observer" in told for told in layers.values()):
        table = Table(
            *("layer", "compressed", "observer", "unread", "coverage"),
            title="Expected error of each compressed layer",
            caption="unread: error of reading only what the observer selects; "
            "coverage: part of the layer's own selection that this holds",
        )
        for layer, told in layers.items():
            selects = (str(told["observer"]), f"{told['missed']:.5f}", f"{told['coverage']:.1%}")
            table.add_row(layer, f"{told['error']:.5f}", *selects)
        _out.print(table)
    else:
        _out.print("Expected error of each compressed layer", highlight=False)
        cells = [f"{layer:>3}  {told['error']:.5f}" for layer, told in layers.items()]
        _out.print(Columns(cells, padding=(0, 3), column_first=True), highlight=False)
    if trained:
        _out.print(
            f"{trained['steps']:,} steps of training took the held-out next-token term from "
            f"{trained['held_out_before']:.4g} to {trained['held_out_after']:.4g} nats",
            highlight=False,
        )


def _grouped(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Tensors with the layers that have the same one written together: ("layer0-29.codes_k", spec)."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for spec in tensors:
        stem = re.sub(r"^layer\d+", "layer", spec["name"])
        groups.setdefault((stem, spec["dtype"], str(spec["shape"])), []).append(spec)
    named = []
    for (stem, *_), members in groups.items():
        layers = [int(match[1]) for spec in members if (match := re.match(r"layer(\d+)", spec["name"]))]
        named.append((stem.replace("layer", f"layer{_ranges(layers)}", 1) if layers else stem, members[0]))
    return named


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _quality_title(quality: Mapping[str, Any]) -> str:
    return f"Lost on {', '.join(quality['text'])}, {quality['windows']} windows of {quality['context']:,} tokens"


def show_description(d: Mapping[str, Any]) -> None:
    """What `inspect` prints."""
    model, method = d["model"], d["method"]
    _out.print(
        f"{model['name']} ({model['architecture']}), {model['num_layers']} layers, {model['num_kv_heads']} KV heads "
        f"of {model['head_dim']}; weights {d['dtype']}, exact cache rows {d['kv_dtype']}, "
        f"up to {d['max_length']:,} tokens",
        highlight=False,
    )
    _out.print(f"method {method['name']}, ratio {method['ratio']:.4f} by the paper's accounting", highlight=False)
    for key, value in method["config"].items():
        _out.print(f"  {key} = {value}", highlight=False)
    written_where = "written in place by" if d["target"].get("in_place", True) else "renewed in"
    table = Table(
        Column("tensor", overflow="fold", min_width=24), "role", "dtype", "shape", title="Tensor contract",
        caption=f"* a state, {written_where} the output of the same name and _out",
    )  # fmt: skip
    written = set(d["aliases"].values())
    for name, spec in _grouped([spec for spec in d["tensors"] if spec["name"] not in written]):
        shape = " x ".join(str(dim) for dim in spec["shape"])
        table.add_row(name + (" *" if spec["alias"] else ""), spec["role"], spec["dtype"], shape or "scalar")
    _out.print(table)
    _out.print(_memory(d["memory"], d["fixed_bytes"]))
    if "plan" in d:
        _show_plan(d["plan"], d["target"])
    even = d["break_even"]
    _out.print(
        f"Break-even with an fp16 cache, tables counted: {f'{even:,} tokens' if even else 'never'}", highlight=False
    )


def _show_plan(plan: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    gpus = ", ".join(f"sm_{sm.replace('.', '')}" for sm in target["sm"])
    _out.print(f"Plan of {target['backend']} for {gpus}: {_plan_size(plan)}", highlight=False)
    table = Table("profile", "new tokens", "sequences", title="Profiles (at least, usually, at most)")
    for profile in target["profiles"]:
        table.add_row(profile["name"], *(" / ".join(f"{n:,}" for n in profile[key]) for key in ("tokens", "batch")))
    _out.print(table)
    if plan["unopened"]:
        told = f"Layers as TensorRT told them when it built the plan; {plan['unopened']}"
        _out.print(told, style="yellow", highlight=False, soft_wrap=True)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in plan["layers"].items())
    _out.print(f"Layers: {kinds or 'unknown'}", highlight=False)
    caption = "a state that is not written in place has a second buffer, to which each step copies it"
    table = Table("state", "in place", "layers that touch it beside plugins", title="Cache",
                  caption=None if target["in_place"] else caption)  # fmt: skip
    keyed = [{**s, "name": s["input"], "dtype": s["in_place"], "shape": s["other_layers"] > 0} for s in plan["states"]]
    for name, state in _grouped(keyed):
        others = f"{state['other_layers']}, such as {state['some'][0]}" if state["some"] else "none"
        table.add_row(name, "[green]yes[/]" if state["in_place"] else "no", others)
    _out.print(table)
