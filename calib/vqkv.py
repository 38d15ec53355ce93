"""Fit VQKV's quantisers: error metric, rotation, residual k-means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.errors import UserError
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import LayerCodec, Quantiser, byte_values, nearest

from .record import LayerRecord, held_out, metric_root, record, windows_to_fit
from .texts import Text

WARM_STRIDE = 8  # early k-means iterations read every eighth vector, when that leaves as many per codeword
MOST_VECTORS = 1 << 18
CPU_SCORES = 1 << 18  # distances formed at once on a CPU: they stay in its cache


@dataclass(frozen=True)
class Effort:
    """How much to spend. vectors: wanted per codeword; least: refuse to fit on fewer; share: of a window's tokens that
    are kept; queries: of a window, whose attention weighs the errors; warm: k-means iterations on some of the vectors;
    sweeps: then on all of them."""

    vectors: int
    least: int
    share: float
    queries: int
    warm: int
    sweeps: int


EFFORTS = {
    "quick": Effort(vectors=88, least=24, share=1.0, queries=128, warm=12, sweeps=2),
    "full": Effort(vectors=512, least=200, share=0.5, queries=512, warm=30, sweeps=12),
}


@dataclass(frozen=True)
class Plan:
    """One fit: the windows to read and the tokens to keep of each; see `calib.fit.Plan`."""

    config: VQKVConfig
    effort: Effort
    windows: list[list[int]]
    rows: int

    @property
    def vectors(self) -> int:
        """Tokens that each layer is fitted on."""
        return self.rows * held_out(len(self.windows)).count(False)

    def record_bytes(self, kv_heads: int) -> int:
        """Memory that the record of a layer takes."""
        return 8 * kv_heads * self.config.head_dim * self.rows * len(self.windows)

    def record(
        self, model: PreTrainedModel, layers: Sequence[int], seed: int, progress: Callable[[], None]
    ) -> dict[int, LayerRecord]:
        return record(model, self.windows, layers, self.rows, self.effort.queries, self.config, seed, progress)

    def fit_layer(self, seen: LayerRecord, layer: int, seed: int) -> tuple[LayerCodec, dict[str, Any]]:
        """One layer's tables and errors. Raises UserError when they lose everything."""
        tables, errors = fit_layer(seen, self.config, self.effort, len(self.windows), (seed, layer))
        for side, error in errors.items():
            if not error["stages"][-1] < 1:
                raise UserError(
                    f"layer {layer}: the {side} codes lose {error['stages'][-1]:.2f} of the energy on "
                    f"held-out text; keep it whole with --set full_layers={layer} or give more --text"
                )
        return tables, errors


def plan(
    tokenizer: PreTrainedTokenizerBase, config: VQKVConfig, texts: Sequence[Text], effort: str, context: int
) -> Plan:
    """What a fit reads. Raises UserError when the texts are too short."""
    spend = EFFORTS[effort]
    entries = max(config.k_entries, config.v_entries)
    wanted = min(spend.vectors * entries, max(MOST_VECTORS, spend.least * entries))
    usable = context - config.sinks
    count = max(1, math.ceil(wanted / (spend.share * usable)))
    windows = windows_to_fit(tokenizer, texts, context, count, usable, spend.least * entries, effort)
    fitted = held_out(len(windows)).count(False)
    return Plan(config, spend, windows, min(usable, math.ceil(wanted / fitted)))


# -- one layer


