"""Model and codec in, verified engine folder out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.request import FitRequest
from plugins.errors import UserError
from runtime.artefact import FORMAT, Artefact, write_config

from .inspect import memory_table
from .tensorrt.options import PlanOptions, check_selection
from .tensorrt.packages import PACKAGES

if TYPE_CHECKING:
    from calib.codec import Codec
    from calib.models import LoadedModel
    from plugins.layer import LayerSpec

    from .passes import Assembly

KVPACK = "0.1.0"
ONNXRUNTIME = "onnxruntime"
BACKENDS = (ONNXRUNTIME, *PACKAGES)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TOOLS = ("onnxruntime", "onnx", "torch", "transformers")  # whose versions an engine records
QUALITY_WINDOWS, QUALITY_CONTEXT = 2, 1024  # the loss that every build measures on its own text


@dataclass(frozen=True)
class BuildOptions:
    """What `python -m export build` was asked for; see its --help."""

    out: Path
    model: str | None = None
    request: FitRequest = FitRequest()
    codec: Path | None = None
    backend: str = ONNXRUNTIME
    dtype: str | None = None  # fp32, or fp16 of plans
    kv_dtype: str | None = None  # bf16 with --dtype bf16, else fp16
    provider: str = "cpu"
    max_length: int | None = None
    plan: PlanOptions = PlanOptions()
    progress: bool = True

    def __post_init__(self) -> None:
        if self.dtype is None:
            object.__setattr__(self, "dtype", "fp32" if self.backend == ONNXRUNTIME else "fp16")
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", "bf16" if self.dtype == "bf16" else "fp16")


class BuildFailed(UserError):
    """A check of the build's own verification did not hold."""


