"""What a compressed cache costs: perplexity, KL and top-1 agreement of text decoded through it, simulated in torch.

The last `decoded` tokens of a window are fed after an exact prefill, one by one or in steps of several. Because which
positions a query sees compressed follows from the tokens stored before its step alone, all of them go through the model
together, each with its own mask; so do the compressed rows that an observing layer chooses for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plugins.attention import causal_mask, rotate
from plugins.geometry import Geometry

from .adapter import AttentionCall, intercept, layer_specs
from .codec import Codec, observing_layers
from .record import causal_attention

DECODED = 512
RESAMPLES = 4000


@dataclass
class Prefill:
    """An exact run over windows ids [B, N]: what decoding from the cache starts from, and is compared with.

    keys (before RoPE), values: per layer [B, Hkv, N - decoded, D]. turn: per layer cos and sin of all N positions, or
    None. logits: [B, R, vocabulary], of the last `decoded` positions, or of those asked for.
    """

    ids: Tensor
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    turn: dict[int, tuple[Tensor, Tensor] | None]
    logits: Tensor


def compressed_mask(geometry: Geometry, past: np.ndarray, total: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [S, total]: True where the query fed when past[s] tokens are stored sees position j through its codes."""
    edge = torch.from_numpy(geometry.sinks + geometry.encoded(past)).to(device)
    position = torch.arange(total, device=device)
    return (position >= geometry.sinks) & (position < edge[:, None])


def steps_past(first: int, feeds: Sequence[int]) -> np.ndarray:
    """Tokens stored before the step in which each token is fed, int [sum(feeds)].

    first: tokens stored before the first step. feeds: tokens of each step.
    """
    sizes = np.asarray(feeds)
    return np.repeat(first + np.cumsum(sizes) - sizes, sizes)


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, decoded: int = DECODED, picks: Sequence[int] | None = None) -> Prefill:
    """Run ids [B, N] exactly. picks: positions whose logits are kept (default: the last `decoded`)."""
    start = ids.shape[1] - decoded
    keep = decoded if picks is None else torch.tensor(picks, device=ids.device)
    result = Prefill(ids, {}, {}, {}, ids.new_empty(0))

    def on_attention(call: AttentionCall) -> Tensor:
        result.keys[call.layer] = call.k[:, :, :start].clone()
        result.values[call.layer] = call.v[:, :, :start].clone()
        result.turn[call.layer] = None if call.cos is None or call.sin is None else (call.cos, call.sin)
        return causal_attention(call)

    with intercept(model, on_attention):
        result.logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits.float()
    return result


