"""A fitted codec: its tensors, what they do, and the folder they are kept in."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plugins.errors import UserError
from plugins.layer import LayerSpec
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import PARTS, Quantiser

TENSORS, DESCRIPTION = "codec.safetensors", "codec.json"
FORMAT = 1
MODEL_KEYS = {"name", "sha256", "architecture", "num_layers", "num_kv_heads", "head_dim"}


@dataclass
class CodecInfo:
    """What codec.json says: how the codec was made and how well it fits.

    errors: layer -> side ("k", "v") -> {"stages": held-out error after each stage as a fraction of the energy about
    the mean, in the metric the side was fitted in; "plain": the last one in plain squared error; "train": on the
    fitted vectors; "dead": codewords no vector chose}.
    """

    method: str
    config: VQKVConfig
    model: dict[str, Any]
    texts: list[dict[str, str]]
    effort: str
    seed: int
    context: int
    vectors: int
    errors: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CodecInfo:
        """Raises TypeError or KeyError when the keys are not those of a codec.json."""
        info = cls(**{**data, "config": VQKVConfig.from_json(data["config"])})
        if missing := MODEL_KEYS - set(info.model):
            raise KeyError(f"model.{min(missing)}")
        return info


@dataclass
class Codec:
    """info, and per compressed layer its quantisers {"k": ..., "v": ...}."""

    info: CodecInfo
    layers: dict[int, dict[str, Quantiser]]

    @property
    def config(self) -> VQKVConfig:
        return self.info.config

    def to(self, device: torch.device | str) -> Codec:
        moved = {n: {side: q.to(device) for side, q in sides.items()} for n, sides in self.layers.items()}
        return Codec(self.info, moved)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in codec.safetensors."""
        return {
            f"layers.{layer}.{side}.{part}": getattr(quantiser, part).float().cpu().contiguous()
            for layer, sides in self.layers.items()
            for side, quantiser in sides.items()
            for part in PARTS
        }

    def check_model(self, specs: Sequence[LayerSpec], sha256: str | None = None) -> None:
        """Raises UserError when the codec was fitted for another model than the one with these layers and hash."""
        config, made_for = self.config, self.info.model
        if sha256 and made_for["sha256"] and made_for["sha256"] != sha256:
            raise UserError(
                f"the codec was fitted for {made_for['name']} ({made_for['sha256'][:12]}), "
                f"the model given has hash {sha256[:12]}; fit one with `python -m calib fit`"
            )
        expected = compressed_layers(config, specs)
        if sorted(self.layers) != expected:
            raise UserError(
                f"the codec has tables for layers {sorted(self.layers)}, the model needs {expected}; "
                "fit one with `python -m calib fit`"
            )
        for spec in specs:
            if spec.layer in self.layers and self.layers[spec.layer]["k"].mean.shape[0] != spec.num_kv_heads:
                raise UserError(
                    f"layer {spec.layer}: the codec is for {self.layers[spec.layer]['k'].mean.shape[0]} KV heads, "
                    f"the model has {spec.num_kv_heads}; fit one with `python -m calib fit`"
                )


def choose_config(ratio: float, settings: Sequence[str], specs: Sequence[LayerSpec]) -> VQKVConfig:
    """The configuration for `ratio` on a model with these layers, with --set `settings` applied. Raises UserError."""
    head_dim = next((spec.head_dim for spec in specs if spec.window == 0), specs[0].head_dim)
    return VQKVConfig.from_ratio(ratio, head_dim).override(settings)


def compressed_layers(config: VQKVConfig, specs: Sequence[LayerSpec]) -> list[int]:
    """Layers that get codes: neither sliding-window nor listed in full_layers. Raises UserError for bad ones."""
    known = {spec.layer for spec in specs}
    if bad := sorted(set(config.full_layers) - known):
        raise UserError(f"full_layers={bad} are no layers of the model, which has {len(known)}")
    chosen = [spec for spec in specs if spec.window == 0 and spec.layer not in config.full_layers]
    if not chosen:
        raise UserError("no layer is left to compress; name fewer in --set full_layers")
    if wrong := next((spec for spec in chosen if spec.head_dim != config.head_dim), None):
        raise UserError(
            f"layer {wrong.layer} has head_dim {wrong.head_dim}, the configuration is for {config.head_dim}"
        )
    return [spec.layer for spec in chosen]


def save(codec: Codec, folder: Path) -> None:
    """Write the codec folder; it appears under its name only when it is whole. Replaces an older codec there."""
    folder = Path(folder)
    check_target(folder)
    partial = folder.with_name(folder.name + ".writing")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(codec.tensors(), str(partial / TENSORS))
    (partial / DESCRIPTION).write_text(json.dumps(codec.info.to_json(), indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def check_target(folder: Path) -> None:
    """Raises UserError when `folder` holds something other than a codec, which `save` would destroy."""
    if folder.exists() and not (folder / DESCRIPTION).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} exists and is not a codec folder; name another one")


def load(folder: str | Path) -> Codec:
    """Read a codec folder. Raises UserError when it is missing, damaged or not of this version."""
    folder = Path(folder)
    again = "make one with `python -m calib fit`"
    if missing := [name for name in (DESCRIPTION, TENSORS) if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a codec folder ({missing[0]} is missing); {again}")
    try:
        data = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        kind = (data["format"], data["method"])
        info = CodecInfo.from_json(data) if kind == (FORMAT, "vqkv") else None
        tensors = load_file(str(folder / TENSORS))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder} holds no readable codec ({type(error).__name__}: {error}); {again}") from error
    if info is None:
        raise UserError(f"{folder}: format {kind[0]} of method {kind[1]!r} is not readable here; {again}")
    layers: dict[int, dict[str, Quantiser]] = {}
    for layer in sorted({int(name.split(".")[1]) for name in tensors if re.match(r"layers\.\d+\.", name)}):
        layers[layer] = {side: _quantiser(tensors, layer, side, info, folder) for side in ("k", "v")}
    codec = Codec(info, layers)
    if extra := set(tensors) - set(codec.tensors()):
        raise UserError(f"{folder / TENSORS} holds {min(extra)}, which is no part of a codec; {again}")
    return codec


def _quantiser(tensors: dict[str, Tensor], layer: int, side: str, info: CodecInfo, folder: Path) -> Quantiser:
    config, heads = info.config, info.model["num_kv_heads"]
    dim, groups, entries = config.head_dim, getattr(config, f"{side}_groups"), getattr(config, f"{side}_entries")
    tables = heads if config.tables == "head" else 1
    shapes = {
        "books": (tables, config.lookups(side), entries, dim // groups),
        "encode": (tables, dim, dim),
        "decode": (tables, dim, dim),
        "mean": (heads, dim),
    }
    parts = []
    for part in PARTS:
        name = f"layers.{layer}.{side}.{part}"
        found, problem = tensors.get(name), ""
        if found is None:
            problem = "is missing"
        elif tuple(found.shape) != shapes[part] or found.dtype != torch.float32:
            problem = f"is {str(found.dtype)[6:]} {list(found.shape)}, not float32 {list(shapes[part])}"
        elif not found.isfinite().all():
            problem = "has values that are not finite"
        if found is None or problem:
            raise UserError(f"{folder / TENSORS}: {name} {problem}; fit again with `python -m calib fit`")
        parts.append(found)
    return Quantiser(*parts, stages=getattr(config, f"{side}_stages"))
