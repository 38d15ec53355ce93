"""An engine of a published model's shape with random weights, for measuring speed and memory without a download.

python tests/shape_engine.py llama-3.1-8b --method vqkv --set layout=tiles --out engine
With --share every layer's weights lie at one place of the file (not in the GPU's memory), which is thus small. With
--fit the tables are fitted instead, and the time that took is told.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import onnx_ir as ir
import torch
from engines import random_codec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from calib.adapter import layer_specs
from calib.fit import fit_codec
from calib.models import LoadedModel
from calib.texts import default_text, read_texts
from export.build import BuildOptions, write_engine
from plugins.config import MethodConfig
from plugins.methods import METHODS, config_class

SHAPES = {
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def model_of(config: PretrainedConfig, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model of random weights whose layers are the first one's: parameters of their own over the same memory."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    layers = model.model.layers
    parts = [layers[0], *(part for name, part in model.named_children() if name != "model")]
    parts += [part for name, part in model.model.named_children() if name not in ("layers", "rotary_emb")]
    for part in parts:
        part.to_empty(device="cpu")
        for name, parameter in part.named_parameters():
            nn.init.ones_(parameter) if "norm" in name or parameter.ndim == 1 else parameter.data.normal_(std=0.02)
    first = dict(layers[0].named_parameters())
    for layer in layers[1:]:
        for name, parameter in first.items():
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(parameter.data, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval().requires_grad_(False)


def method_config(method: str, model: PreTrainedModel, ratio: float | None, settings: Sequence[str]) -> MethodConfig:
    specs, kind = layer_specs(model), config_class(method)
    if method == "deltakv":
        first = specs[0]
        latents = f"{first.num_kv_heads * first.head_dim // 2}x4"
        base = kind(first.head_dim, first.num_kv_heads, latents, full_layers=(0, 1, 2, 8, 18))
        return base.override(settings)
    base = kind.for_layers(specs) if ratio is None and method != "vqkv" else kind.for_layers(ratio or 0.172, specs)
    return base.override(settings)


def fit(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """Fit a codec to options.out, on the GPU where there is one, and print the seconds it took."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = read_texts(options.text) if options.text else [default_text()]
    config = method_config(options.method, model, options.ratio, options.settings)
    started = time.perf_counter()
    info = fit_codec(model, tokenizer, config, texts, options.fit, 0, options.context, options.out)
    seconds, layers = time.perf_counter() - started, len(info.errors)
    told = {"seconds": seconds, "layers": layers, "vectors": info.vectors, "config": config.summary()}
    print(json.dumps(told))


def save_shared(model: ir.Model, path: Path, external_data: str) -> None:
    """As `ir.save`, with equal initializers stored once."""
    places: dict[tuple[tuple, bytes], int] = {}
    with open(path.parent / external_data, "wb") as file:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor.nbytes < 1024:
                continue
            data = memoryview(tensor.tobytes())
            key = (tuple(tensor.shape), hashlib.sha256(data[:65536]).digest())  # weights are random: no two begin alike
            if key not in places:
                file.write(b"\0" * (-file.tell() % 4096))
                places[key] = file.tell()
                file.write(data)
            shape, place = tensor.shape, places[key]
            value.const_value = ir.ExternalTensor(
                external_data, place, tensor.nbytes, tensor.dtype, shape=shape, name=value.name, base_dir=path.parent
            )
    saved = ir.to_proto(model)
    path.write_bytes(saved.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--method", choices=("none", *METHODS), default="none")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--max-length", type=int, default=132096)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--fit", choices=("quick", "full"))
    parser.add_argument("--tokenizer", type=Path, help="of the fit: a Hugging Face folder")
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = dict(SHAPES[options.shape])
    settings["num_hidden_layers"] = options.layers or settings["num_hidden_layers"]
    settings["max_position_embeddings"] = options.max_length
    config = AutoConfig.for_model(**settings)
    model = model_of(config, DTYPES[options.dtype])
    codec = None
    if options.fit:
        fit(model.float(), options)
        return
    if options.method != "none":
        codec = random_codec(model, method_config(options.method, model, options.ratio, options.settings))
    loaded = LoadedModel(model, None, f"{options.shape} of random weights", Path(options.out.parent), "")
    options.out.mkdir(parents=True)
    kv = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}[options.dtype]
    build = BuildOptions(out=options.out, dtype=options.dtype, kv_dtype=kv)
    with mock.patch.object(ir, "save", save_shared if options.share else ir.save):
        write_engine(options.out, loaded, codec, build)
    told = {p.name: p.stat().st_size for p in sorted(options.out.iterdir())}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
