"""`python -m calib fit` makes a codec, `python -m calib quality` tells what it costs. Heavy imports come last."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError
from plugins.methods import METHODS, folder

from .request import add_arguments, add_reading, from_arguments

if TYPE_CHECKING:
    from .codec import Codec, CodecInfo


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
    add_reading(quality)
    quality.add_argument("--codec", type=Path, required=True, metavar="DIR", help="codec folder")
    quality.add_argument("--windows", type=int, default=8, help="windows per text (default: %(default)s)")
    quality.add_argument(
        "--recall", type=int, default=0, metavar="N",
        help="also ask for strings hidden in the text, N times each: one number, one of ten, one UUID of a JSON object",
    )  # fmt: skip
    select = quality.add_mutually_exclusive_group()
    select.add_argument(
        "--select", choices=("all",), help="deltakv: measure with decode steps that read every compressed token"
    )
    select.add_argument("--select-fraction", type=float, metavar="F", help="deltakv: that read this part of them")
    select.add_argument("--select-count", type=int, metavar="N", help="deltakv: that read this many of them")
    quality.add_argument("--json", action="store_true", help="print the report as JSON")
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
    from .models import LoadedModel, load
    from .train import World

    request = from_arguments(options)
    with World.joined() as world:
        own: list[LoadedModel] = []
        world.first(lambda: own.append(load(options.model)))  # downloads or converts it, and the others find it done
        loaded = own[0] if own else load(options.model, progress=False)
        info = fit_for(request, loaded, options.out)
        if world.rank > 0:
            return
    ratio, asked = info.config.ratio(info.model["num_layers"]), request.target
    if asked is not None and ratio > asked + RATIO_SLACK:
        print(f"note: --set raises the ratio to {ratio:.4f}, above --ratio {asked:g}", file=sys.stderr)
    report = {**info.to_json(), "ratio": round(ratio, 4), "out": str(options.out)}
    if options.json:
        print(json.dumps(report))
        return
    print(f"{info.config.summary()}: ratio {ratio:.4f}, {info.vectors} vectors, {_way(info)}, seed {info.seed}")
    {"deltakv": _print_deltakv, "vqkv": _print_vqkv, "intkv": _print_intkv}[folder(info.method)](info)
    print(f"wrote {options.out}")


def _way(info: CodecInfo) -> str:
    """How a codec was fitted: "fast fit, effort quick"."""
    return (f"{info.fit} fit, " if info.fit else "") + f"effort {info.effort}"


def _print_vqkv(info: CodecInfo) -> None:
    print("held-out error per stage, as a fraction of the energy")
    print("layer  K stages                 (fit)   V stages                 (fit)   dead entries")
    for layer, sides in info.errors.items():
        cells = [f"{_stages(sides[s]['stages']):<24} {sides[s]['train']:.4f}" for s in ("k", "v")]
        print(f"{layer:>5}  {cells[0]}  {cells[1]}  {sides['k']['dead'] + sides['v']['dead']:>6}")


def _print_intkv(info: CodecInfo) -> None:
    print("held-out squared error, as a fraction of the energy about the mean")
    print("layer  K        V")
    for layer, error in info.errors.items():
        print(f"{layer:>5}  {error['k']:.5f}  {error['v']:.5f}")


def _stages(errors: Sequence[float]) -> str:
    shown = [f"{error:.4f}" for error in errors]
    return " ".join(shown if len(shown) <= 3 else [shown[0], "..", shown[-1]])


def _print_deltakv(info: CodecInfo) -> None:
    choice, selects = info.choice, info.config.geometry().selects
    if "alternatives" in choice:
        print("expected error of the attention outputs, summed over layers, of the best configurations")
        for item in choice["alternatives"]:
            mark = "*" if item["error"] == choice["error"] else " "
            layers = ",".join(map(str, item["full_layers"])) or "none"
            print(
                f"{mark} {item['error']:.4f}  stride {item['stride']:>2}, latents {item['latents']}, "
                f"full layers {layers}"
            )
    print(
        "held-out error in the fitted metric, as fractions: left by the references, then by the latents, of x's energy;"
    )
    print("of the residual's energy (and where fitted); of the attention output's energy")
    trained = choice.get("training")
    if trained:
        print("trained: x's plain error, before and after the training")
    told = choice.get("layers") if selects else None
    print(
        "layer  references  latents  residual   (fit)   output"
        + ("  before  trained" if trained else "")
        + ("  observer  missed  coverage" if told else "")
    )
    for layer, error in info.errors.items():
        line = f"{layer:>5}  {error['references']:>10.4f}  {error['x']:.5f}  {error['residual']:>8.4f}  "
        line += f"{error['train']:.4f}  {error['output']:.5f}"
        if trained:
            line += f"  {error['before']:.4f}   {error['after']:.4f}"
        if told:
            read = told[layer]
            line += f"  {read['observer']:>8}  {read['missed']:.4f}  {read['coverage']:>8.3f}"
        print(line)
    if trained:
        term = {"kl": "KL divergence from the exact model", "ce": "cross entropy"}[trained["objective"]]
        print(
            f"{trained['steps']} steps of training took the held-out {term} from {trained['held_out_before']:.4g} to "
            f"{trained['held_out_after']:.4g} nats"
        )


def run_quality(options: argparse.Namespace) -> None:
    import torch

    from .adapter import layer_specs
    from .codec import load as load_codec
    from .codec import observing_layers
    from .fit import bars
    from .models import load
    from .quality import DECODED, measure
    from .recall import KINDS, samples, score
    from .texts import pick_context, read_texts, token_windows

    if options.windows < 1:
        raise UserError(f"--windows {options.windows} must be at least 1")
    if options.recall < 0:
        raise UserError(f"--recall {options.recall} must be 0 or more")
    codec = selecting(load_codec(options.codec), options)
    texts = read_texts(options.text)
    loaded = load(options.model)
    specs = layer_specs(loaded.model)
    codec.check_model(specs, loaded.sha256)
    observing_layers(codec.config, specs)
    context = pick_context(options.context, loaded.model.config)
    decoded = min(DECODED, context // 2)
    windows = {text.name: token_windows(loaded.tokenizer, [text], context, options.windows) for text in texts}
    if short := [name for name, found in windows.items() if not found]:
        raise UserError(f"--text {short[0]} has fewer than {context} tokens; give a longer one or --context")
    haystack = "\n\n".join(text.content for text in texts)
    given = (loaded.tokenizer, haystack, context, options.recall)
    asked = {kind: samples(kind, *given, seed=0) for kind in KINDS} if options.recall else {}
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
        "recall": {},
    }
    with bars(True) as bar:
        for text in texts:
            found = measure(model, codec, windows[text.name], decoded, bar(text.name, len(windows[text.name])))
            report["texts"][text.name] = {"sha256": text.sha256, **found.summary()}
        for kind, questions in asked.items():
            report["recall"][kind] = score(model, codec, questions, progress=bar(f"recall {kind}", len(questions)))
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{codec.config.summary()}: ratio {report['ratio']:.4f}, {_way(codec.info)}; "
        f"context {context}, last {decoded} decoded"
    )
    _print_quality(report)


def _print_quality(report: dict[str, Any]) -> None:
    print(f"{'text':<24} windows  ppl exact     ppl   increase (95 % interval)      KL       top-1")
    for name, row in report["texts"].items():
        low, high = row["interval"]
        print(
            f"{name[:24]:<24} {row['windows']:>7}  {row['ppl_exact']:>9.3f} {row['ppl']:>9.3f}  "
            f"{row['increase']:>+7.2%} ({low:+.2%} to {high:+.2%})  {row['kl']:.5f}  {row['top1']:.4f}"
        )
    mean = sum(row["increase"] for row in report["texts"].values()) / len(report["texts"])
    print(f"mean perplexity increase {mean:+.2%}")
    if report["recall"]:
        print(f"{'exact recall':<24} samples  answered right: exact, compressed  log-likelihood: exact, compressed")
    for kind, row in report["recall"].items():
        print(
            f"{kind:<24} {row['samples']:>7}  {row['exact_recall']:>21.1%}  {row['recall']:>10.1%}  "
            f"{row['exact_log_likelihood']:>21.3f}  {row['log_likelihood']:>10.3f}"
        )


def selecting(codec: Codec, options: argparse.Namespace) -> Codec:
    """The codec, its decode steps reading what the options say. Raises UserError for a method that reads all."""
    from .codec import Codec

    given = {"select_fraction": options.select_fraction, "select_count": options.select_count}
    given = {name: value for name, value in given.items() if value is not None}
    if not given and options.select is None:
        return codec
    if codec.info.method != "deltakv":
        raise UserError(
            f"--select and its like have no meaning with {options.codec}, a codec of method {codec.info.method}: "
            "leave them out"
        )
    for name, value in given.items():
        if value <= 0:
            raise UserError(f"--{name.replace('_', '-')} {value:g} must be above 0; --select all reads everything")
    config = replace(codec.config, **({"select_fraction": 0.0, "select_count": 0} | given))
    layers = {layer: replace(tables, config=config) for layer, tables in codec.layers.items()}
    return Codec(replace(codec.info, config=config), layers)
