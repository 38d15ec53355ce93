"""Choose DeltaKV's configuration for a ratio: reference stride, which latents get how many bits, full layers.

Few windows are recorded exactly. From them follow, per layer and relative to the energy of its attention block's
output, the error that a stride and the latents leave and the error of reading only the tokens that an earlier
layer would select. Where there is a selection, a dynamic programme picks the full layers that make their sum smallest
(paper, appendix); without one no layer is kept full, since bits spent on all layers lose less
(docs/quality-deltakv.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.config import RATIO_SLACK, mean_ratio
from plugins.deltakv.config import DeltaKVConfig, latents_to_text, layer_ratio
from plugins.deltakv.reference import unpack
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.layer import LayerSpec

from .codec import compressed_layers, observing_layers
from .deltakv import block_root, covariance, principal_axes, residuals
from .quality import compressed_mask, selected_mask
from .record import WindowRecord, output_weight, record_windows
from .texts import Text, token_windows

STRIDES = (5, 8, 10, 16, 20, 32, 64)
BITS = (8, 4, 2)  # of the latents' segments; the axes of most energy come first
WINDOWS, CONTEXT, QUERIES = 2, 2048, 48
NOISE = {2: 0.1188, 4: 0.01154, 8: 1e-4, 16: 0.0}  # mean squared error of the latents' quantiser for a Gaussian
# Text unlike what is recorded here has more energy on the axes left out, while the quantiser's noise follows the text:
# with this factor the error orders configurations as their measured KL divergence does (docs/quality-deltakv.md).
SHIFT = 2.0
Segments = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Alternative:
    """One configuration looked at. error: the sum over compressed layers that the choice makes small."""

    full_layers: tuple[int, ...]
    stride: int
    latents: str
    ratio: float
    error: float


def choose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    ratio: float,
    settings: Sequence[str],
    specs: Sequence[LayerSpec],
    seed: int = 0,
    context: int = CONTEXT,
    progress: Callable[[], None] = lambda: None,
) -> tuple[DeltaKVConfig, dict[str, Any]]:
    """The configuration with the smallest expected error whose ratio is at most `ratio` + RATIO_SLACK, and why.

    settings: "key=value" overrides, which the search leaves as they are; when they fix every field that it varies, the
    ratio is theirs. Reads WINDOWS windows of at most `context` tokens, on the first CUDA device when there is one.
    The reasons, as JSON: "full_layers"; "layers", per compressed layer its "error" and with a selection its "observer",
    the "missed" error of reading what that selects, and the "coverage" of the layer's own selection by it;
    "alternatives", the best for each stride, or with a selection for each number of full layers; "error", "windows",
    "context" and "queries".
    Raises UserError for bad settings, a text without a window, and a ratio out of reach.
    """
    search = Search(specs, settings, ratio)
    context = min(context, CONTEXT)
    if context <= search.base.sinks + search.base.window:
        raise UserError(
            f"a context of {context} tokens holds nothing compressed behind {search.base.sinks} sinks and a window of "
            f"{search.base.window}: give a longer --context or a smaller --set window"
        )
    windows = token_windows(tokenizer, texts, context, WINDOWS)
    if not windows:
        raise UserError(f"the texts hold no window of {context} tokens: give more with --text, or shorten --context")
    home = model.device
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        geometry = search.base.geometry()
        records = record_windows(
            model, windows, search.layers, QUERIES, geometry.sinks, geometry.window, seed, progress, geometry.selects
        )
        weights = {layer: output_weight(model, layer).detach().float() for layer in search.layers}
        errors = ErrorModel.of(records, search.base, search.strides)
        reads = selections(records, weights, geometry) if geometry.selects else None
    finally:
        model.to(home)
    best, alternatives = search.best(errors, reads)
    config = replace(search.base, **{name: getattr(best, name) for name in search.NAMES})
    choice = {
        "full_layers": list(best.full_layers),
        "layers": explain(config, specs, search.layers, errors, reads),
        "alternatives": [asdict(alternative) for alternative in alternatives],
        "error": best.error,
        "windows": len(windows),
        "context": context,
        "queries": QUERIES,
    }
    return config, choice


# -- what compressing a layer costs


@dataclass
class ErrorModel:
    """Expected squared change of each layer's attention output, as a part of its energy.

    energy: stride -> [layers, X], of the residuals along their principal axes, the largest first.
    """

    energy: dict[int, np.ndarray]

    @classmethod
    def of(cls, records: dict[int, WindowRecord], base: DeltaKVConfig, strides: Sequence[int]) -> ErrorModel:
        energy: dict[int, list[np.ndarray]] = {stride: [] for stride in strides}
        for seen in records.values():
            root = block_root(seen.metric)
            center = seen.rows.flatten(0, 1).mean(0)
            for stride in strides:
                found = residuals(seen.rows, replace(base, stride=stride), center)
                value = principal_axes(covariance(found, root, base.width))[0].cpu().numpy()
                energy[stride].append(value * (1 - 1 / stride) / max(seen.energy, 1e-30))
        return cls({stride: np.stack(rows) for stride, rows in energy.items()})

    def error(self, stride: int, segments: Segments) -> np.ndarray:
        """Per layer: what the axes left out hold, and what least squares cannot tell from the quantiser's noise."""
        return lost(self.energy[stride], segments)

    def cost(self, stride: int, segments: Segments) -> np.ndarray:
        """`error` to choose by: with what is left out counted SHIFT times."""
        return lost(self.energy[stride], segments, SHIFT)

    def best_segments(self, stride: int, budget: float) -> Segments | None:
        """The segments of at most `budget` bits that cost all layers together least; None: there is no room for any."""
        total = self.energy[stride].sum(0)
        found = [(float(lost(total[None], item, SHIFT)[0]), item) for item in splits(len(total), budget)]
        return min(found)[1] if found else None