def selected_mask(geometry: Geometry, received: Tensor, coded: Tensor, past: np.ndarray) -> Tensor:
    """The compressed positions that each query reads: bool [..., S, N].

    received [..., S, N]: attention that every position gets from the queries fed when past [S] tokens are stored, the
    largest of all heads. coded [S, N]: `compressed_mask`. The lower position of equals is taken; queries that share
    their step with others read all.
    """
    shared = (past[:, None] == past).sum(1) > 1
    count = torch.from_numpy(np.where(shared, geometry.encoded(past), geometry.selected(past))).to(received.device)
    order = received.masked_fill(~coded, -1.0).sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(coded.shape[1], device=received.device) < count[:, None]
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, chosen.expand_as(order))


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    start: Prefill,
    codec: Codec,
    past: np.ndarray | None = None,
    picks: Sequence[int] | None = None,
) -> Tensor:
    """Logits [B, R, vocabulary] of the last tokens, fed through a cache compressed by `codec`.

    past: tokens stored before each one's step, int [decoded] (`steps_past`; default: they are fed one by one).
    picks: positions whose logits are wanted, in the same numbers as for `prefill` (default: all that are fed).
    """
    total, device = start.ids.shape[1], start.ids.device
    first, geometry = next(iter(start.keys.values())).shape[2], codec.config.geometry()
    decoded = total - first
    past = np.arange(first, total) if past is None else past
    keep = 0 if picks is None else torch.tensor(picks, device=device) - first
    observer = observing_layers(codec.config, layer_specs(model)) if geometry.selects else {}
    masks: dict[int, Tensor] = {}
    coded = compressed_mask(geometry, past, total, device)
    chosen: dict[int, Tensor] = {}  # observing layer -> what its followers read, bool [B, 1, S, N]

    def on_attention(call: AttentionCall) -> Tensor:
        k = torch.cat((start.keys[call.layer], call.k), dim=2)
        v = torch.cat((start.values[call.layer], call.v), dim=2)
        turn = start.turn[call.layer] or (None, None)
        if call.window not in masks:
            masks[call.window] = causal_mask(decoded, total, call.window, device)
        q, mask = rotate(call.q, call.cos, call.sin), masks[call.window]
        tables = codec.layers.get(call.layer)
        if tables is None:
            weight = _weights(call, q, rotate(k, *turn), None, mask, coded)
            if call.layer in observer.values():
                chosen[call.layer] = selected_mask(geometry, weight.amax(1), coded, past)[:, None]
            return weight @ _spread(v, q)
        k_coded, v_coded = tables.approximate(k, v, lambda x: rotate(x, *turn))
        if call.layer in observer:
            mask = mask & (~coded | chosen[observer[call.layer]])
        weight = _weights(call, q, rotate(k, *turn), k_coded, mask, coded)
        return (weight * ~coded) @ _spread(v, q) + weight.mul_(coded) @ _spread(v_coded, q)

    position = torch.arange(first, total, device=device)[None]
    with intercept(model, on_attention):
        fed = model(input_ids=start.ids[:, first:], position_ids=position, use_cache=False, logits_to_keep=keep)
        return fed.logits.float()


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, Hkv, N, D] once for each head of queries q [B, Hq, S, D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _weights(call: AttentionCall, q: Tensor, k: Tensor, k_coded: Tensor | None, mask: Tensor, coded: Tensor) -> Tensor:
    """Attention probabilities [B, Hq, S, N] of queries that see the keys marked in `coded` [S, N] as k_coded."""
    score = q @ _spread(k, q).transpose(-1, -2)
    if k_coded is not None:
        score = torch.where(coded, q @ _spread(k_coded, q).transpose(-1, -2), score)
    score = score.mul_(call.scale)
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    return torch.softmax(score.masked_fill_(~mask, torch.finfo(score.dtype).min), dim=-1)


@dataclass
class Score:
    """Per window, over the tokens decoded: mean negative log-likelihood (nats) of the exact and the compressed cache,
    mean KL divergence (nats) and the share of equal top-1 tokens."""

    exact: list[float]
    coded: list[float]
    kl: list[float]
    top1: list[float]

    def add(self, start: Prefill, logits: Tensor) -> None:
        """Compare decoded `logits` with the exact ones."""
        for ids, exact, coded in zip(start.ids, start.logits, logits, strict=True):
            target = ids[-len(exact) + 1 :, None]  # the last token's successor is unknown
            true, approx = torch.log_softmax(exact, -1), torch.log_softmax(coded, -1)
            self.exact.append(-float(true[:-1].gather(1, target).mean()))
            self.coded.append(-float(approx[:-1].gather(1, target).mean()))
            self.kl.append(float((true.exp() * (true - approx)).sum(-1).mean()))
            self.top1.append(float((exact.argmax(-1) == coded.argmax(-1)).float().mean()))

    def summary(self) -> dict[str, float | list[float]]:
        """Perplexities, their relative increase with a 95 % bootstrap interval over windows, mean KL and top-1."""
        exact, coded = np.array(self.exact), np.array(self.coded)
        low, high = bootstrap(coded - exact)
        return {
            "windows": len(exact),
            "ppl_exact": float(np.exp(exact.mean())),
            "ppl": float(np.exp(coded.mean())),
            "increase": float(np.exp((coded - exact).mean()) - 1),
            "interval": [low, high],
            "kl": float(np.mean(self.kl)),
            "top1": float(np.mean(self.top1)),
        }


def bootstrap(difference: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % interval of exp(mean) - 1 over resampled windows; `difference` holds paired differences in nats."""
    pick = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.quantile(np.exp(difference[pick].mean(axis=1)) - 1, (0.025, 0.975))
    return float(low), float(high)


def measure(
    model: PreTrainedModel,
    codec: Codec,
    windows: Sequence[Sequence[int]],
    decoded: int = DECODED,
    progress: Callable[[], None] = lambda: None,
    batch: int = 1,
) -> Score:
    """Score `codec` on windows of token ids, all of one length, `batch` at a time, where the model is."""
    codec = codec.to(model.device)
    score = Score([], [], [], [])
    for index in range(0, len(windows), batch):
        part = [list(window) for window in windows[index : index + batch]]
        start = prefill(model, torch.tensor(part, device=model.device), decoded)
        score.add(start, decode(model, start, codec))
        for _ in part:
            progress()
    return score
