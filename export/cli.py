"""`python -m export`: build an engine, look into one, check one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from calib.request import add_arguments, from_arguments
from plugins.errors import UserError
from plugins.methods import METHODS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 when a check failed, 2 on bad input."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m export", description="Compressed-KV engines from models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="build and verify an engine", description="Build and verify an engine.")
    add_arguments(build, ("none", *METHODS))
    build.add_argument("--codec", type=Path, help="a codec folder of `python -m calib fit`; without it one is fitted")
    build.add_argument("--backend", default="onnxruntime", help="onnxruntime (default)")
    build.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="weights and activations")
    build.add_argument("--kv-dtype", choices=("fp16", "fp32"), default="fp16", help="exact rows of the cache")
    build.add_argument("--max-length", type=int, help="longest sequence (default: the model's own limit)")
    build.add_argument("--out", type=Path, required=True, help="the engine folder to write")
    build.add_argument("--json", action="store_true", help="print the report as JSON")
    build.set_defaults(run=_build)

    inspect = commands.add_parser("inspect", help="print what an engine holds and costs")
    inspect.add_argument("engine", type=Path)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="repeat the build's checks on an engine")
    verify.add_argument("engine", type=Path)
    verify.add_argument("--model", help="also compare with this model, the one the engine was built from")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify)
    return parser


def _build(options: argparse.Namespace) -> int:
    from .build import BuildOptions, build
    from .show import Steps, show_report

    with Steps() as say:
        report = build(
            BuildOptions(
                out=options.out,
                model=options.model,
                request=from_arguments(options),
                codec=options.codec,
                backend=options.backend,
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                max_length=options.max_length,
            ),
            say,
        )
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show_report(report, options.out)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from runtime.artefact import Artefact

    from .inspect import describe
    from .show import show_description

    description = describe(Artefact.open(options.engine))
    if options.json:
        print(json.dumps(description, indent=1))
    else:
        show_description(description)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .show import Steps, show_checks
    from .verify import verify

    with Steps() as say:
        checks = verify(options.engine, options.model, say=say)
    if options.json:
        print(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        show_checks([check.to_json() for check in checks])
    return 0 if all(check.ok for check in checks) else 1
