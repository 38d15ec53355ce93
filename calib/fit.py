"""Fit a codec: record what the layers store, fit each, keep what is finished; deterministic for a seed, resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.config import MethodConfig
from plugins.errors import UserError
from plugins.methods import config_class, folder, reference

from .adapter import layer_specs
from .codec import Codec, CodecInfo, check_target, compressed_layers, load, save
from .request import FITS, FitRequest
from .texts import Text, pick_context
from .train import PLANS, World, tf32_products, train

if TYPE_CHECKING:
    from .models import LoadedModel

RECORD_BYTES = 2 << 30  # on a CPU; layers are recorded in as many passes over the text as this asks for


class Plan(Protocol):
    """What a method's module in this folder makes of a fit: `plan(tokenizer, config, texts, effort, context)`."""

    windows: list[list[int]]

    @property
    def vectors(self) -> int:
        """Tokens that each layer is fitted on."""

    def record_bytes(self, kv_heads: int) -> int:
        """Memory that the record of a layer takes."""

    def record(
        self, model: PreTrainedModel, layers: Sequence[int], seed: int, progress: Callable[[], None]
    ) -> dict[int, Any]:
        """What `fit_layer` needs of each of `layers`; `progress` is called after every window."""

    def fit_layer(self, seen: Any, layer: int, seed: int) -> tuple[Any, dict[str, Any]]:
        """The method's LayerCodec, on the CPU, and its errors. Raises UserError when it is of no use."""


def default_effort() -> str:
    """ "full" where there is a GPU, "quick" without one."""
    return "full" if torch.cuda.is_available() else "quick"


def fit_codec(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: MethodConfig,
    texts: Sequence[Text],
    effort: str,
    seed: int,
    context: int,
    out_dir: str | Path,
    progress: bool = True,
    *,
    model_name: str = "",
    model_sha256: str = "",
    fit: str = "fast",
    choice: dict[str, Any] | None = None,
) -> CodecInfo:
    """Fit a codec for `model` on `texts`, read in windows of `context` tokens, and write it to `out_dir`.

    fit: "fast" fits each layer on its own, "quality" (deltakv) then trains all of them through the model.
    choice: why `config` is as it is, for the codec's description.
    Runs on this process's CUDA device when there is one (the model comes back to where it was). Under torchrun the
    first process fits the layers and writes, and all of them train. Finished layers, the codec they make and the
    training's checkpoint are kept in `out_dir`.partial, from where an interrupted fit with the same arguments goes on.
    Raises UserError when the texts are too short, a layer cannot be fitted, or `out_dir` holds something else.
    """
    out_dir = Path(out_dir)
    partial = out_dir.with_name(out_dir.name + ".partial")
    with World.joined() as world:

        def begin() -> None:
            check_target(out_dir)
            check_fit(config.METHOD, fit, world.size)
            named = {"name": model_name, "sha256": model_sha256}
            fast = fit_layers(model, tokenizer, config, texts, effort, seed, context, partial, progress, named)
            save(replace(fast, info=replace(fast.info, choice=choice or {})), partial / "fast")

        world.first(begin)
        codec = load(partial / "fast")
        if fit == "quality":
            how = (PLANS[effort], seed, context, partial / "training", progress)
            codec = train(model, tokenizer, codec, texts, *how).to("cpu")
        world.wait()
        if world.rank == 0:
            save(codec, out_dir)
            shutil.rmtree(partial)
    return codec.info


