"""Engines of a published model's shape with random weights: for measuring speed and memory without a download.

    python tests/shape_engine.py graph llama-3.1-8b --method vqkv --set layout=tiles --out vqkv/
    python tests/shape_engine.py weights vqkv/
    python tests/shape_engine.py profile vqkv/ --batch 6 --past 130048

`graph` traces a model that has the shape's layers and heads but is small otherwise, gives every tensor the shape's
sizes and leaves the weights out: a minute, anywhere, and a few megabytes. `weights` makes them up, where the engine is
to run. Tensors of one size share one place of the file, not of the GPU's memory. What such an engine generates means
nothing.
`profile` splits a decode step's time on a GPU into products with weights, attention and the rest, each beside what
the memory alone would take. `config` writes the folder that `runtime bench latency --transformers` takes; `fit` times a
fit at the shape's sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from engines import random_codec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from calib.adapter import layer_specs
from calib.fit import fit_codec
from calib.models import LoadedModel
from calib.texts import default_text, read_texts
from export.build import BuildOptions, write_engine
from plugins.config import MethodConfig
from plugins.methods import METHODS, config_class
from runtime.artefact import write_config

SHAPES = {
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
FULL_LAYERS = (0, 1, 2, 8, 18)  # of deltakv, as its paper has them for Llama-3.1-8B
SMALL = {"hidden_size": 448, "intermediate_size": 456, "vocab_size": 648}  # numbers that mean nothing else in a graph
INLINE = 1 << 16  # bytes of a tensor that stays in the graph
DATA, REGIONS = "model.onnx.data", "regions.json"
PRODUCTS = ("nvjet", "gemm", "gemv", "splitK", "cutlass")  # in the names of cuBLAS's kernels
TORCH = {1: torch.float32, 10: torch.float16, 16: torch.bfloat16}  # by ONNX's numbers


def shape_config(shape: str, layers: int | None, max_length: int, **changes: int) -> PretrainedConfig:
    settings = SHAPES[shape] | {"max_position_embeddings": max_length} | changes
    return AutoConfig.for_model(**(settings | ({"num_hidden_layers": layers} if layers else {})))


def method_config(method: str, model: PreTrainedModel, ratio: float | None, settings: Sequence[str]) -> MethodConfig:
    specs, kind = layer_specs(model), config_class(method)
    if method == "deltakv":
        first = specs[0]
        full = tuple(layer for layer in FULL_LAYERS if layer < len(specs) - 1)
        latents = f"{first.num_kv_heads * first.head_dim // 2}x4"
        return kind(first.head_dim, first.num_kv_heads, latents, full_layers=full).override(settings)
    base = kind.for_layers(ratio or 0.172, specs) if method == "vqkv" else kind.for_layers(specs)
    return base.override(settings)


def graph(options: argparse.Namespace) -> None:
    config = shape_config(options.shape, options.layers, options.max_length, **SMALL)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    codec = None
    if options.method != "none":
        codec = random_codec(model, method_config(options.method, model, options.ratio, options.settings))
    loaded = LoadedModel(
        model.requires_grad_(False), None, f"{options.shape} of random weights", options.out.parent, ""
    )
    build = BuildOptions(out=options.out, dtype=options.dtype, kv_dtype=options.dtype)
    with tempfile.TemporaryDirectory() as small:
        write_engine(Path(small), loaded, codec, build)
        sizes = {SMALL[name]: SHAPES[options.shape][name] for name in SMALL}
        gate_and_up = 2 * SMALL["intermediate_size"]  # one product
        expand(Path(small), options.out, sizes | {gate_and_up: 2 * SHAPES[options.shape]["intermediate_size"]})


def expand(small: Path, out: Path, sizes: dict[int, int]) -> None:
    """The engine of `small` with other sizes, its larger tensors left to `weights`."""
    model = onnx.load(small / "model.onnx", load_external_data=False)
    onnx.load_external_data_for_model(model, str(small))
    regions: dict[tuple[tuple[int, ...], int], int] = {}
    end = 0
    for tensor in model.graph.initializer:
        dims = tuple(sizes.get(dim, dim) for dim in tensor.dims)
        nbytes = int(np.prod(dims, dtype=np.int64)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if dims == tuple(tensor.dims) and nbytes < INLINE:
            resize(tensor, sizes)
            continue
        if (dims, tensor.data_type) not in regions:
            regions[dims, tensor.data_type] = end
            end += -(-nbytes // 4096) * 4096
        place = {"location": DATA, "offset": regions[dims, tensor.data_type], "length": nbytes}
        for field in ("dims", "raw_data", "external_data"):
            tensor.ClearField(field)
        tensor.dims.extend(dims)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in place.items())
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                resize(attribute.t, sizes)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                dim.dim_value = sizes.get(dim.dim_value, dim.dim_value)
    config = json.loads((small / "config.json").read_text())
    for spec in config["outputs"]:
        spec["shape"] = [sizes.get(dim, dim) for dim in spec["shape"]]
    config["model"]["vocab_size"] = sizes[config["model"]["vocab_size"]]
    out.mkdir(parents=True)
    (out / "model.onnx").write_bytes(model.SerializeToString())
    (out / "config.json").write_text(json.dumps(config))
    (out / REGIONS).write_text(json.dumps([[list(dims), kind, start] for (dims, kind), start in regions.items()]))


def resize(tensor: onnx.TensorProto, sizes: dict[int, int]) -> None:
    """The sizes among the numbers of a constant that is a shape."""
    if tensor.data_type == onnx.TensorProto.INT64:
        numbers = [sizes.get(int(n), int(n)) for n in onnx.numpy_helper.to_array(tensor).reshape(-1)]
        tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, numbers))


def weights(folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    regions = folder / REGIONS
    with open(folder / DATA, "wb") as file:
        for dims, kind, start in json.loads(regions.read_text()):
            numbers = torch.ones(dims) if len(dims) == 1 else torch.randn(dims, device=device) * 0.02
            file.seek(start)
            file.write(memoryview(numbers.to(TORCH[kind]).cpu().contiguous().view(torch.int8).numpy()).cast("B"))
    regions.unlink()
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    write_config(folder, {name: value for name, value in config.items() if name not in ("files", "digest")})


def profile(folder: Path, batch: int, past: int) -> None:
    """Print where the time of a captured decode step of `batch` sequences after `past` tokens goes. One engine to a
    process: once the profiler was on, launches stay slower."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from plugins.bench.timing import copy_bandwidth
    from runtime import Engine
    from runtime.artefact import state_bytes

    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    sizes = {tensor.name: 2 * int(np.prod(tensor.dims, dtype=np.int64)) for tensor in graph.initializer}
    read = {"weights": sum(sizes.get(node.input[1], 0) for node in graph.node if node.op_type == "MatMul")}
    with Engine.open(folder, provider="cuda", verify=False) as engine, engine.session(batch) as session:
        session.allocate(past + 300)
        session.fill(past)
        read["attention"] = batch * state_bytes(engine.artefact, past)
        walls = []
        for _ in range(60):
            started = time.perf_counter()
            session.decode([1] * batch)
            walls.append(time.perf_counter() - started)
        steps = 4
        with profiler(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                session.decode([1] * batch)
    took: dict[str, float] = dict.fromkeys(("weights", "attention", "rest"), 0.0)
    last = 0.0  # a kernel may start before the one before it ends
    for event in sorted(found.events(), key=lambda e: e.time_range.end):
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name
        attends = "kvpack" in name and not any(small in name for small in ("add_rms_norm", "gated_activation"))
        kind = "attention" if attends else "weights" if any(w in name for w in PRODUCTS) else "rest"
        begin = max(event.time_range.start, last)
        last = max(last, event.time_range.end)
        took[kind] += max(event.time_range.end - begin, 0) / steps
    speed = copy_bandwidth(9)
    wall = 1e3 * float(np.median(walls[10:]))
    print(f"{folder.name} {batch} x {past}: {wall:.2f} ms a step; a copy moves {speed / 1e12:.2f} TB/s")
    for kind, microseconds in took.items():
        roof = f"{1e3 * read[kind] / speed:.2f} ms for {read[kind] / 1e9:.2f} GB" if kind in read else ""
        print(f"  {kind:10} {microseconds / 1e3:6.2f} ms   {roof}")


def fit(options: argparse.Namespace) -> None:
    """Fit a codec to options.out, on the GPU where there is one, and print the seconds it took.

    The layers are the first one's: parameters of their own over the same memory, until they are moved.
    """
    config = shape_config(options.shape, options.layers, options.max_length)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    layers = model.model.layers
    parts = [layers[0], *(part for name, part in model.named_children() if name != "model")]
    parts += [part for name, part in model.model.named_children() if name not in ("layers", "rotary_emb")]
    for part in parts:
        part.to_empty(device="cpu")
        for name, parameter in part.named_parameters():
            nn.init.ones_(parameter) if "norm" in name or parameter.ndim == 1 else parameter.data.normal_(std=0.02)
    for layer in layers[1:]:
        for name, parameter in layers[0].named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(parameter.data, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.eval().requires_grad_(False)
    texts = read_texts(options.text) if options.text else [default_text()]
    chosen = method_config(options.method, model, options.ratio, options.settings)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    started = time.perf_counter()
    info = fit_codec(model, tokenizer, chosen, texts, options.effort, 0, options.context, options.out)
    told = {"seconds": time.perf_counter() - started, "layers": len(info.errors), "vectors": info.vectors}
    print(json.dumps(told | {"config": chosen.summary()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shaped = argparse.ArgumentParser(add_help=False)
    shaped.add_argument("shape", choices=SHAPES)
    shaped.add_argument("--layers", type=int)
    shaped.add_argument("--max-length", type=int, default=132096)
    shaped.add_argument("--out", type=Path, required=True)
    coded = argparse.ArgumentParser(add_help=False)
    coded.add_argument("--method", choices=("none", *METHODS), default="none")
    coded.add_argument("--ratio", type=float)
    coded.add_argument("--set", dest="settings", action="append", default=[])
    traced = commands.add_parser("graph", parents=[shaped, coded])
    traced.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="bf16")
    commands.add_parser("weights").add_argument("folders", type=Path, nargs="+")
    commands.add_parser("config", parents=[shaped])
    profiled = commands.add_parser("profile")
    profiled.add_argument("folder", type=Path)
    profiled.add_argument("--batch", type=int, default=1)
    profiled.add_argument("--past", type=int, default=130048)
    fitted = commands.add_parser("fit", parents=[shaped, coded])
    fitted.add_argument("--effort", choices=("quick", "full"), default="quick")
    fitted.add_argument("--tokenizer", type=Path, required=True, help="a Hugging Face folder")
    fitted.add_argument("--text", type=Path, nargs="+")
    fitted.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    if options.command == "weights":
        for folder in options.folders:
            weights(folder)
    elif options.command == "profile":
        profile(options.folder, options.batch, options.past)
    elif options.command == "config":
        shape_config(options.shape, options.layers, options.max_length).save_pretrained(options.out)
    else:
        {"graph": graph, "fit": fit}[options.command](options)


if __name__ == "__main__":
    main()
