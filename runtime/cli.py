"""`python -m runtime info | generate | bench`: argument parsing and printing; the work is in the other files."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins import terminal
from plugins.errors import UserError

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.generate import Completion, Prompt
    from runtime.sampling import SamplingParams

INFO_LENGTH = 4096  # tokens of the sequence whose cache `info` tells the bytes of
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}


def byte_count(text: str) -> int:
    """4GiB, 500MB, 1.5G or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 4GiB")
    unit = match[2][:1].upper() + match[2][1:].lower()
    return int(float(match[1]) * UNITS[unit])


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers: write for example 4096,65536") from None


def sequences(text: str) -> list[tuple[int, int]]:
    try:
        return [(int(batch), int(past)) for batch, past in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of sequences x tokens: write for example 8x65536"
        ) from None


def build_parser() -> argparse.ArgumentParser:
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--engine", required=True, help="engine folder written by python -m export build")
    engine.add_argument(
        "--provider", choices=("cpu", "cuda"), help="where to run (default: cuda for a TensorRT plan, else cpu)"
    )
    engine.add_argument(
        "--library",
        metavar="FILE",
        help="native GPU kernels with --provider cuda, or none (default: KVPACK_LIBRARY, else what python -m plugins "
        "build made); for a TensorRT plan, plugins in place of its own",
    )
    engine.add_argument("--no-cuda-graphs", action="store_true", help="launch every kernel of every step anew")
    engine.add_argument("--threads", type=int, help="threads of one step (default: ONNX Runtime's choice)")
    engine.add_argument("--no-verify", action="store_true", help="skip the SHA-256 of the engine's files")
    engine.add_argument("--self-check", action="store_true", help="first replay the prompts stored at build")
    engine.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    capped = argparse.ArgumentParser(add_help=False, parents=[engine])
    capped.add_argument("--memory-limit", type=byte_count, metavar="SIZE", help="cap on the cache, for example 4GiB")

    parser = argparse.ArgumentParser(prog="python -m runtime", description="Run a kvpack engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", parents=[engine], help="load an engine and tell what computes it, and where")
    info.set_defaults(run=run_info, memory_limit=None)
    generate = commands.add_parser("generate", parents=[capped], help="complete one prompt, or several as a batch")
    generate.add_argument("--prompt", action="append", default=[], help="repeat for a batch")
    generate.add_argument("--prompt-file", action="append", default=[], metavar="F", help="UTF-8 file with one prompt")
    generate.add_argument("--system", help="system message of the chat template")
    generate.add_argument("--raw", action="store_true", help="do not apply the chat template")
    generate.add_argument("--max-tokens", type=int, help="default: up to the engine's limit")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps every token (default)")
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    generate.set_defaults(run=run_generate)

    bench = commands.add_parser("bench", help="measure engines").add_subparsers(required=True, metavar="BENCH")
    _add_comparisons(bench, engine)
    capacity = bench.add_parser("capacity", parents=[capped], help="decode time at one length, several capacities")
    capacity.add_argument("--length", type=int, required=True, help="tokens stored, filled with synthetic content")
    capacity.add_argument("--capacities", type=integers, required=True, metavar="N,N", help="tokens allocated")
    capacity.add_argument("--steps", type=int, default=32, help="timed steps of each (default: 32)")
    capacity.set_defaults(run=run_bench, bench="capacity")
    sessions = bench.add_parser("sessions", parents=[capped], help="resident memory over many short sessions")
    sessions.add_argument("--count", type=int, default=1000)
    sessions.add_argument("--prompt-len", type=int, default=16)
    sessions.add_argument("--steps", type=int, default=4)
    sessions.set_defaults(run=run_bench, bench="sessions")
    return parser


