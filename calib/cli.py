"""`python -m calib fit` makes a codec, `python -m calib quality` tells what it costs. Heavy imports come last."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError
from plugins.methods import METHODS

from .request import add_arguments, from_arguments

if TYPE_CHECKING:
    from .codec import CodecInfo


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m calib", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)

    fit = commands.add_parser("fit", help="fit a codec to a model", description="Fit a codec to a model.")
    add_arguments(fit, METHODS)
    fit.add_argument("--json", action="store_true", help="print the report as JSON")
    fit.add_argument("--out", type=Path, required=True, metavar="DIR", help="codec folder to write")
    fit.set_defaults(run=run_fit)

    quality = commands.add_parser(
        "quality", help="measure what a codec costs", description="Perplexity, KL and top-1 through a compressed cache."
    )
    quality.add_argument("--model", metavar="MODEL", help="folder, .gguf file or hub id (default: the built-in model)")
    quality.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="FILE",
        help="UTF-8 text (default: the topics of Python's help())",
    )  # fmt: skip
    quality.add_argument("--context", type=int, help="tokens per window (default: 4096, or the model's limit)")
    quality.add_argument("--json", action="store_true", help="print the report as JSON")
    quality.add_argument("--codec", type=Path, required=True, metavar="DIR", help="codec folder")
    quality.add_argument("--windows", type=int, default=8, help="windows per text (default: %(default)s)")
    quality.set_defaults(run=run_quality)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; a fit goes on from the finished layers when run again", file=sys.stderr)
        return 130
    return 0


def run_fit(options: argparse.Namespace) -> None:
    from plugins.config import RATIO_SLACK

    from .fit import fit_for
    from .models import load

    request = from_arguments(options)
    asked = request.target
    info = fit_for(request, load(options.model), options.out)
    ratio = info.config.ratio(info.model["num_layers"])
    if ratio > asked + RATIO_SLACK:
        print(f"note: --set raises the ratio to {ratio:.4f}, above --ratio {asked:g}", file=sys.stderr)
    report = {**info.to_json(), "ratio": round(ratio, 4), "out": str(options.out)}
    if options.json:
        print(json.dumps(report))
        return
    way = f"{info.fit} fit, " if info.fit else ""
    spent = f"{info.vectors} vectors, {way}effort {info.effort}, seed {info.seed}"
    print(f"{info.config.summary()}: ratio {ratio:.4f}, {spent}")
    {"deltakv": _print_deltakv, "vqkv": _print_vqkv}[info.method](info)
    print(f"wrote {options.out}")


def _print_vqkv(info: CodecInfo) -> None:
    print("held-out error per stage, as a fraction of the energy")
    print("layer  K stages                 (fit)   V stages                 (fit)   dead entries")
    for layer, sides in info.errors.items():
        cells = [f"{_stages(sides[s]['stages']):<24} {sides[s]['train']:.4f}" for s in ("k", "v")]
        print(f"{layer:>5}  {cells[0]}  {cells[1]}  {sides['k']['dead'] + sides['v']['dead']:>6}")


def _stages(errors: Sequence[float]) -> str:
    shown = [f"{error:.4f}" for error in errors]
    return " ".join(shown if len(shown) <= 3 else [shown[0], "..", shown[-1]])


def _print_deltakv(info: CodecInfo) -> None:
    choice, selects = info.choice, info.config.geometry().selects
    if choice:
        print("expected error of the attention outputs, summed over layers, by number of full layers")
        for item in choice["alternatives"]:
            mark = "*" if item["full_layers"] == choice["full_layers"] else " "
            layers = ",".join(map(str, item["full_layers"])) or "none"
            print(
                f"{mark} {item['error']:.4f}  stride {item['stride']:>2}, latents {item['latent_dim']} x "
                f"{item['latent_bits']} bits, full layers {layers}"
            )
    print(
        "held-out error in the fitted metric, as fractions: left by the references, then by the latents, of x's energy;"
    )
    print("of the residual's energy (and where fitted); of the attention output's energy")
    print("layer  references  latents  residual   (fit)   output" + ("  observer  missed  coverage" if selects else ""))
    for layer, error in info.errors.items():
        line = f"{layer:>5}  {error['references']:>10.4f}  {error['x']:.5f}  {error['residual']:>8.4f}  "
        line += f"{error['train']:.4f}  {error['output']:.5f}"
        if choice and selects:
            told = choice["layers"][layer]
            line += f"  {told['observer']:>8}  {told['missed']:.4f}  {told['coverage']:>8.3f}"
        print(line)


def run_quality(options: argparse.Namespace) -> None:
    import torch

    from .adapter import layer_specs
    from .codec import load as load_codec
    from .models import load
    from .quality import DECODED, measure
    from .texts import pick_context, read_texts, token_windows

    if options.windows < 1:
        raise UserError(f"--windows {options.windows} must be at least 1")
    codec = load_codec(options.codec)
    texts = read_texts(options.text)
    loaded = load(options.model)
    codec.check_model(layer_specs(loaded.model), loaded.sha256)
    context = pick_context(options.context, loaded.model.config)
    decoded = min(DECODED, context // 2)
    model = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "model": loaded.name,
        "codec": str(options.codec),
        "config": codec.config.to_json(),
        "ratio": round(codec.config.ratio(codec.info.model["num_layers"]), 4),
        "effort": codec.info.effort,
        "context": context,
        "decoded": decoded,
        "texts": {},
    }
    for text in texts:
        windows = token_windows(loaded.tokenizer, [text], context, options.windows)
        if not windows:
            raise UserError(f"--text {text.name} has fewer than {context} tokens; give a longer one or --context")
        with _bar(text.name, len(windows)) as advance:
            score = measure(model, codec, windows, decoded, advance)
        report["texts"][text.name] = {"sha256": text.sha256, **score.summary()}
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{codec.config.summary()}: ratio {report['ratio']:.4f}, {report['effort']} fit; "
        f"context {context}, last {decoded} decoded"
    )
    print(f"{'text':<24} windows  ppl exact     ppl   increase (95 % interval)      KL       top-1")
    for name, row in report["texts"].items():
        low, high = row["interval"]
        print(
            f"{name[:24]:<24} {row['windows']:>7}  {row['ppl_exact']:>9.3f} {row['ppl']:>9.3f}  "
            f"{row['increase']:>+7.2%} ({low:+.2%} to {high:+.2%})  {row['kl']:.5f}  {row['top1']:.4f}"
        )
    mean = sum(row["increase"] for row in report["texts"].values()) / len(report["texts"])
    print(f"mean perplexity increase {mean:+.2%}")


def _bar(label: str, total: int) -> Any:
    """A progress bar on stderr, as a function that advances it by one."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar() -> Any:
        with Progress(console=Console(stderr=True)) as bars:
            task = bars.add_task(label, total=total)
            yield lambda: bars.advance(task)

    return bar()