def build(options: BuildOptions, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Build the engine at options.out, check it, and return its report.

    The folder appears under its name only when every check held. Raises UserError (BuildFailed for a failed check).
    """
    _check_options(options)
    with _folder_in_the_making(options.out) as folder:
        from calib import models

        say("Reading the model")
        loaded = models.load(options.model, progress=options.progress)
        _max_length(options, loaded)
        _check_disk(loaded, options, folder)
        codec = None
        if options.request.name != "none":
            say("Preparing the codec")
            codec = _codec(options, loaded)
        if options.backend in PACKAGES:
            _check_plan(options, loaded, codec)
        quality = _quality(options, loaded, codec, say)
        say("Tracing the model to a graph")
        config = write_engine(folder, loaded, codec, options)
        del loaded  # the weights are in the graph now
        report = _prove(options, folder, config, codec, quality, say)
        if options.backend in PACKAGES:
            from .tensorrt import plan

            say("Building the plan")
            report["plan"] = plan.make(folder, config, options.backend, options.plan)
            report["plan"]["unverified"] = (
                "the plan was not run where it was built: check it on its GPU with "
                f"`python -m export verify {options.out} --model {options.model or 'smollm2'}`"
            )
            write_config(folder, config)
            report["memory"] = memory_table(Artefact.open(folder, verify=False))  # some plans hold the cache twice
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write_config(folder, config)
    return report


def write_engine(folder: Path, loaded: LoadedModel, codec: Codec | None, options: BuildOptions) -> dict[str, Any]:
    """Write graph, codec, tokenizer and config.json of an engine into `folder`, unverified; returns the configuration.

    Casts loaded.model to options.dtype.
    """
    from safetensors.torch import save_file

    from calib import codec as codecs
    from calib.adapter import layer_specs

    specs = layer_specs(loaded.model)
    limit = _max_length(options, loaded)
    assembly = _write_graph(options, loaded, codec, specs, limit, folder)
    if codec is not None:
        save_file(codec.tensors(), folder / codecs.TENSORS)
        (folder / codecs.DESCRIPTION).write_text(json.dumps(codec.info.to_json(), indent=1) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (loaded.folder / name).is_file():
            shutil.copyfile(loaded.folder / name, folder / name)
    return write_config(folder, _config(options, loaded, codec, specs, limit, assembly))


def _check_options(options: BuildOptions) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "an engine is built by one process: fit with `torchrun -m calib fit`, then build with --codec and without "
            "torchrun"
        )
    method, given = options.request.name, options.request.given()
    if options.backend not in BACKENDS:
        raise UserError(f"--backend {options.backend} is unknown: use one of {', '.join(BACKENDS)}")
    if options.backend in PACKAGES and options.provider != "cpu":
        raise UserError(
            f"--provider {options.provider} is where an engine of ONNX Runtime is checked: leave it out, and check the "
            "plan on its GPU with `python -m export verify`"
        )
    options.plan.check(options.backend, options.dtype, options.kv_dtype)
    if options.out.exists():
        raise UserError(f"--out {options.out} exists already: name another folder or remove it")
    if method == "none" and options.codec is not None:
        given["--codec"] = options.codec
    if method == "none" and given:
        raise UserError(f"{min(given)} has no meaning with --method none, which does not compress: leave it out")
    if options.codec is not None and given:
        raise UserError(f"{min(given)} cannot change the finished codec of --codec {options.codec}: leave one out")


@contextmanager
def _folder_in_the_making(out: Path):
    """A temporary folder beside `out`, renamed to it when the block succeeds and removed when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _max_length(options: BuildOptions, loaded: LoadedModel) -> int:
    own = int(loaded.model.config.max_position_embeddings)
    if options.max_length is None:
        return own
    if not 1 <= options.max_length <= own:
        raise UserError(f"--max-length {options.max_length} must be between 1 and the model's own limit of {own}")
    return options.max_length


def _check_plan(options: BuildOptions, loaded: LoadedModel, codec: Codec | None) -> None:
    """Raises UserError for what is asked of a plan and would come to light after the model was traced and checked."""
    from calib.adapter import layer_specs

    from .passes import described
    from .plans import layer_plans
    from .tensorrt.plan import check_plugins

    limit, specs = _max_length(options, loaded), layer_specs(loaded.model)
    options.plan.profiles(options.backend, limit)
    check_selection(options.backend, codec.config.geometry() if codec else None, limit)
    plans, _ = layer_plans(codec, specs, options.kv_dtype, limit, int16=False)
    check_plugins({"dtype": options.dtype, "kv_dtype": options.kv_dtype, "nodes": described(plans)},
                  options.backend, options.plan)  # fmt: skip


def _check_disk(loaded: LoadedModel, options: BuildOptions, folder: Path) -> None:
    size = {"fp32": 4, "fp16": 2, "bf16": 2}[options.dtype]
    copies = 1  # of the weights: in the graph, and for each profile in the form that suits it
    if options.backend in PACKAGES:
        copies += len(options.plan.profiles(options.backend, _max_length(options, loaded)))
    needed = int(sum(p.numel() for p in loaded.model.parameters()) * size * copies * 1.1) + (64 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{options.out.parent} has {free >> 20} MiB free and the engine needs {needed >> 20}: make room"
        )


def _codec(options: BuildOptions, loaded: LoadedModel) -> Codec:
    """The codec given, or one fitted now."""
    from calib import codec as codecs
    from calib.adapter import layer_specs
    from calib.fit import fit_for, fit_identity
    from calib.gguf import cache_folder

    specs = layer_specs(loaded.model)
    if options.codec is not None:
        codec = codecs.load(options.codec)
        if options.request.method not in (None, codec.info.method):
            raise UserError(
                f"--codec {options.codec} is of method {codec.info.method}, not {options.request.method}: "
                "leave --method out"
            )
        codec.check_model(specs, loaded.sha256)
        codec.config.check_exportable()
        return codec
    identity = {"kvpack": KVPACK, "model": loaded.sha256, "fit": fit_identity(options.request, loaded)}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    out = cache_folder() / "codecs" / key
    with _alone(out):
        if not (out / codecs.DESCRIPTION).is_file():
            fit_for(options.request, loaded, out, options.progress, lambda config: config.check_exportable())
    return codecs.load(out)


@contextmanager
def _alone(out: Path):
    """While another build fits the same codec, wait for it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _quality(
    options: BuildOptions, loaded: LoadedModel, codec: Codec | None, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """What the codec loses on windows of its own text, simulated in torch; the eval commands measure other texts."""
    from calib.quality import measure
    from calib.texts import token_windows

    if codec is None:
        return None
    say("Measuring what the codec loses")
    context = min(QUALITY_CONTEXT, int(loaded.model.config.max_position_embeddings))
    texts = options.request.contents
    windows = token_windows(loaded.tokenizer, texts, context, QUALITY_WINDOWS)
    if not windows:
        return None
    summary = measure(loaded.model, codec, windows, decoded=context // 4).summary()
    return {"text": [text.name for text in texts], "context": context, **summary}


def _write_graph(
    options: BuildOptions,
    loaded: LoadedModel,
    codec: Codec | None,
    specs: Sequence[LayerSpec],
    limit: int,
    folder: Path,
) -> Assembly:
    """Trace, rewrite, save. Returns the assembly, whose inputs and outputs are the tensor contract."""
    import onnx_ir as ir
    import torch

    from calib.adapter import rope_tables

    from .passes import Assembly, assemble
    from .plans import DTYPES, layer_plans
    from .trace import trace

    ropes = [(cos.numpy(), sin.numpy()) for cos, sin in rope_tables(loaded.model, limit)]
    plans, tables = layer_plans(codec, specs, options.kv_dtype, limit, int16=options.backend == ONNXRUNTIME)
    model = loaded.model.to(getattr(torch, DTYPES[options.dtype]))
    assembly = Assembly(trace(model), specs, plans, tables, ropes, tiled=options.backend != "tensorrt-rtx")
    assemble(assembly)
    ir.save(assembly.model, folder / "model.onnx", external_data="model.onnx.data")
    return assembly


def _config(
    options: BuildOptions,
    loaded: LoadedModel,
    codec: Codec | None,
    specs: Sequence[LayerSpec],
    limit: int,
    assembly: Assembly,
) -> dict[str, Any]:
    from calib.adapter import frozen_rope

    method: dict[str, Any] = {"name": "none", "config": {}, "ratio": 1.0}
    if codec is not None:
        method = {
            "name": codec.info.method,
            "config": codec.config.to_json(),
            "ratio": codec.config.ratio(len(specs)),
            "layers": sorted(codec.layers),
        }
    return {
        "format": FORMAT,
        "kvpack": KVPACK,
        "model": {
            "name": loaded.name,
            "architecture": type(loaded.model).__name__,
            "sha256": loaded.sha256,
            "vocab_size": int(loaded.model.config.vocab_size),
            "num_layers": len(specs),
            "num_kv_heads": specs[0].num_kv_heads,
            "head_dim": specs[0].head_dim,
        },
        "method": method,
        "dtype": options.dtype,
        "kv_dtype": options.kv_dtype,
        "limits": {"max_length": limit, "frozen_rope": frozen_rope(loaded.model)},
        "geometry": codec.config.geometry().to_json() if codec else None,
        "inputs": [spec.to_json() for spec in assembly.inputs],
        "outputs": [spec.to_json() for spec in assembly.outputs],
        "nodes": assembly.nodes,
        "fixed_bytes": sum(array.nbytes for tables in assembly.tables for array in tables.values()),
        "target": {
            "backend": ONNXRUNTIME,  # until there is a plan
            "versions": {name: import_module(name).__version__ for name in TOOLS},
        },
    }


def _prove(
    options: BuildOptions,
    folder: Path,
    config: dict[str, Any],
    codec: Codec | None,
    quality: dict[str, Any] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run every check on the folder with the finished graph and return the report. Raises BuildFailed when one does not
    hold.

    An engine that this provider cannot run is checked as far as that goes without, and its report says so.
    """
    from calib.texts import default_text
    from runtime import Engine

    from . import verify

    model, checks, unverified = options.model or "smollm2", [], None
    artefact = Artefact.open(folder)
    if options.provider == "cpu" and "bf16" in (options.dtype, options.kv_dtype):
        command = f"python -m export verify {options.out} --model {model}"
        if options.backend == ONNXRUNTIME:
            command += " --provider cuda"
        unverified = f"bf16 runs on a GPU only: check it there with `{command}`"
    else:
        say("Checking the engine against the model")
        with Engine.open(folder, provider=options.provider) as engine:
            sequences, prompts = verify.verification_tokens(engine, default_text().content)
            checks = verify.against_model(engine, model, sequences, prompts)
            verify.make_canary(engine, sequences, prompts, folder)
    report = {
        "verified": unverified is None,
        "unverified": unverified,
        "checks": [check.to_json() for check in checks],
        "method": config["method"],
        "memory": memory_table(artefact),
        "fixed_bytes": config["fixed_bytes"],
        "limits": config["limits"],
        "quality": quality,
        "faster_on_gpu": codec.config.faster_on_gpu() if codec and options.dtype != "fp32" else "",
        "codec": codec.info.to_json() if codec else None,
    }
    failed = [check for check in checks if not check.ok]
    if failed:
        worst = failed[0]
        raise BuildFailed(
            f"{worst.name} is {worst.value:.3g}, above {worst.limit:.3g}: no engine was written; "
            "please report this model, or try --dtype fp32 and --kv-dtype fp32"
        )
    return report