def fit_layer(
    seen: LayerRecord, config: VQKVConfig, effort: Effort, windows: int, salt: tuple[int, int]
) -> tuple[LayerCodec, dict[str, dict[str, Any]]]:
    """Both quantisers of a layer, on the CPU, with their errors: side ("k", "v") -> {"stages": held-out error after
    each stage as a fraction of the energy about the mean, in the metric the side was fitted in; "plain": the last one
    in plain squared error; "train": on the fitted vectors; "dead": codewords no vector chose}.
    """
    held = torch.tensor(held_out(windows)).repeat_interleave(seen.keys.shape[1] // windows).to(seen.keys.device)
    weighing = {
        "k": (seen.query_metric, None) if config.query_weighting else (None, None),
        "v": (seen.value_metric, seen.attention[:, ~held]) if config.value_weighting else (None, None),
    }
    sides, errors = {}, {}
    for number, (side, x) in enumerate((("k", seen.keys), ("v", seen.values))):
        generator = torch.Generator().manual_seed((salt[0] * 1_000_003 + salt[1]) * 2 + number)
        quantiser, errors[side] = fit_side(x[:, ~held], x[:, held], *weighing[side], config, side, effort, generator)
        sides[side] = quantiser.to("cpu")
    return LayerCodec(config, sides["k"], sides["v"]), errors


def fit_side(
    x: Tensor,
    held: Tensor,
    metric: Tensor | None,
    weight: Tensor | None,
    config: VQKVConfig,
    side: str,
    effort: Effort,
    generator: torch.Generator,
) -> tuple[Quantiser, dict[str, Any]]:
    """One quantiser from x [Hkv, n, D], with errors on held [Hkv, m, D].

    metric [Hkv, D, D] weighs errors by their direction, weight [Hkv, n] by their vector (None: all alike).
    """
    groups, entries, stages = (getattr(config, f"{side}_{name}") for name in ("groups", "entries", "stages"))
    heads, rows, dim = x.shape
    weight = x.new_ones(heads, rows) if weight is None else weight
    mean = x.new_zeros(heads, dim)
    if config.mean:
        mean = (x * weight[..., None]).sum(dim=1) / weight.sum(dim=1, keepdim=True)
    tables = heads if config.tables == "head" else 1
    metric = torch.eye(dim, device=x.device).expand(heads, -1, -1) if metric is None else metric
    root = metric_root(metric if tables == heads else metric.mean(dim=0, keepdim=True))
    centred, weight = (x - mean[:, None]).reshape(tables, -1, dim), weight.reshape(tables, -1)
    axes = torch.eye(dim, device=x.device).expand(tables, -1, -1)
    if config.rotation:
        bits = [sum(width > group for width in stages) * math.log2(entries) for group in range(groups)]
        axes = balanced_axes(centred @ root, weight, bits)
    encode = (root @ axes).contiguous()
    decode = torch.linalg.inv(encode.double()).float()

    def parts(data: Tensor) -> Tensor:  # [T, G, n, d]
        return (data @ encode).unflatten(-1, (groups, -1)).transpose(1, 2).contiguous()

    train, test = parts(centred), parts((held - mean[:, None]).reshape(tables, -1, dim))
    books = fit_stages(train, weight, stages, entries, config.projection, effort, generator)
    if config.layout == "tiles" and side == "v":
        books = [byte_values(book) for book in books]
    errors = stage_errors(train, test, books, stages)
    quantiser = Quantiser(torch.cat(books, dim=1), encode, decode, mean, stages)
    energy = (held - mean[:, None]).square().sum()
    errors["plain"] = float((quantiser.rebuild(held) - held).square().sum() / energy.clamp_min(1e-30))
    return quantiser, errors


def balanced_axes(y: Tensor, weight: Tensor, bits: Sequence[float]) -> Tensor:
    """Orthogonal [T, D, D]: the principal axes of y [T, n, D], dealt to groups of D / len(bits) columns.

    Each axis in turn, the largest first, goes to the group with the least log-variance net of what its `bits` take off,
    so that the groups end with like errors (the start of optimised product quantisation, Ge et al. 2013).
    """
    covariance = ((y * weight[..., None]).transpose(1, 2) @ y).double() / y.shape[1]
    value, vector = torch.linalg.eigh(covariance)
    size = y.shape[-1] // len(bits)
    turned = []
    for variance, axes in zip(value.flip(1), vector.flip(2), strict=True):
        log = variance.clamp_min(variance[0] * 1e-9 + 1e-30).log()
        log = (log - log[-1]).tolist()  # all >= 0, so that a group never gains room by taking an axis
        load = [-2 * math.log(2) * bit for bit in bits]
        members: list[list[int]] = [[] for _ in load]
        for axis, height in enumerate(log):
            group = min((g for g in range(len(load)) if len(members[g]) < size), key=lambda g: load[g])
            members[group].append(axis)
            load[group] += height
        turned.append(axes[:, [axis for group in members for axis in group]])
    return torch.stack(turned).float()


# -- codebooks


def fit_stages(
    y: Tensor,
    weight: Tensor,
    stages: Sequence[int],
    entries: int,
    projection: bool,
    effort: Effort,
    generator: torch.Generator,
) -> list[Tensor]:
    """Residual codebooks, per stage [T, width, entries, d], of y [T, G, n, d] with weight [T, n]."""
    residual, books = y.clone(), []
    for number, width in enumerate(stages, start=1):
        part = residual[:, :width].flatten(0, 1)
        heavy = weight[:, None].expand(-1, width, -1).flatten(0, 1)
        book = (simvq if projection else kmeans)(part, heavy, entries, effort, generator)
        books.append(book.view(len(y), width, entries, -1))
        if number < len(stages):
            residual[:, :width] -= look_up(books[-1], encode_stage(residual[:, :width], books[-1]))
    return books


def kmeans(y: Tensor, weight: Tensor, entries: int, effort: Effort, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm on y [B, n, d] with weight [B, n], all tables at once: codebooks [B, entries, d]."""
    few = _few(y, entries)
    books = lloyd(y[:, few], weight[:, few], _draw(y, entries, generator), effort.warm, generator)
    return lloyd(y, weight, books, effort.sweeps, generator)


def simvq(y: Tensor, weight: Tensor, entries: int, effort: Effort, generator: torch.Generator) -> Tensor:
    """RSimVQ's codebook: a Gaussian base times the projection that fits best, then a few Lloyd steps."""
    batch, rows, dim = y.shape
    base = torch.randn(batch, entries, dim, generator=generator).to(y.device)
    scale = y.square().mean(dim=(1, 2)).sqrt()[:, None, None]
    books = scale * (base @ metric_root(y.transpose(1, 2) @ y))
    few = _few(y, entries)
    for _ in range(effort.warm):
        total, count = cluster_sums(y[:, few], weight[:, few], assign(y[:, few], books), entries)
        gram = base.transpose(1, 2) @ (base * count[..., None])
        gram = gram + 1e-6 * rows * torch.eye(dim, device=y.device)
        books = base @ torch.linalg.solve(gram, base.transpose(1, 2) @ total)
    return lloyd(y, weight, books, effort.sweeps, generator)


def _few(y: Tensor, entries: int) -> slice:
    return slice(None, None, WARM_STRIDE if y.shape[1] >= WARM_STRIDE**2 * entries else 1)


def lloyd(y: Tensor, weight: Tensor, books: Tensor, iterations: int, generator: torch.Generator) -> Tensor:
    """`iterations` of assignment and mean; a codeword that nothing chose restarts on a vector drawn at random."""
    for _ in range(iterations):
        total, count = cluster_sums(y, weight, assign(y, books), books.shape[1])
        mean = total / count.clamp_min(1e-30)[..., None]
        books = torch.where(count[..., None] > 0, mean, _draw(y, books.shape[1], generator))
    return books


def assign(y: Tensor, books: Tensor) -> Tensor:
    """`nearest` for fitting. On a CPU to 1 part in 2^(23 - bits of an index), and three times as fast.

    Non-negative floats sort like the integers they are stored as, so the index can ride in a distance's lowest bits
    and one integer minimum finds both.
    """
    if y.is_cuda:
        return nearest(y, books)
    entries = books.shape[1]
    low = (1 << (entries - 1).bit_length()) - 1
    index = torch.arange(entries, dtype=torch.int32)
    code = torch.empty(y.shape[:2], dtype=torch.int32)
    step = max(1, CPU_SCORES // entries)
    buffer = y.new_empty(step, entries)
    for table, book in enumerate(books):
        half_book, half_y = 0.5 * book.square().sum(-1), 0.5 * y[table].square().sum(-1, keepdim=True)
        turned = -book.T.contiguous()
        for first in range(0, y.shape[1], step):
            span = slice(first, min(first + step, y.shape[1]))
            half = torch.addmm(half_book, y[table, span], turned, out=buffer[: span.stop - first])
            packed = half.add_(half_y[span]).view(torch.int32)  # half the squared distances
            packed.bitwise_and_(~low).bitwise_or_(index)
            code[table, span] = packed.amin(dim=-1).bitwise_and_(low)
    return code.long()


def _draw(y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` vectors of every table of y [B, n, d]."""
    row = torch.randperm(y.shape[1], generator=generator)[:count].to(y.device)
    if len(row) < count:
        row = row.repeat(-(-count // len(row)))[:count]
    return y[:, row]


def cluster_sums(y: Tensor, weight: Tensor, code: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Per code [B, n], the weighted sum [B, entries, d] and the weight [B, entries] of its vectors; deterministic."""
    batch, _, dim = y.shape
    index = (code + entries * torch.arange(batch, device=y.device)[:, None]).flatten()
    rows = torch.cat((y * weight[..., None], weight[..., None]), dim=-1).view(-1, dim + 1)
    total = y.new_zeros(batch * entries, dim + 1)
    if y.is_cuda:
        total.index_put_((index,), rows, accumulate=True)  # sorts first, unlike index_add_
    else:
        total.index_add_(0, index, rows)
    total = total.view(batch, entries, -1)
    return total[..., :dim], total[..., dim]


def encode_stage(y: Tensor, book: Tensor, find: Callable[[Tensor, Tensor], Tensor] = assign) -> Tensor:
    """Codes [T, width, n] of y [T, width, n, d] in book [T, width, entries, d]."""
    return find(y.flatten(0, 1), book.flatten(0, 1)).view(y.shape[:3])


def look_up(book: Tensor, code: Tensor) -> Tensor:
    return torch.take_along_dim(book, code[..., None], dim=2)


def stage_errors(train: Tensor, test: Tensor, books: list[Tensor], stages: Sequence[int]) -> dict[str, Any]:
    """Errors after each stage as fractions of the energy, on [T, G, n, d]; codewords that training left unused."""
    dead = 0

    def losses(y: Tensor, find: Callable[[Tensor, Tensor], Tensor], count: bool) -> Iterator[float]:
        nonlocal dead
        residual, energy = y.clone(), y.square().sum().clamp_min(1e-30)
        for width, book in zip(stages, books, strict=True):
            code = encode_stage(residual[:, :width], book, find)
            residual[:, :width] -= look_up(book, code)
            if count:
                used = torch.zeros(book.shape[:3], dtype=torch.bool, device=y.device).scatter_(2, code, True)
                dead += int((~used).sum())
            yield float(residual.square().sum() / energy)

    fitted = list(losses(train, assign, True))
    return {"stages": list(losses(test, nearest, False)), "train": fitted[-1], "dead": dead}
