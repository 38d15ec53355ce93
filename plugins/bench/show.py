"""The tables that the kernels' bench prints for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """Print what `plugins.bench.run.kernels` returned."""
    console, settings = Console(), report["settings"]
    speed = report["copy_bytes_per_second"] / 1e12
    sizes = f"{settings['num_heads']} query heads, {settings['num_kv_heads']} KV heads of {settings['head_dim']}"
    console.print(
        f"{report['machine']['gpu']}, {sizes}, {settings['dtype']}; a copy moves {speed:.2f} TB/s", highlight=False
    )
    for name, text in report["configurations"].items():
        console.print(f"  {name}: {text}", highlight=False, soft_wrap=True)
    for (batch, length), rows in groupby(report["decode"], key=lambda row: (row["batch"], row["length"])):
        console.print(_decode(f"Decode step of one layer, batch {batch}, {length:,} tokens", list(rows)))
    for length, rows in groupby(report["prefill"], key=lambda row: row["length"]):
        console.print(_prefill(f"A fresh prompt of {length:,} tokens, one layer", list(rows)))


def _decode(title: str, rows: list[dict[str, Any]]) -> Table:
    caption = (
        "faster: than the best 16-bit attention here. of roof: part of the time that reading its bytes takes at the "
        "copy's speed; tables are not counted. encode: added by a step that encodes a block."
    )
    table = Table("cache", title=title, caption=caption)
    for name in ("µs", "MB read", "TB/s", "faster", "of roof", "encode µs"):
        table.add_column(name, justify="right")
    best = max((row["faster"] or 0 for row in rows if row.get("kind") == "16 bits"), default=0)
    for row in rows:
        if "why" in row:
            table.add_row(f"[dim]{row['name']}[/]", "[dim]-[/]")
            continue
        name = _name(row)
        encode = f"{row['encode_us']:,.1f}" if "encode_us" in row else ""
        table.add_row(
            f"[bold]{name}[/]" if row["kind"] == "16 bits" and row["faster"] == best else name,
            f"{row['us']:,.1f}",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes'] / row['us'] / 1e6:.2f}",
            "" if row["faster"] is None else f"{row['faster']:.2f}",
            f"{row['of_roof']:.0%}",
            encode,
        )
    return _with_reasons(table, rows)


def _prefill(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("cache", title=title, caption="encode: beyond the uncompressed layer's time.")
    for name in ("ms", "of flash", "encode ms", "rows encoded", "workspace MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        if "why" in row:
            table.add_row(f"[dim]{row['name']}[/]", "[dim]-[/]")
            continue
        table.add_row(
            _name(row),
            f"{row['us'] / 1e3:,.2f}",
            f"{row['of_flash']:.2f}" if "of_flash" in row else "",
            f"{row['encode_us'] / 1e3:,.2f}" if "encode_us" in row else "",
            f"{row['encoded']:,}" if "encoded" in row else "",
            f"{row['workspace_bytes'] / 2**20:,.0f}" if "workspace_bytes" in row else "",
        )
    return _with_reasons(table, rows)


def _with_reasons(table: Table, rows: list[dict[str, Any]]) -> Table:
    """The table with, below, why rows of it have no numbers, or none to be trusted."""
    reasons = [f"{row['name']}: {_plain(row['why'])}" for row in rows if "why" in row]
    reasons += [f"{row['name']}: wrong, the output is not finite" for row in rows if not row.get("finite", True)]
    table.caption = "\n".join([table.caption, *reasons])
    return table


def _name(row: dict[str, Any]) -> str:
    return row["name"] if row.get("finite", True) else f"[red]{row['name']}[/]"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
