"""Fit DeltaKV's compressors layer by layer, without going back through the model ("fast")."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.deltakv.config import DeltaKVConfig
from plugins.deltakv.reference import LayerCodec
from plugins.errors import UserError

from .record import WindowRecord, held_out, metric_root, record_windows, windows_to_fit
from .texts import Text

NOISE = 1e-6  # of the latents' mean energy, added in least squares so that unused ones do no harm


@dataclass(frozen=True)
class Effort:
    """How much to spend. tokens: wanted per value of x; least: refuse to fit on fewer; queries: of a window, whose
    attention weighs the errors."""

    tokens: int
    least: int
    queries: int


EFFORTS = {"quick": Effort(tokens=64, least=4, queries=128), "full": Effort(tokens=512, least=32, queries=512)}


@dataclass(frozen=True)
class Plan:
    """One fit: the windows to read, whole; see `calib.fit.Plan`."""

    config: DeltaKVConfig
    effort: Effort
    windows: list[list[int]]

    @property
    def vectors(self) -> int:
        """Tokens that each layer is fitted on: neither sinks nor references."""
        rows = len(self.windows[0]) - self.config.sinks
        return (rows - -(-rows // self.config.stride)) * held_out(len(self.windows)).count(False)

    def record_bytes(self, kv_heads: int) -> int:
        """Memory that the record of a layer takes."""
        return 8 * kv_heads * self.config.head_dim * len(self.windows[0]) * len(self.windows)

    def record(
        self, model: PreTrainedModel, layers: Sequence[int], seed: int, progress: Callable[[], None]
    ) -> dict[int, WindowRecord]:
        geometry = (self.config.sinks, self.config.window)
        return record_windows(model, self.windows, layers, self.effort.queries, *geometry, seed, progress)

    def fit_layer(self, seen: WindowRecord, layer: int, seed: int) -> tuple[LayerCodec, dict[str, Any]]:
        """One layer's tables and errors. Raises UserError when they lose everything."""
        tables, errors = fit_layer(seen, self.config, (seed, layer))
        if not errors["residual"] < 1:
            raise UserError(
                f"layer {layer}: the latents lose {errors['residual']:.2f} of the residuals' energy on held-out text; "
                f"keep it whole with --set full_layers={layer} or give more --text"
            )
        return tables, errors


def plan(
    tokenizer: PreTrainedTokenizerBase, config: DeltaKVConfig, texts: Sequence[Text], effort: str, context: int
) -> Plan:
    """What a fit reads. Raises UserError when the texts are too short."""
    spend = EFFORTS[effort]
    count = math.ceil(spend.tokens * config.width / context)
    windows = windows_to_fit(tokenizer, texts, context, count, context, spend.least * config.width, effort)
    return Plan(config, spend, windows)


def fit_layer(seen: WindowRecord, config: DeltaKVConfig, salt: tuple[int, int]) -> tuple[LayerCodec, dict[str, Any]]:
    """f and g of a layer, on the CPU, and its errors.

    compress takes the principal axes of the residuals x - m, measured by the attention output they change, turned so
    that the latents of a segment have like variances; decompress is the least-squares map from quantised latents
    back. With compressor=swiglu the gated part starts at zero (down = 0, gate and up random): "fast" leaves f linear.

    Errors on held-out windows, in the metric: "residual" and "x", what is lost as a fraction of the energy of x - m and
    of x about its mean; "references", the part of that energy which the references leave; "output", the mean squared
    change of the attention block's output when every compressed token is read back, as a fraction of its energy;
    "plain", "residual" in plain squared error; "train", "residual" on the fitted windows.
    """
    held = held_out(len(seen.rows))
    chosen = torch.tensor(held, device=seen.rows.device)
    # few windows: a single one is both fitted and judged
    train, test = seen.rows[~chosen] if not all(held) else seen.rows, seen.rows[chosen]
    generator = torch.Generator().manual_seed(salt[0] * 1_000_003 + salt[1])
    center = train.flatten(0, 1).mean(0)
    root = block_root(seen.metric)
    pairs = list(residuals(train, config, center))
    variance, axes = principal_axes(covariance(pairs, root, config.width))
    compress = root @ segment_axes(variance, axes, config, generator).float()
    tables = LayerCodec(config, center, compress, compress.T.contiguous(), **gates(train, config, generator))
    tables.decompress = least_squares(((latents(tables, x, mean), x - mean) for x, mean in pairs), config)
    errors = errors_on(tables, residuals(test, config, center), seen)
    errors["train"] = errors_on(tables, pairs, seen)["residual"]
    return tables.to("cpu"), errors


def segment_axes(variance: Tensor, axes: Tensor, config: DeltaKVConfig, generator: torch.Generator) -> Tensor:
    """The first latent_dim of `axes`, each segment's turned in their own space: float64 [X, latent_dim]."""
    columns, first = [], 0
    for size, _ in config.segments:
        span = slice(first, first + size)
        columns.append(axes[:, span] @ levelled(variance[span].cpu().diag(), generator).to(axes.device))
        first += size
    return torch.cat(columns, dim=1)


def block_root(metric: Tensor) -> Tensor:
    """Square root [X, X] of the block-diagonal metric [2 * Hkv, D, D], blocks kept invertible, one scale for all."""
    scale = metric.diagonal(dim1=1, dim2=2).mean(1)
    scale = scale.clamp_min(1e-6 * float(scale.max()))
    return torch.block_diag(*(metric_root(metric) * scale.sqrt()[:, None, None]))