def fit_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: MethodConfig,
    texts: Sequence[Text],
    effort: str,
    seed: int,
    context: int,
    partial: Path,
    progress: bool,
    named: dict[str, str],
) -> Codec:
    """The "fast" fit of `fit_codec`, its tables on the CPU.

    partial: folder of finished layers. named: "name" and "sha256" of the model.
    """
    specs = layer_specs(model)
    layers = compressed_layers(config, specs)
    sinks = config.geometry().sinks
    if context <= sinks:
        raise UserError(f"--context {context} must be more than the {sinks} sinks")
    plan: Plan = import_module(f".{folder(config.METHOD)}", __package__).plan(tokenizer, config, texts, effort, context)
    first = next(spec for spec in specs if spec.layer == layers[0])
    info = CodecInfo(
        method=config.METHOD,
        config=config,
        model={
            **named,
            "architecture": type(model).__name__,
            "num_layers": len(specs),
            "num_kv_heads": first.num_kv_heads,
            "head_dim": first.head_dim,
        },
        texts=[text.to_json() for text in texts],
        effort=effort,
        seed=seed,
        context=context,
        vectors=plan.vectors,
        fit="fast" if config.METHOD == "deltakv" else "",
        versions={"torch": torch.__version__},
    )
    kept = Partial(partial, info)
    finished = kept.open()
    missing = [layer for layer in layers if layer not in finished]
    home, device = model.device, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    room = torch.cuda.mem_get_info()[0] // 2 if device.type == "cuda" else RECORD_BYTES
    step = max(1, room // plan.record_bytes(first.num_kv_heads))
    passes = [missing[index : index + step] for index in range(0, len(missing), step)]
    try:
        with bars(progress) as bar:
            recorded = bar("recording windows", len(passes) * len(plan.windows))
            fitted = bar("fitting layers", len(layers), len(finished))
            for chunk in passes:
                with tf32_products(device):
                    records = plan.record(model, chunk, seed, recorded)
                for layer in chunk:
                    finished[layer] = kept.add(layer, *plan.fit_layer(records.pop(layer), layer, seed))
                    fitted()
    finally:
        model.to(home)
    info = replace(info, errors={str(layer): finished[layer][1] for layer in layers})
    return Codec(info, {layer: finished[layer][0] for layer in layers})


def check_fit(method: str, fit: str, processes: int = 1) -> None:
    """Raises UserError when `method` cannot be fitted this way by this many processes."""
    if fit not in FITS:
        raise UserError(f"--fit {fit} is unknown: use {' or '.join(FITS)}")
    if fit == "quality" and method != "deltakv":
        raise UserError(f"--fit quality trains deltakv's compressors and {method} has none: leave --fit out")
    if fit == "fast" and processes > 1:
        raise UserError(f"--fit fast runs in one process, not in {processes}: leave torchrun out")


# -- from what was asked for


def fit_for(
    request: FitRequest,
    loaded: LoadedModel,
    out: str | Path,
    progress: bool = True,
    check: Callable[[MethodConfig], None] = lambda config: None,
) -> CodecInfo:
    """Choose the configuration that `request` asks for, let `check` refuse it, and fit the codec to `out`.

    Raises UserError as `fit_codec`, `configure` and `check` do.
    """
    fit, out = _way(request), Path(out)
    texts = request.contents
    context = pick_context(request.context, loaded.model.config)
    with World.joined() as world:

        def chosen() -> tuple[MethodConfig, dict[str, Any]]:
            check_target(out)
            check_fit(request.name, fit, world.size)
            config, choice = configure(request, loaded, texts, context, progress)
            check(config)
            return config, choice

        config, choice = world.first(chosen)
        effort = request.effort or default_effort()
        return fit_codec(
            *(loaded.model, loaded.tokenizer, config, texts, effort, request.seed, context, out, progress),
            model_name=loaded.name,
            model_sha256=loaded.sha256,
            fit=fit,
            choice=choice,
        )


def configure(
    request: FitRequest, loaded: LoadedModel, texts: Sequence[Text], context: int, progress: bool = True
) -> tuple[MethodConfig, dict[str, Any]]:
    """The configuration for `request` and, where looking at the model chose it, the reasons. Raises UserError."""
    specs, ratio = layer_specs(loaded.model), request.target
    if ratio is None:
        return config_class(request.name).for_layers(specs).override(request.settings), {}
    if request.name == "vqkv":
        return config_class(request.name).for_layers(ratio, specs).override(request.settings), {}
    from .choose import WINDOWS, choose

    with bars(progress) as bar:
        step = bar("choosing layers", WINDOWS)
        given = (loaded.model, loaded.tokenizer, texts, ratio, request.settings, specs, request.seed, context)
        return choose(*given, step)


def fit_identity(request: FitRequest, loaded: LoadedModel) -> dict[str, Any]:
    """What decides the codec that `fit_for` makes of a model, as JSON."""
    return {
        "method": request.name,
        "ratio": request.target,
        "settings": list(request.settings),
        "texts": [text.sha256 for text in request.contents],
        "fit": _way(request),
        "effort": request.effort or default_effort(),
        "seed": request.seed,
        "context": pick_context(request.context, loaded.model.config),
    }


def _way(request: FitRequest) -> str:
    """How to fit. Raises UserError when that was asked of a method that knows one way only."""
    if request.fit and request.name != "deltakv":
        name = request.name
        raise UserError(f"--fit has no meaning with --method {name}, which is fitted in one way: leave --fit out")
    return request.fit or ("quality" if request.name == "deltakv" and torch.cuda.is_available() else "fast")


# -- resuming and progress


class Partial:
    """The folder of an unfinished fit: one file per finished layer, and what they were fitted with."""

    def __init__(self, folder: Path, info: CodecInfo) -> None:
        self.folder, self.info = folder, info
        self.stamp = json.dumps(info.to_json(), sort_keys=True)  # says nothing yet of errors and choice

    def open(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Layers already fitted with the same arguments; whatever else is in the folder is dropped."""
        stamp = self.folder / "fit.json"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != self.stamp:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            stamp.write_text(self.stamp, encoding="utf-8")
        found = {}
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                meta = json.loads(file.metadata()["layer"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
            tables = reference(self.info.method).LayerCodec.from_tensors(self.info.config, tensors)
            found[meta["number"]] = (tables, meta["errors"])
        return found

    def add(self, layer: int, tables: Any, errors: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        path = self.folder / f"layer-{layer:03d}.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in tables.tensors().items()}
        meta = {"layer": json.dumps({"number": layer, "errors": errors})}
        save_file(tensors, str(path.with_suffix(".writing")), metadata=meta)
        path.with_suffix(".writing").rename(path)
        return tables, errors


@contextmanager
def bars(show: bool) -> Iterator[Callable[..., Callable[[], None]]]:
    """Progress bars on stderr: called with a label, a total and what is done, it gives what advances one by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as shown:

        def bar(label: str, total: int, done: int = 0) -> Callable[[], None]:
            task = shown.add_task(label, total=total, completed=done)
            return lambda: shown.advance(task)

        yield bar
