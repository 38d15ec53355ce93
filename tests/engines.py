"""Engines of tiny models, made without a fit, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import save_tiny
from transformers import PreTrainedModel

from calib import models
from calib.adapter import layer_specs
from calib.codec import Codec, CodecInfo, compressed_layers
from calib.reference import ReferenceModel
from export.build import BuildOptions, write_engine
from export.oracle import selections, stored
from export.verify import TIE, decode_steps, stored_rows
from plugins.config import MethodConfig
from plugins.deltakv import reference as deltakv
from plugins.deltakv.config import DeltaKVConfig
from plugins.intkv import reference as intkv
from plugins.intkv.config import IntKVConfig
from plugins.layer import LayerSpec
from plugins.methods import folder
from plugins.vqkv import reference as vqkv
from plugins.vqkv.config import VQKVConfig
from runtime import Engine


def random_codec(model: PreTrainedModel, config: MethodConfig, sha256: str = "", seed: int = 0) -> Codec:
    """Tables nobody fitted: orthogonal matrices and Gaussian codewords. What they lose does not matter to parity."""
    generator = torch.Generator().manual_seed(seed)
    specs = {spec.layer: spec for spec in layer_specs(model)}
    make = {"vqkv": random_quantisers, "deltakv": random_compressor, "intkv": random_means}[folder(config.METHOD)]
    compressed = compressed_layers(config, list(specs.values()))
    layers = {layer: make(config, specs[layer], generator) for layer in compressed}
    first = specs[min(layers)]
    made_for = {
        "name": "tiny",
        "sha256": sha256,
        "architecture": type(model).__name__,
        "num_layers": len(specs),
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
    }
    info = CodecInfo(config.METHOD, config, made_for, texts=[], effort="quick", seed=seed, context=0, vectors=0)
    return Codec(info, layers)


def random_quantisers(config: VQKVConfig, spec: LayerSpec, generator: torch.Generator) -> vqkv.LayerCodec:
    sets, dim = spec.num_kv_heads if config.tables == "head" else 1, spec.head_dim

    def side(groups: int, stages: tuple[int, ...], entries: int) -> vqkv.Quantiser:
        matrix = torch.linalg.qr(torch.randn(sets, dim, dim, generator=generator))[0]
        return vqkv.Quantiser(
            books=torch.randn(sets, sum(stages), entries, dim // groups, generator=generator),
            encode=matrix,
            decode=matrix.transpose(1, 2).contiguous(),
            mean=torch.randn(spec.num_kv_heads, dim, generator=generator),
            stages=stages,
        )

    keys = side(config.k_groups, config.k_stages, config.k_entries)
    values = side(config.v_groups, config.v_stages, config.v_entries)
    if config.layout == "tiles":
        values.books = vqkv.byte_values(values.books)
    return vqkv.LayerCodec(config, keys, values)


def random_compressor(config: DeltaKVConfig, spec: LayerSpec, generator: torch.Generator) -> deltakv.LayerCodec:
    width, dim, hidden = config.width, config.latent_dim, config.hidden
    axes = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:, :dim].contiguous()
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, dim)} if hidden else {}
    extra = {name: torch.randn(shape, generator=generator) / shape[0] ** 0.5 for name, shape in shapes.items()}
    center = torch.randn(width, generator=generator)
    return deltakv.LayerCodec(config, center, axes, axes.T.contiguous(), **extra)


def make_engine(
    folder: Path, family: str, config: MethodConfig | None = None, options: dict[str, Any] | None = None, **changes: Any
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


def random_means(config: IntKVConfig, spec: LayerSpec, generator: torch.Generator) -> intkv.LayerCodec:
    center = torch.randn(2, spec.num_kv_heads, spec.head_dim, generator=generator)
    return intkv.LayerCodec(config, center if config.mean else torch.zeros_like(center))


@dataclass
class Agreement:
    """An engine beside the reference that reads the engine's own codes and selections.

    difference: the largest of the logits. codes, selections: how many in all, different ones and flipped ties, int [3].
    """

    difference: float = 0.0
    codes: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    selections: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))

    def __str__(self) -> str:
        told = [f"largest difference of logits {self.difference:.2e}"]
        for what in ("codes", "selections"):
            total, wrong, flips = getattr(self, what)
            told.append(f"{flips} flipped ties and {wrong} other differences in {total:,} {what}")
        return "; ".join(told)


def follow(
    engine: Engine, model: PreTrainedModel, codec: Codec, rows: Sequence[Sequence[int]], prompts: Sequence[int]
) -> Agreement:
    """Prefill prompts[b] tokens of rows[b] and decode the others, as many in every row."""
    rest = [list(row[n:]) for row, n in zip(rows, prompts, strict=True)]
    with engine.session(batch=len(rows)) as session:
        first = session.prefill([list(row[:n]) for row, n in zip(rows, prompts, strict=True)])
        decoded, selected = decode_steps(session, list(zip(*rest, strict=True)))
        got = np.concatenate([first, decoded], axis=1)  # [B, 1 + steps, V]
        found = {name: torch.from_numpy(array) for name, array in (stored_rows(session) | selected).items()}
    result = Agreement()
    for b, prompt in enumerate(prompts):
        given = {layer: stored(codec, found, f"{b}.{layer}.") for layer in codec.layers}
        reference = ReferenceModel(model, codec, len(rows[b]), given=given)
        expected = [reference.step(rows[b][:prompt])[-1]]
        for step, token in enumerate(rest[b]):
            theirs = selections(found, b, step)
            expected.append(reference.step([token], theirs)[0])
            result.selections += reference.compare_selections(theirs, TIE)
        result.difference = max(result.difference, float(np.abs(torch.stack(expected).numpy() - got[b]).max()))
        for layer, theirs in given.items():
            result.codes += reference.caches[layer].compare(theirs, TIE)
    return result