def residuals(rows: Tensor, config: DeltaKVConfig, center: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Per window of rows [windows, N, X]: x and the mean of its references, [n, X], sinks and references left out."""
    tables = LayerCodec(config, center, center[:, None], center[None])  # f and g are not asked for
    own = torch.arange(rows.shape[1] - config.sinks, device=rows.device) % config.stride != 0
    for window in rows:
        pool = tables.reference_rows(window[None])
        coded = window[None, config.sinks :]
        mean = tables.means(pool, tables.assign(coded, pool)[0])
        yield coded[0, own], mean[0, own]


def covariance(
    pairs: Sequence[tuple[Tensor, Tensor]] | Iterator[tuple[Tensor, Tensor]], root: Tensor, width: int
) -> Tensor:
    """Mean of r r^T over residuals r = root (x - m), float64 [X, X]."""
    total, count = torch.zeros(width, width, dtype=torch.float64, device=root.device), 0
    for x, mean in pairs:
        weighed = (x - mean) @ root
        total += (weighed.T @ weighed).double()
        count += len(x)
    return total / max(count, 1)


def principal_axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [X] and eigenvectors [X, X], in columns, of a symmetric matrix, the largest first."""
    value, vector = torch.linalg.eigh(matrix)
    return value.flip(0).clamp_min(0), vector.flip(1)


def levelled(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """An orthogonal Q for which Q^T matrix Q has a constant diagonal: float64 [d, d], for a covariance matrix.

    Drawn at random, then turned in one plane after another: a value below the mean and one above it always allow an
    angle that brings the first to the mean.
    """
    size = len(matrix)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q.numpy()
    rest = turn.T @ matrix.numpy() @ turn
    mean, left = rest.trace() / size, np.ones(size, dtype=bool)
    for _ in range(size - 1):
        variance = np.where(left, rest.diagonal(), np.nan)
        low, high = int(np.nanargmin(variance)), int(np.nanargmax(variance))
        under, over, both = rest[low, low] - mean, rest[high, high] - mean, rest[low, high]
        if over <= 1e-12 * mean:
            break
        tangent = (math.sqrt(max(both * both - over * under, 0.0)) - both) / over
        cosine = 1 / math.sqrt(1 + tangent * tangent)
        sine = tangent * cosine
        for rows in (turn.T, rest.T, rest):
            first, second = rows[low].copy(), rows[high].copy()
            rows[low], rows[high] = cosine * first + sine * second, cosine * second - sine * first
        left[low] = False
    return torch.from_numpy(turn)


def gates(rows: Tensor, config: DeltaKVConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """gate, up and down of a SwiGLU whose units see values of about 1 and whose output is 0; none with "linear"."""
    if config.compressor == "linear":
        return {}
    size = float(rows.var(dim=(0, 1)).sum().sqrt().clamp_min(1e-30))
    gate, up = (torch.randn(config.width, config.hidden, generator=generator) / size for _ in range(2))
    down = torch.zeros(config.hidden, config.latent_dim)
    return {name: part.to(rows.device) for name, part in (("gate", gate), ("up", up), ("down", down))}


def latents(tables: LayerCodec, x: Tensor, mean: Tensor) -> Tensor:
    """x and its references' mean [n, X] -> latents as they are read [n, latent_dim]."""
    return tables.decoded(*tables.latents(x, mean))


def least_squares(pairs: Iterator[tuple[Tensor, Tensor]], config: DeltaKVConfig) -> Tensor:
    """The matrix [latent_dim, X] that takes z [n, latent_dim] nearest to r [n, X], whatever the metric."""
    gram: Tensor | float = 0.0
    cross: Tensor | float = 0.0
    for z, residual in pairs:
        gram = gram + (z.T @ z).double()
        cross = cross + (z.T @ residual).double()
    ridge = NOISE * gram.diagonal().mean() + 1e-30
    return torch.linalg.solve(gram + ridge * torch.eye(config.latent_dim).to(gram), cross).float()


def errors_on(tables: LayerCodec, pairs: Iterable[tuple[Tensor, Tensor]], seen: WindowRecord) -> dict[str, float]:
    """The errors that `fit_layer` describes, on pairs of x and its references' mean [n, X]."""
    names = ("lost", "residual", "x", "plain lost", "plain residual")
    total, count = dict.fromkeys(names, 0.0), 0

    def energy(error: Tensor) -> float:
        parts = error.unflatten(1, (len(seen.metric), -1)).transpose(0, 1)  # [2 * Hkv, n, D]
        return float(((parts @ seen.metric) * parts).sum(dtype=torch.float64))

    for x, mean in pairs:
        residual = x - mean
        error = tables.g(latents(tables, x, mean)) - residual
        for name, part in (("lost", error), ("residual", residual), ("x", x - tables.center)):
            total[name] += energy(part)
        total["plain lost"] += float(error.square().sum(dtype=torch.float64))
        total["plain residual"] += float(residual.square().sum(dtype=torch.float64))
        count += len(x)
    floor = {name: max(value, 1e-30) for name, value in total.items()}
    coded = 1 - 1 / tables.config.stride
    return {
        "residual": total["lost"] / floor["residual"],
        "x": total["lost"] / floor["x"],
        "references": total["residual"] / floor["x"],
        "output": coded * total["lost"] / max(count, 1) / max(seen.energy, 1e-30),
        "plain": total["plain lost"] / floor["plain residual"],
    }