def lost(energy: np.ndarray, segments: Segments, shift: float = 1.0) -> np.ndarray:
    """What remains of energy [n, X] on principal axes: [n]; what the segments leave out counts `shift` times.

    The latents of a segment are levelled, so the noise N is alike on all its axes, and of an axis of energy e remains
    e N / (e + N).
    """
    result, first = np.zeros(len(energy)), 0
    for size, bits in segments:
        kept = energy[:, first : first + size]
        noise = NOISE[bits] / (1 - NOISE[bits]) * kept.mean(1, keepdims=True)
        result += (kept * noise / np.maximum(kept + noise, 1e-300)).sum(1)
        first += size
    return result + shift * energy[:, first:].sum(1)


def splits(width: int, budget: float) -> list[Segments]:
    """Ways to spend at most `budget` bits on the first of `width` principal axes."""
    step = max(8, width // 24 // 8 * 8)
    found = []
    for eights in range(0, width + 1, step):
        for fours in range(0, width - eights + 1, step):
            rest = budget - 8 * eights - 4 * fours
            if rest < 0:
                break
            twos = int(min(rest / 2, width - eights - fours)) // 8 * 8
            segments = tuple((n, bits) for n, bits in zip((eights, fours, twos), BITS, strict=True) if n)
            if segments:
                found.append(segments)
    return found


@dataclass
class Selections:
    """What layer j loses when it reads, of its compressed tokens, only those that layer i selects: [layers, layers].

    missed[i, j]: squared change of j's attention output as a part of its energy. coverage[i, j]: part of the tokens
    that j itself would select. Nothing is known for i >= j.
    """

    missed: np.ndarray
    coverage: np.ndarray


def selections(records: dict[int, WindowRecord], weights: dict[int, Tensor], geometry: Geometry) -> Selections:
    """From records with attention; layers in their order."""
    layers = list(records)
    missed, coverage = (np.zeros((len(layers), len(layers))) for _ in range(2))
    windows = len(records[layers[0]].rows)
    for window in range(windows):
        sets: list[Tensor] = []
        for j, layer in enumerate(layers):
            seen = records[layer]
            chance, asked = seen.attention[window], seen.asked[window]  # [Hq, m, N], [m]
            heads = len(seen.metric) // 2
            value = unpack(seen.rows[window][None], heads)[1][0].repeat_interleave(len(chance) // heads, dim=0)
            past = asked.cpu().numpy()
            coded = compressed_mask(geometry, past, chance.shape[2], asked.device)  # [m, N]
            own = selected_mask(geometry, chance.amax(0), coded, past)
            count = own.sum(1)
            out = chance @ value  # [Hq, m, D]
            energy = projected(out, weights[layer]).clamp_min(1e-30)
            for i, chosen in enumerate(sets):
                unread = chance * (coded & ~chosen)
                left = (1 - unread.sum(-1, keepdim=True)).clamp_min(1e-6)
                moved = (out - unread @ value) / left - out
                missed[i, j] += float(projected(moved, weights[layer]) / energy) / windows
                shared = (chosen & own).sum(1) / count.clamp_min(1)
                coverage[i, j] += float(shared[count > 0].mean()) / windows if bool((count > 0).any()) else 0.0
            sets.append(own)
    return Selections(missed, coverage)


def projected(out: Tensor, weight: Tensor) -> Tensor:
    """Mean squared norm over queries of weight [hidden, Hq * D] times the heads' outputs [Hq, m, D]."""
    return (out.transpose(0, 1).flatten(1) @ weight.T).square().sum(1).mean()


# -- the search


class Search:
    """The configurations that `settings` leave open for a model with layers `specs`."""

    NAMES = ("full_layers", "stride", "latents")

    def __init__(self, specs: Sequence[LayerSpec], settings: Sequence[str], ratio: float) -> None:
        """Raises UserError for settings that do not fit the model."""
        whole = [spec for spec in specs if spec.window == 0]
        if not whole:
            raise UserError("every layer of this model has a sliding window: deltakv has nothing to compress")
        first = whole[0]
        width = 2 * first.num_kv_heads * first.head_dim
        self.base = DeltaKVConfig(first.head_dim, first.num_kv_heads, f"{width // 8 * 8}x8").override(settings)
        fixed = {setting.partition("=")[0].strip() for setting in settings}
        self.ratio, self.total = ratio, len(specs)
        self.layers = [spec.layer for spec in whole]
        if other := [s for s in whole if (s.head_dim, s.num_kv_heads) != (first.head_dim, first.num_kv_heads)]:
            raise UserError(
                f"layer {other[0].layer} has {other[0].num_kv_heads} KV heads of {other[0].head_dim} and layer "
                f"{first.layer} {first.num_kv_heads} of {first.head_dim}: deltakv needs them alike; use --method vqkv"
            )
        self.strides = (self.base.stride,) if "stride" in fixed else STRIDES
        self.segments = self.base.segments if "latents" in fixed else None
        self.full = self.base.full_layers if "full_layers" in fixed else None
        self.open = not fixed.issuperset(self.NAMES)
        if self.full is not None:
            compressed_layers(self.base, specs)
            observing_layers(self.base, specs)

    def best(self, errors: ErrorModel, reads: Selections | None) -> tuple[Alternative, list[Alternative]]:
        """The best configuration, and the best for each stride, or with a selection for each number of full layers.

        Raises UserError when none fits.
        """
        found: dict[int, Alternative] = {}
        for item in self._configurations(errors, reads):
            key = item.stride if reads is None else len(item.full_layers)
            if key not in found or item.error < found[key].error:
                found[key] = item
        low, high = self._range()
        if not found or self.ratio > high + RATIO_SLACK and self.open:
            fixed = "" if self.open else " with these --set"
            raise UserError(
                f"ratio {self.ratio:g} is out of reach{fixed}: --ratio takes {low:.4f} to {high:.4f} for this model, "
                "deltakv and the fields that --set fixes"
            )
        return min(found.values(), key=lambda item: item.error), [found[key] for key in sorted(found)]

    def _configurations(self, errors: ErrorModel, reads: Selections | None) -> Iterator[Alternative]:
        for stride in self.strides:
            for count in self._counts():
                segments = self.segments or errors.best_segments(stride, self._budget(stride, count))
                if segments is None or not self._fits(stride, segments, count):
                    continue
                error = errors.cost(stride, segments)
                full = self.full or ()
                if reads is None:
                    total = sum(float(e) for layer, e in zip(self.layers, error, strict=True) if layer not in full)
                elif self.full is not None:
                    total = self._cost(error + reads.missed, full)
                else:
                    total, nodes = plan_layers(error + reads.missed, count)
                    full = tuple(self.layers[node] for node in nodes)
                if math.isfinite(total):
                    ratio = round(self._ratio(stride, segments, count), 6)
                    yield Alternative(full, stride, latents_to_text(segments), ratio, total)

    def _counts(self) -> Sequence[int]:
        """Numbers of full layers to try."""
        if self.full is not None:
            return (len(self.full),)
        return range(1, len(self.layers)) if self.base.selects else (0,)

    def _budget(self, stride: int, count: int) -> float:
        """Bits that a token's latents may take in each compressed layer, of which there are all but `count`."""
        layer = (self.ratio + RATIO_SLACK - count / self.total) / (1 - count / self.total)
        return 16 * self.base.width * (layer - layer_ratio(self.base.reference_bits, stride, 0)) + 1e-6

    def _fits(self, stride: int, segments: Segments, count: int) -> bool:
        return not self.open or self._ratio(stride, segments, count) <= self.ratio + RATIO_SLACK

    def _ratio(self, stride: int, segments: Segments, count: int) -> float:
        bits = sum(size * bits for size, bits in segments) / self.base.width
        return mean_ratio(layer_ratio(self.base.reference_bits, stride, bits), count, self.total)

    def _range(self) -> tuple[float, float]:
        """Least and most of the ratio; more than everything is never asked for."""
        counts, width = self._counts(), self.base.width // 8 * 8
        low = self._ratio(max(self.strides), self.segments or ((8, 2),), counts[0])
        high = self._ratio(min(self.strides), self.segments or ((width, 8),), counts[-1])
        return low, min(max(low, high), 1.0)

    def _cost(self, cost: np.ndarray, full: Sequence[int]) -> float:
        """Of compressing all but `full`, each read as the last full layer before it selects."""
        anchor, total = -1, 0.0
        for node, layer in enumerate(self.layers):
            if layer in full:
                anchor = node
            else:
                total += float(cost[anchor, node]) if anchor >= 0 else math.inf
        return total


def plan_layers(cost: np.ndarray, count: int) -> tuple[float, list[int]]:
    """The `count` full layers of n, the first one among them, that make the others cheapest, and what these then cost.

    cost [n, n]: of compressing layer j when i is the last full layer before it. Ties go to the earlier layers.
    """
    size = len(cost)
    before = np.triu(np.ones((size, size), dtype=bool), 1)  # i < j
    steps = np.where(before, cost, 0.0).cumsum(axis=1)
    span = np.full((size, size + 1), np.inf)  # [a, b]: everything strictly between full layers a < b is compressed
    for a in range(size):
        span[a, a + 1 :] = steps[a, a:]
    best, came = np.where(np.arange(size) == 0, 0.0, np.inf), []
    for _ in range(count - 1):
        through = best[:, None] + span[:, :size]
        came.append(through.argmin(0))
        best = through.min(0)
    ends = best + span[:, size]
    node = int(ends.argmin())
    nodes, total = [node], float(ends[node])
    for previous in reversed(came):
        nodes.append(int(previous[nodes[-1]]))
    return total, nodes[::-1]


def explain(
    config: DeltaKVConfig,
    specs: Sequence[LayerSpec],
    layers: Sequence[int],
    errors: ErrorModel,
    reads: Selections | None,
) -> dict[str, dict[str, Any]]:
    """Per compressed layer what `choose` says of it."""
    expected = errors.cost(config.stride, config.segments)
    observer = observing_layers(config, specs)
    told: dict[str, dict[str, Any]] = {}
    for node, layer in enumerate(layers):
        if layer in config.full_layers:
            continue
        told[str(layer)] = {"error": float(expected[node])}
        if reads is not None:
            source = layers.index(observer[layer])
            told[str(layer)] |= {
                "observer": observer[layer],
                "missed": float(reads.missed[source, node]),
                "coverage": float(reads.coverage[source, node]),
            }
    return told