def _add_comparisons(bench: Any, engine: argparse.ArgumentParser) -> None:
    """The benches that set several engines beside each other."""
    several = argparse.ArgumentParser(add_help=False, parents=[engine])
    several.add_argument("--against", nargs="+", default=[], metavar="E", help="more engines, compared with --engine")
    several.add_argument("--seed", type=int, default=0, help="of the random tokens (default: 0)")
    several.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to this file")

    latency = bench.add_parser(
        "latency",
        parents=[several],
        help="time to the first token and per token, prefill and decode speed",
        description="Time to the first token (TTFT), per token (TPOT, ITL), and the speed of prefill and decode alone. "
        "Each repeat visits every engine in turn, each visit in a process of its own that warms up first.",
    )
    latency.add_argument("--input-len", type=int, default=1024, help="tokens of the prompt (default: 1024)")
    latency.add_argument("--output-len", type=int, default=64, help="tokens generated (default: 64)")
    latency.add_argument("--batch", type=int, default=1, help="sequences side by side (default: 1)")
    latency.add_argument(
        "--past",
        type=integers,
        default=[1024, 4096],
        metavar="N,N",
        help="stored tokens to decode at (default: 1024,4096)",
    )
    latency.add_argument(
        "--prefill", type=integers, default=[], metavar="N,N", help="prompts timed alone (default: --input-len)"
    )
    latency.add_argument("--repeats", type=int, default=3, help="visits of each engine (default: 3)")
    latency.add_argument(
        "--decode", type=sequences, default=[], metavar="BxN,BxN",
        help="decode B sequences of N stored tokens, too: 8x65536",
    )  # fmt: skip
    latency.add_argument(
        "--transformers", type=Path, metavar="DIR",
        help="a Hugging Face folder whose decode steps with transformers' static cache are measured beside; without "
        "weights in it they are random",
    )  # fmt: skip
    latency.set_defaults(run=run_comparison, bench="latency")

    oom = bench.add_parser(
        "oom-length",
        parents=[several],
        help="the longest context that fits into a given memory",
        description="The longest context of one sequence that fits into --memory, weights included: tried by bisection "
        "in fresh processes over synthetic content, beyond the engine's own limit of length.",
    )
    oom.add_argument("--memory", type=byte_count, required=True, metavar="SIZE", help="for example 8GiB")
    oom.add_argument("--prefill", action="store_true", help="also find the longest real prompt that fits")
    oom.set_defaults(run=run_comparison, bench="oom_length")


def main(argv: Sequence[str] | None = None) -> int:
    return terminal.run(build_parser().parse_args(argv))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr, when that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield


def open_engine(args: argparse.Namespace) -> Engine:
    with working(f"loading {args.engine}"):
        from runtime.engine import Engine

        engine = Engine.open(
            args.engine,
            provider=args.provider,
            threads=args.threads,
            verify=not args.no_verify,
            memory_limit=args.memory_limit,
            library=_library(args),
            cuda_graphs=not args.no_cuda_graphs,
        )
        if args.self_check:
            engine.self_check()
        return engine


def _library(args: argparse.Namespace) -> str | bool | None:
    """--library as `Engine.open` takes it."""
    return False if args.library == "none" else args.library


def run_info(args: argparse.Namespace) -> None:
    from runtime.artefact import state_bytes

    with open_engine(args) as engine:
        artefact, config = engine.artefact, engine.artefact.config
        target, length = config["target"], min(INFO_LENGTH, engine.artefact.max_length)
        told = {
            "engine": str(artefact.path),
            "model": config["model"]["name"],
            "method": config["method"]["name"],
            "backend": target["backend"],
            "built_with": target.get("versions", {}),
            "sm": target.get("sm", []),
            "profiles": target.get("profiles", []),
            "provider": engine.provider,
            "kernels": engine.kernels,
            "max_length": artefact.max_length,
            "cache_tokens": length,
            "cache_bytes": state_bytes(artefact, length),
        }
    if args.json:
        print(json.dumps(told))
        return
    told |= {
        "built_with": ", ".join(f"{name} {version}" for name, version in told["built_with"].items()),
        "sm": ", ".join(told["sm"]),
        "profiles": ", ".join(profile["name"] for profile in told["profiles"]),
    }
    for name, value in told.items():
        if value:
            shown = f"{value:,}" if isinstance(value, int) else value
            print(f"{name.replace('_', ' ')}: {shown}")


