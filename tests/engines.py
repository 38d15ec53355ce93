"""Engines of tiny models, made without a fit, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import save_tiny
from transformers import PreTrainedModel

from calib import models
from calib.adapter import layer_specs
from calib.codec import Codec, CodecInfo, compressed_layers
from export.build import BuildOptions, write_engine
from plugins.layer import LayerSpec
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import LayerCodec, Quantiser


def random_codec(model: PreTrainedModel, config: VQKVConfig, sha256: str = "", seed: int = 0) -> Codec:
    """Tables nobody fitted: orthogonal matrices and Gaussian codewords. What they lose does not matter to parity."""
    generator = torch.Generator().manual_seed(seed)
    specs = {spec.layer: spec for spec in layer_specs(model)}

    def side(spec: LayerSpec, groups: int, stages: tuple[int, ...], entries: int) -> Quantiser:
        sets, dim = spec.num_kv_heads if config.tables == "head" else 1, spec.head_dim
        matrix = torch.linalg.qr(torch.randn(sets, dim, dim, generator=generator))[0]
        return Quantiser(
            books=torch.randn(sets, sum(stages), entries, dim // groups, generator=generator),
            encode=matrix,
            decode=matrix.transpose(1, 2).contiguous(),
            mean=torch.randn(spec.num_kv_heads, dim, generator=generator),
            stages=stages,
        )

    layers = {
        layer: LayerCodec(
            config,
            side(specs[layer], config.k_groups, config.k_stages, config.k_entries),
            side(specs[layer], config.v_groups, config.v_stages, config.v_entries),
        )
        for layer in compressed_layers(config, list(specs.values()))
    }
    first = specs[min(layers)]
    made_for = {
        "name": "tiny",
        "sha256": sha256,
        "architecture": type(model).__name__,
        "num_layers": len(specs),
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
    }
    info = CodecInfo("vqkv", config, made_for, texts=[], effort="quick", seed=seed, context=0, vectors=0)
    return Codec(info, layers)


def make_engine(
    folder: Path, family: str, config: VQKVConfig | None = None, options: dict[str, Any] | None = None, **changes: Any
) -> tuple[PreTrainedModel, Codec | None]:
    """Write an engine of a tiny model to `folder`; returns the model (float32) and, given `config`, the random codec.

    options: fields of BuildOptions. changes: fields of the model's configuration.
    """
    source = folder.with_name(folder.name + "-model")
    model = save_tiny(source, family, **changes)
    loaded = models.load(str(source), progress=False)
    codec = random_codec(model, config, loaded.sha256) if config else None
    folder.mkdir(parents=True)
    write_engine(folder, loaded, codec, BuildOptions(out=folder, **({"kv_dtype": "fp32"} | (options or {}))))
    return model, codec
