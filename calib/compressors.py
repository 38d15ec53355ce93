"""DeltaKV's f and g as trainable parameters, and what a cache gives back with gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from plugins.deltakv.reference import LayerCodec

LEAST_SCALE = 0.01  # of a parameter's row, in root mean squares of its tensor


class Compressors:
    """The layers' f and g as parameters, each times a fixed scale, so that one learning rate fits all of them.

    A scale is the root mean square of the fast fit's row (of compress) or column (of decompress): what belongs to one
    dimension of x moves in proportion to what it was.
    """

    def __init__(self, layers: dict[int, LayerCodec], scales: dict[str, Tensor]) -> None:
        self.layers, self.scales, self.parameters = layers, scales, {}
        for layer, tables in layers.items():
            for name, tensor in tables.tensors().items():
                if name != "center":
                    key = f"layers.{layer}.{name}"
                    self.parameters[key] = nn.Parameter(tensor / scales[key])

    @classmethod
    def start(cls, layers: dict[int, LayerCodec], seen: dict[int, Tensor], seed: int) -> Compressors:
        """From the fast fit. seen: layer -> x [B, N, X] of some text, which scales a SwiGLU.

        Where a SwiGLU's `down` is 0, `gate` and `up` have no effect yet: they are drawn anew, so that its units see
        values of about 1, and `down` counts in latents of the size that it will meet.
        """
        layers, scales = dict(layers), {}
        for layer, tables in layers.items():
            key = f"layers.{layer}."
            scales[key + "compress"] = _size(tables.compress, 1)
            scales[key + "decompress"] = _size(tables.decompress, 0)
            if tables.gate is None or tables.up is None or tables.down is None:
                continue
            scales[key + "gate"], scales[key + "up"] = _size(tables.gate, 1), _size(tables.up, 1)
            scales[key + "down"] = _size(tables.down, 0)
            if not tables.down.any():
                x = seen[layer]
                spread = (x - tables.center).square().mean((0, 1)).sqrt()
                row = 1 / (spread.clamp_min(LEAST_SCALE * spread.square().mean().sqrt()) * len(spread) ** 0.5)
                draw = torch.Generator().manual_seed(seed * 1_000_003 + layer)
                gate, up = (torch.randn(tables.gate.shape, generator=draw).to(row.device) for _ in range(2))
                layers[layer] = replace(tables, gate=gate * row[:, None], up=up * row[:, None])
                size = residual_latents(tables, x).square().mean((0, 1)).sqrt()
                scales[key + "gate"], scales[key + "up"] = row[:, None], row[:, None].clone()
                scales[key + "down"] = (size / tables.config.hidden**0.5).clamp_min(1e-30)[None]
        return cls(layers, scales)

    def layer(self, layer: int) -> LayerCodec:
        """A layer's tables, as functions of the parameters."""
        tables, prefix = self.layers[layer], f"layers.{layer}."
        trained = {
            name: self.parameters[prefix + name] * self.scales[prefix + name]
            for name in tables.tensors()
            if name != "center"
        }
        return LayerCodec(tables.config, tables.center, **trained)

    def tables(self) -> dict[int, LayerCodec]:
        """All layers' tables, on the CPU."""
        result = {}
        for layer in self.layers:
            tensors = {name: x.detach().cpu().contiguous() for name, x in self.layer(layer).tensors().items()}
            result[layer] = LayerCodec(self.layers[layer].config, **tensors)
        return result


def _size(x: Tensor, dim: int) -> Tensor:
    """Root mean square of x along `dim`, kept as a dimension, no less than LEAST_SCALE of that of all of x."""
    whole = x.square().mean().sqrt().clamp_min(1e-30)
    return x.square().mean(dim, keepdim=True).sqrt().maximum(LEAST_SCALE * whole)


@torch.no_grad()
def residual_latents(tables: LayerCodec, x: Tensor) -> Tensor:
    """Latents of sequences x [B, N, X] past the sinks, not quantised: [B, N - sinks, latent_dim]."""
    rows, references = x[:, tables.config.sinks :], tables.reference_rows(x)
    return tables.residual(rows, tables.means(references, tables.assign(rows, references)[0]))


def restore(tables: LayerCodec, x: Tensor) -> Tensor:
    """`LayerCodec.rebuild` of x [B, N, X] with gradients: past assignments none, straight through roundings."""
    config = tables.config
    rows = x[:, config.sinks :]
    references = x[:, : config.sinks], x[:, config.sinks :: config.stride]
    with torch.no_grad():
        stored = tables.reference_rows(x)
        index = tables.assign(rows, stored)[0]
    pool = torch.cat(references, dim=1)
    pool = stored + (pool - pool.detach()) if x.requires_grad else stored
    mean = tables.means(pool, index)
    z = tables.residual(rows, mean)
    if config.scales:
        with torch.no_grad():
            error = tables.decoded(*tables.quantised(z)) - z
        z = z + error
    return torch.cat((x[:, : config.sinks], tables.g(z) + mean), dim=1)
