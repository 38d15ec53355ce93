"""`python -m export`: build an engine, look into one, check one, evaluate it."""

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
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
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
    build.add_argument("--backend", default="onnxruntime", help="onnxruntime (default), tensorrt or tensorrt-rtx")
    build.add_argument("--dtype", choices=("fp32", "fp16", "bf16"),
                       help="weights and activations; bf16 needs a GPU (default: fp32; fp16 for plans)")  # fmt: skip
    build.add_argument("--kv-dtype", choices=("fp16", "bf16", "fp32"),
                       help="exact rows of the cache (default: bf16 with --dtype bf16, else fp16)")  # fmt: skip
    build.add_argument("--provider", choices=("cpu", "cuda"), default="cpu", help="where to check it (default: cpu)")
    build.add_argument("--max-length", type=int, help="longest sequence (default: the model's own limit)")
    build.add_argument("--out", type=Path, required=True, help="the engine folder to write")
    build.add_argument("--json", action="store_true", help="print the report as JSON")
    plan = build.add_argument_group("plans, with --backend tensorrt or tensorrt-rtx")
    plan.add_argument("--target", type=_words, default=(), metavar="SM,SM",
                      help="tensorrt-rtx: GPUs to build for, as in sm_89,sm_120 (default: this machine's)")  # fmt: skip
    plan.add_argument("--batch", type=int, default=1, help="most sequences of a step (default: %(default)s)")
    plan.add_argument("--prefill-tokens", type=_numbers, default=(), metavar="N,N",
                      help="most new tokens of a step, a profile each (default: 512,8192; rtx: 512)")  # fmt: skip
    plan.add_argument("--keep-onnx", action="store_true", help="keep the ONNX graph beside the plan")
    plan.add_argument("--version-compatible", action="store_true", help="tensorrt: for later versions of it, too")
    plan.add_argument("--hardware-compatible", action="store_true", help="tensorrt: for every GPU from Ampere on")
    plan.add_argument("--strip-weights", action="store_true",
                      help="tensorrt: a plan without weights, which stay beside it in an ONNX graph")  # fmt: skip
    plan.add_argument("--library", type=Path, metavar="FILE",
                      help="tensorrt: the library with the plugins (default: `python -m plugins build`'s)")  # fmt: skip
    build.set_defaults(run=_build)

    inspect = commands.add_parser("inspect", help="print what an engine holds and costs")
    inspect.add_argument("engine", type=Path)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="repeat the build's checks on an engine")
    verify.add_argument("engine", type=Path)
    verify.add_argument("--model", help="also compare with this model, the one the engine was built from")
    verify.add_argument("--provider", choices=("cpu", "cuda"), help="where to run it (default: cpu; cuda for a plan)")
    verify.add_argument("--json", action="store_true")
    verify.set_defaults(run=_verify)

    evaluate = commands.add_parser(
        "eval",
        help="measure what compressed caches lose and still answer",
        description="Perplexity, KL divergence and questions about a long context, through a compressed cache and "
        "beside the uncompressed one. Engines are run; codecs are simulated in torch, on the GPU where there is one. "
        "Run again with the same --out, it goes on where it was interrupted.",
    )
    evaluate.add_argument("--engine", type=Path, required=True, metavar="PATH", help="an engine or a codec folder")
    evaluate.add_argument(
        "--against", type=Path, nargs="+", action="extend", default=[], metavar="PATH",
        help="others, of the same model, measured on the same samples",
    )  # fmt: skip
    evaluate.add_argument(
        "--model", help="the model, needed with a codec folder: folder, .gguf file, hub id or smollm2"
    )
    evaluate.add_argument("--tasks", type=_words, help="of ppl, kld, niah, kvrecall, multiturn, ruler, with commas "
                          "(default: ppl,kld,niah,kvrecall)")  # fmt: skip
    evaluate.add_argument("--lengths", type=_numbers, default=(), metavar="N,N",
                          help="tokens of a sample (default: 4096, or the limit)")  # fmt: skip
    evaluate.add_argument("--samples", type=int, default=8, help="windows of each text, questions of each kind "
                          "(default: %(default)s)")  # fmt: skip
    evaluate.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="FILE",
        help="UTF-8 texts; the first one is also what strings are hidden in (default: the topics of Python's help())",
    )  # fmt: skip
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--provider", choices=("cpu", "cuda"), help="of engines (default: cpu; cuda for plans)")
    evaluate.add_argument("--threads", type=int, help="for one step")
    evaluate.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results and report")
    evaluate.add_argument("--json", action="store_true", help="print the report as JSON")
    evaluate.set_defaults(run=_eval)

    report = commands.add_parser(
        "report",
        help="one page from several evaluations and benches",
        description="Merge evaluations and the JSON files of `python -m runtime bench` into one report.",
    )
    report.add_argument("folders", type=Path, nargs="*", metavar="DIR", help="folders of `python -m export eval`")
    report.add_argument("--bench", type=Path, nargs="+", action="extend", default=[], metavar="FILE")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    report.add_argument("--json", action="store_true", help="print the report as JSON")
    report.set_defaults(run=_report)
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers with commas") from None


def _build(options: argparse.Namespace) -> int:
    from .build import BuildOptions, build
    from .show import Steps, show_report
    from .tensorrt.options import PlanOptions

    plan = PlanOptions(
        batch=options.batch,
        prefill_tokens=options.prefill_tokens,
        targets=options.target,
        version_compatible=options.version_compatible,
        hardware_compatible=options.hardware_compatible,
        strip_weights=options.strip_weights,
        keep_onnx=options.keep_onnx,
        library=options.library,
    )

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
                provider=options.provider,
                max_length=options.max_length,
                plan=plan,
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
        checks = verify(options.engine, options.model, options.provider, say)
    if options.json:
        print(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        show_checks([check.to_json() for check in checks])
    return 0 if all(check.ok for check in checks) else 1


def _eval(options: argparse.Namespace) -> int:
    import shlex

    from .eval.run import evaluate
    from .eval.tasks import DEFAULT_TASKS

    evaluation = evaluate(
        [options.engine, *options.against],
        model=options.model,
        tasks=DEFAULT_TASKS if options.tasks is None else options.tasks,
        lengths=options.lengths,
        samples=options.samples,
        texts=options.text,
        seed=options.seed,
        out=options.out,
        provider=options.provider,
        threads=options.threads,
        command=shlex.join(["python", "-m", "export", *options.arguments]),
    )
    return _publish([evaluation], [], options)


def _report(options: argparse.Namespace) -> int:
    from .eval.merge import read_benches, read_evaluations

    evaluations, benches = read_evaluations(options.folders), read_benches(options.bench)
    if not evaluations and not benches:
        raise UserError("there is nothing to report: name folders of `python -m export eval` or files with --bench")
    return _publish(evaluations, benches, options)


def _publish(evaluations: list[dict], benches: list[dict], options: argparse.Namespace) -> int:
    """Write report.json and report.html to options.out and print the report."""
    from .report import show, write

    report = {"format": 1, "evaluations": evaluations, "benches": benches, "verdicts": []}
    write(report, options.out)
    if options.json:
        print((options.out / "report.json").read_text(encoding="utf-8"))
    else:
        show(report)
        print(f"wrote {options.out / 'report.html'}")
    return 0
