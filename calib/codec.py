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

from plugins.config import MethodConfig
from plugins.errors import UserError
from plugins.layer import LayerSpec
from plugins.methods import config_class, reference

TENSORS, DESCRIPTION = "codec.safetensors", "codec.json"
FORMAT = 2
MODEL_KEYS = {"name", "sha256", "architecture", "num_layers", "num_kv_heads", "head_dim"}


@dataclass
class CodecInfo:
    """What codec.json says: how the codec was made and how well it fits.

    effort: "quick" or "full". fit: how the tables were found, for methods that know several ways.
    vectors: tokens it was fitted on, per layer. errors: layer -> what fitting it left, as the method's fit describes.
    choice: why the configuration is as it is, as the method's chooser describes; empty where nothing was chosen.
    """

    method: str
    config: MethodConfig
    model: dict[str, Any]
    texts: list[dict[str, str]]
    effort: str
    seed: int
    context: int
    vectors: int
    fit: str = ""
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CodecInfo:
        """Raises TypeError or KeyError when the keys are not those of a codec.json."""
        info = cls(**{**data, "config": config_class(data["method"]).from_json(data["config"])})
        if missing := MODEL_KEYS - set(info.model):
            raise KeyError(f"model.{min(missing)}")
        return info


@dataclass
class Codec:
    """info, and the tables of each compressed layer: the method's `LayerCodec`."""

    info: CodecInfo
    layers: dict[int, Any]

    @property
    def config(self) -> MethodConfig:
        return self.info.config

    def to(self, device: torch.device | str) -> Codec:
        return Codec(self.info, {layer: tables.to(device) for layer, tables in self.layers.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in codec.safetensors."""
        return {
            f"layers.{layer}.{name}": tensor.float().cpu().contiguous()
            for layer, tables in self.layers.items()
            for name, tensor in tables.tensors().items()
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
        heads = made_for["num_kv_heads"]
        for spec in specs:
            if spec.layer in self.layers and spec.num_kv_heads != heads:
                raise UserError(
                    f"layer {spec.layer}: the codec is for {heads} KV heads, the model has {spec.num_kv_heads}; "
                    "fit one with `python -m calib fit`"
                )


def compressed_layers(config: MethodConfig, specs: Sequence[LayerSpec]) -> list[int]:
    """Layers that get codes: neither sliding-window nor listed in full_layers. Raises UserError for bad ones."""
    known = {spec.layer for spec in specs}
    if bad := sorted(set(config.full_layers) - known):
        raise UserError(f"full_layers={bad} are no layers of the model, which has {len(known)}")
    chosen = [spec for spec in specs if spec.window == 0 and spec.layer not in config.full_layers]
    if not chosen:
        raise UserError("no layer is left to compress; name fewer in --set full_layers")
    for key, name in (("head_dim", "head_dim"), ("kv_heads", "num_kv_heads")):
        expected = getattr(config, key, None)
        wrong = next((spec for spec in chosen if expected not in (None, getattr(spec, name))), None)
        if wrong:
            raise UserError(
                f"layer {wrong.layer} has {name} {getattr(wrong, name)}, the configuration is for {expected}"
            )
    return [spec.layer for spec in chosen]


def observing_layers(config: MethodConfig, specs: Sequence[LayerSpec]) -> dict[int, int]:
    """Compressed layer -> the full layer before it that chooses which tokens it reads; empty without a selection.

    Sliding-window layers neither observe nor read compressed tokens.
    """
    if not config.geometry().selects:
        return {}
    compressed, source, found = set(compressed_layers(config, specs)), -1, {}
    for spec in specs:
        if spec.layer in compressed:
            found[spec.layer] = source
        elif spec.window == 0:
            source = spec.layer
    if -1 in found.values():
        raise UserError(
            f"layer {min(found)} is compressed and no full layer comes before it to choose what it reads; "
            "add one to full_layers or read all tokens"
        )
    return found


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
        info = CodecInfo.from_json(data) if kind[0] == FORMAT else None
        tensors = load_file(str(folder / TENSORS))
    except UserError as error:
        raise UserError(f"{folder}: {error}; {again}") from error
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder} holds no readable codec ({type(error).__name__}: {error}); {again}") from error
    if info is None:
        raise UserError(f"{folder}: format {kind[0]} of method {kind[1]!r} is not readable here; {again}")
    shapes = reference(info.method).LayerCodec.shapes(info.config, info.model["num_kv_heads"])
    layers: dict[int, Any] = {}
    for layer in sorted({int(name.split(".")[1]) for name in tensors if re.match(r"layers\.\d+\.", name)}):
        found = {name: _checked(tensors, f"layers.{layer}.{name}", shape, folder) for name, shape in shapes.items()}
        layers[layer] = reference(info.method).LayerCodec.from_tensors(info.config, found)
    codec = Codec(info, layers)
    if extra := set(tensors) - set(codec.tensors()):
        raise UserError(f"{folder / TENSORS} holds {min(extra)}, which is no part of a codec; {again}")
    return codec


def _checked(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    found, problem = tensors.get(name), ""
    if found is None:
        problem = "is missing"
    elif tuple(found.shape) != shape or found.dtype != torch.float32:
        problem = f"is {str(found.dtype)[6:]} {list(found.shape)}, not float32 {list(shape)}"
    elif not found.isfinite().all():
        problem = "has values that are not finite"
    if found is None or problem:
        raise UserError(f"{folder / TENSORS}: {name} {problem}; fit again with `python -m calib fit`")
    return found
