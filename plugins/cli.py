"""`python -m plugins build | bench`: argument parsing and printing; the work is in native/build.py and bench/."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plugins import terminal
from plugins.errors import UserError

if TYPE_CHECKING:
    from plugins.native.build import BuildReport

SHAPES = {"llama-3.1-8b": (8, 32, 128), "qwen2.5-7b": (4, 28, 128)}  # KV heads, query heads, head_dim


def integers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers: write for example 1,8")
    return found


def architectures(text: str) -> list[int]:
    """[80, 90] of "80,90" (sm_80 is fine too); [] of "native"."""
    return [] if text == "native" else sorted(set(integers(text.replace("sm_", ""))))


def shape(text: str) -> tuple[int, int, int]:
    """KV heads, query heads and head_dim: of a model by name, or the three numbers."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        heads, queries, dim = integers(text)
    except (ValueError, argparse.ArgumentTypeError):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape: use {known}, or KV heads, query heads and head_dim like 8,32,128"
        ) from None
    if queries % heads:
        raise argparse.ArgumentTypeError(f"{queries} query heads are no multiple of {heads} KV heads")
    return heads, queries, dim


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m plugins", description="kvpack's native library for NVIDIA GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser(
        "build",
        help="compile the native library",
        description="Compile the GPU kernels with nvcc, and with their headers the ops for ONNX Runtime and TensorRT.",
    )
    build.add_argument(
        "--arch",
        type=architectures,
        metavar="N,N",
        help="architectures like 80,86,89,90,100,120, or native: those of this machine's GPUs "
        "(default: native, or 80,90 without a GPU)",
    )
    build.add_argument("--out", type=Path, metavar="FILE", help="default: where kvpack looks for it, in the cache")
    build.add_argument("--nvcc", metavar="PATH", help="default: CUDACXX, CUDA_HOME, PATH, PyPI's nvidia-cuda-nvcc")
    build.add_argument(
        "--onnxruntime-include",
        metavar="DIR",
        help="folder of onnxruntime_c_api.h (default: ONNXRUNTIME_INCLUDE_DIR, system folders)",
    )
    build.add_argument(
        "--tensorrt-include",
        metavar="DIR",
        help="folder of NvInferRuntime.h (default: TENSORRT_INCLUDE_DIR, system folders)",
    )
    build.add_argument("--jobs", type=int, metavar="N", help="files compiled at a time (default: the cores)")
    build.add_argument("--json", action="store_true", help="print one JSON value instead of a table")
    build.set_defaults(run=run_build)

    bench = commands.add_parser(
        "bench",
        help="time the kernels on this machine's GPU",
        description="One layer's decode step, encoding and prefill, by method, beside the best 16-bit attention that "
        "is installed. States are random and rotate over more memory than the GPU's cache holds.",
    )
    bench.add_argument(
        "--method", nargs="+", default=[], metavar="M", help="methods or single rows of the table (default: all)"
    )
    bench.add_argument("--batch", type=integers, default=[1, 8], metavar="N,N", help="default: 1,8")
    bench.add_argument(
        "--length", type=integers, default=[32768, 131072], metavar="N,N", help="stored tokens (default: 32768,131072)"
    )
    bench.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    bench.add_argument(
        "--shape",
        type=shape,
        default=SHAPES["llama-3.1-8b"],
        metavar="NAME|H,Hq,D",
        help=f"{', '.join(SHAPES)}, or KV heads, query heads and head_dim (default: llama-3.1-8b)",
    )
    bench.add_argument(
        "--repeats", type=int, default=31, metavar="N", help="replays of each, at least 25 (default: 31)"
    )
    bench.add_argument(
        "--prefill", type=integers, default=[32768], metavar="N,N", help="prompts encoded (default: 32768)"
    )
    bench.add_argument("--no-prefill", dest="prefill", action="store_const", const=[], help="decode steps only")
    bench.add_argument("--library", type=Path, metavar="FILE", help="default: KVPACK_LIBRARY, or what build made")
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    bench.set_defaults(run=run_bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return terminal.run(build_parser().parse_args(argv))


def run_build(args: argparse.Namespace) -> None:
    from plugins.native import build
    from plugins.native.library import default_path

    arches = args.arch or build.native_arches()
    if not arches and args.arch is not None:
        raise UserError("--arch native needs a GPU that nvidia-smi shows: name the architectures, like --arch 80,90")
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} must be 1 or more")
    out = (args.out or default_path()).absolute()
    total = build.pieces(out, args.onnxruntime_include, args.tensorrt_include)
    with progress("compiling", total, shown=sys.stderr.isatty()) as step:
        report = build.compile(
            arches or build.COMMON_ARCHES,
            out,
            nvcc=args.nvcc,
            onnxruntime=args.onnxruntime_include,
            tensorrt=args.tensorrt_include,
            jobs=args.jobs,
            done=step,
        )
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        show_build(report)


def run_bench(args: argparse.Namespace) -> None:
    from plugins.bench.show import show

    if args.repeats < 25:
        raise UserError(f"--repeats {args.repeats} is too few for a median: use 25 or more")
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    from plugins.bench.run import kernels

    report = kernels(
        args.library,
        methods=args.method,
        batches=args.batch,
        lengths=args.length,
        shape=args.shape,
        dtype=args.dtype,
        repeats=args.repeats,
        prompts=args.prefill,
        progress=lambda total: progress("measuring", total, shown=sys.stderr.isatty()),
    )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)


@contextmanager
def progress(title: str, total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each piece of work that ended; draws a bar on stderr if `shown`."""
    if not shown:
        yield lambda name: None
        return
    with terminal.bar(title, total) as update:
        yield lambda name: update(name, 1)


def show_build(report: BuildReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from plugins.native.faces import ONNXRUNTIME, TENSORRT

    console = Console()
    table = Table(
        *("file", "arch", "kernel"),
        title=f"Kernels, CUDA {report.version}",
        caption="Of a kernel's variants the largest number; bytes spilled by a thread, shared by a block.",
    )
    for name in ("variants", "registers", "spilled", "static\nshared"):
        table.add_column(name, justify="right")
    last = ("", 0)
    for (source, arch, name), kernels in report.families().items():
        spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in kernels)
        table.add_row(
            *(("", "") if (source, arch) == last else (source, f"sm_{arch}")),
            name,
            str(len(kernels)),
            str(max(kernel.registers for kernel in kernels)),
            f"[red]{spilled:,}[/]" if spilled else "0",
            f"{max(kernel.shared for kernel in kernels):,}",
        )
        last = (source, arch)
    console.print(table)
    for face, headers in ((ONNXRUNTIME, report.onnxruntime), (TENSORRT, report.tensorrt)):
        if headers is None:
            console.print(
                f"Without ops for {face.framework}: its header {face.header} was not found; give its folder by "
                f"{face.option}.",
                highlight=False,
                soft_wrap=True,
            )
    arches = ", ".join(f"sm_{arch}" for arch in report.arches)
    console.print(f"{report.library} for {arches}, {report.seconds:.0f} s", highlight=False, soft_wrap=True)
