"""Fit the integer baselines: the mean of each channel is all they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.attention import rotate
from plugins.errors import UserError
from plugins.intkv.config import IntKVConfig
from plugins.intkv.reference import LayerCodec

from .adapter import AttentionCall
from .record import held_out, read, windows_to_fit
from .texts import Text

WINDOWS = {"quick": 4, "full": 16}  # whose tokens are averaged


@dataclass(frozen=True)
class Plan:
    """One fit: the windows to read, whole; see `calib.fit.Plan`."""

    config: IntKVConfig
    windows: list[list[int]]

    @property
    def vectors(self) -> int:
        """Tokens that each layer is fitted on."""
        return (len(self.windows[0]) - self.config.sinks) * held_out(len(self.windows)).count(False)

    def record_bytes(self, kv_heads: int) -> int:
        """Memory that the record of a layer takes."""
        return 8 * kv_heads * self.config.head_dim * len(self.windows[0]) * len(self.windows)

    @torch.no_grad()
    def record(
        self, model: PreTrainedModel, layers: Sequence[int], seed: int, progress: Callable[[], None]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys, in the configuration's key space, and values of whole windows: [windows, Hkv, N, D] float32 each."""
        kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

        def see(call: AttentionCall, number: int) -> None:
            if call.layer in kept:
                post_rope = self.config.key_space == "post_rope"
                keys = rotate(call.k, call.cos, call.sin) if post_rope else call.k
                kept[call.layer].append((keys[0].float().clone(), call.v[0].float().clone()))

        read(model, self.windows, see, progress)
        return {layer: tuple(torch.stack(part) for part in zip(*kept.pop(layer), strict=True)) for layer in layers}

    def fit_layer(self, seen: tuple[Tensor, Tensor], layer: int, seed: int) -> tuple[LayerCodec, dict[str, Any]]:
        """One layer's means, on the CPU, and the squared error of "k" and "v" on held-out windows, as fractions of the
        energy about the mean. Raises UserError when one loses everything."""
        config, chosen = self.config, torch.tensor(held_out(len(self.windows)), device=seen[0].device)
        means = torch.stack([x[~chosen][:, :, config.sinks :].mean((0, 2)) for x in seen])  # [2, Hkv, D]
        tables = LayerCodec(config, means if config.mean else torch.zeros_like(means))
        errors = {}
        for name, x, mean in zip("kv", seen, means, strict=True):
            held = x[chosen]
            lost = (tables.rebuild(name, held) - held).square().sum(dtype=torch.float64)
            energy = (held[:, :, config.sinks :] - mean[:, None]).square().sum(dtype=torch.float64)
            errors[name] = float(lost / energy.clamp_min(1e-30))
            if not errors[name] < 1:
                mend = f"more bits with --set {name}_bits=8" if config.mean else "the mean out with --set mean=true"
                raise UserError(
                    f"layer {layer}: {getattr(config, f'{name}_bits')} bits lose {errors[name]:.2f} of the energy of "
                    f"the {name} vectors on held-out text; keep it whole with --set full_layers={layer} or take {mend}"
                )
        return tables.to("cpu"), errors


def plan(
    tokenizer: PreTrainedTokenizerBase, config: IntKVConfig, texts: Sequence[Text], effort: str, context: int
) -> Plan:
    """What a fit reads. Raises UserError when the texts are too short."""
    usable = context - config.sinks
    return Plan(config, windows_to_fit(tokenizer, texts, context, WINDOWS[effort], usable, usable, effort))