def run_generate(args: argparse.Namespace) -> None:
    from runtime.sampling import SamplingParams

    texts = [*args.prompt, *map(_read_prompt, args.prompt_file)]
    if not texts:
        raise UserError("there is no prompt: pass --prompt or --prompt-file.")
    if args.raw and args.system is not None:
        raise UserError("--system needs the chat template: drop --raw or --system.")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    with open_engine(args) as engine:
        templated = not args.raw and engine.text.has_template
        if args.system is not None and not templated:
            raise UserError("this engine has no chat template, so --system cannot be used: put it into --prompt.")
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompts: list[Prompt] = [[*system, {"role": "user", "content": text}] if templated else text for text in texts]
        started = time.perf_counter()
        run = _stream if len(prompts) == 1 else _batch
        results, first = run(engine, prompts, params, quiet=args.json)
        summary = _summary(engine, results, time.perf_counter() - started, first)
    if args.json:
        sequences = [
            {"text": one.text, "tokens": one.tokens, "prompt_tokens": one.prompt_tokens, "finish": one.finish_reason}
            for one in results
        ]
        print(json.dumps({"sequences": sequences, **summary}, ensure_ascii=False))
        return
    ttft = "" if first is None else f", the first after {first:.2f} s"
    speed = (
        f"{summary['tokens']} tokens in {summary['seconds']:.2f} s ({summary['tokens_per_second']:.1f} tokens/s{ttft})"
    )
    cache = f"cache {_size(summary['cache_bytes'])}, an fp16 cache {_size(summary['fp16_cache_bytes'])}"
    computed = "" if summary["provider"] == "cpu" else f"; {summary['kernels']}"
    print(f"{speed}; {cache}{computed}", file=sys.stderr)


def run_bench(args: argparse.Namespace) -> None:
    from runtime import bench

    with open_engine(args) as engine, working("measuring"):
        if args.bench == "capacity":
            report = bench.capacity(engine, args.length, args.capacities, args.steps)
        else:
            report = bench.sessions(engine, args.count, args.prompt_len, args.steps)
    if args.json:
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    rows = report["rows"]
    table = Table(*rows[0], title=report["title"])
    for row in rows:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
    Console().print(table)


def run_comparison(args: argparse.Namespace) -> None:
    from runtime import bench
    from runtime.bench.show import show

    own = {
        "latency": ("input_len", "output_len", "batch", "past", "decode", "prefill", "repeats", "transformers"),
        "oom_length": ("memory", "prefill"),
    }
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}.")
    report = getattr(bench, args.bench)(
        [args.engine, *args.against],
        **{name: getattr(args, name) for name in own[args.bench]},
        provider=args.provider,
        threads=args.threads,
        library=_library(args),
        cuda_graphs=not args.no_cuda_graphs,
        verify=not args.no_verify,
        self_check=args.self_check,
        seed=args.seed,
        progress_bar=sys.stderr.isatty(),
    )
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(report))
    else:
        show(report)


def _stream(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, quiet: bool
) -> tuple[list[Completion], float | None]:
    from runtime.generate import Completion

    with engine.session() as session:
        started = time.perf_counter()
        tokens = session.generate(prompts[0], params)
        with working("reading the prompt"):
            token = next(tokens)
        first = time.perf_counter() - started
        result = Completion(prompt_tokens=int(session.lengths[0]))
        while True:
            result.add(token)
            if not quiet:
                print(token.text, end="", flush=True)
            if token.finish_reason:
                break
            token = next(tokens)
        if not quiet:
            print()
        result.cache_bytes = session.nbytes
    return [result], first


def _batch(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, quiet: bool
) -> tuple[list[Completion], float | None]:
    with working(f"completing {len(prompts)} prompts"):
        results = engine.generate(prompts, params)
    if not quiet:
        for number, result in enumerate(results, 1):
            print(f"--- {number}\n{result.text}")
    return results, None


def _summary(engine: Engine, results: list[Completion], seconds: float, first: float | None) -> dict[str, Any]:
    from runtime.artefact import fp16_bytes

    tokens = sum(len(one.tokens) for one in results)
    stored = [one.prompt_tokens + len(one.tokens) - 1 for one in results]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": first,
        "tokens_per_second": tokens / seconds,
        "provider": engine.provider,
        "kernels": engine.kernels,
        "workspace_bytes": engine.workspace,
        "cache_bytes": sum(one.cache_bytes for one in results),
        "fp16_cache_bytes": sum(fp16_bytes(engine.artefact, length) for length in stored),
    }


def _read_prompt(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prompt file {name} cannot be read ({error}): pass a UTF-8 text file.") from None


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
