"""What a compressed cache costs: perplexity, KL and top-1 agreement of text decoded through it, simulated in torch.

The last `decoded` tokens of a window are fed one by one after an exact prefill. Because which positions a query sees
compressed follows from its own position alone, all of them go through the model together, each with its own mask.
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

from .adapter import AttentionCall, intercept
from .codec import Codec
from .record import causal_attention

DECODED = 512
RESAMPLES = 4000


@dataclass
class Prefill:
    """An exact run over windows ids [B, N]: what decoding from the cache starts from, and is compared with.

    keys (before RoPE), values: per layer [B, Hkv, N - decoded, D]. turn: per layer cos and sin of all N positions, or
    None. logits: [B, decoded, vocabulary], of the last `decoded` positions.
    """

    ids: Tensor
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    turn: dict[int, tuple[Tensor, Tensor] | None]
    logits: Tensor


def compressed_mask(geometry: Geometry, first: int, total: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [total - first, total]: True where the query fed at position p sees position j through its codes."""
    past = np.arange(first, total)
    edge = torch.from_numpy(geometry.sinks + geometry.encoded(past)).to(device)
    position = torch.arange(total, device=device)
    return (position >= geometry.sinks) & (position < edge[:, None])


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor, decoded: int = DECODED) -> Prefill:
    """Run ids [B, N] exactly."""
    start = ids.shape[1] - decoded
    result = Prefill(ids, {}, {}, {}, ids.new_empty(0))

    def on_attention(call: AttentionCall) -> Tensor:
        result.keys[call.layer] = call.k[:, :, :start].clone()
        result.values[call.layer] = call.v[:, :, :start].clone()
        result.turn[call.layer] = None if call.cos is None or call.sin is None else (call.cos, call.sin)
        return causal_attention(call)

    with intercept(model, on_attention):
        result.logits = model(input_ids=ids, use_cache=False, logits_to_keep=decoded).logits.float()
    return result


@torch.no_grad()
def decode(model: PreTrainedModel, start: Prefill, codec: Codec) -> Tensor:
    """Logits [B, decoded, vocabulary] of the last tokens, fed through a cache compressed by `codec`."""
    decoded, total = start.logits.shape[1], start.ids.shape[1]
    first = total - decoded
    masks: dict[int, Tensor] = {}
    coded = compressed_mask(codec.config.geometry(), first, total, start.ids.device)

    def on_attention(call: AttentionCall) -> Tensor:
        k = torch.cat((start.keys[call.layer], call.k), dim=2)
        v = torch.cat((start.values[call.layer], call.v), dim=2)
        turn = start.turn[call.layer] or (None, None)
        if call.window not in masks:
            masks[call.window] = causal_mask(decoded, total, call.window, k.device)
        q, mask = rotate(call.q, call.cos, call.sin), masks[call.window]
        tables = codec.layers.get(call.layer)
        if tables is None:
            return _mixed(call, q, rotate(k, *turn), v, None, None, mask, coded)
        k_coded, v_coded = tables.approximate(k, v, lambda x: rotate(x, *turn))
        return _mixed(call, q, rotate(k, *turn), v, k_coded, v_coded, mask, coded)

    position = torch.arange(first, total, device=start.ids.device)[None]
    with intercept(model, on_attention):
        return model(input_ids=start.ids[:, first:], position_ids=position, use_cache=False).logits.float()


def _mixed(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_coded: Tensor | None,
    v_coded: Tensor | None,
    mask: Tensor,
    coded: Tensor,
) -> Tensor:
    """Attention in which queries see the keys and values marked in `coded` [S, N] as their codes give them."""
    group = q.shape[1] // k.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    score = q @ spread(k).transpose(-1, -2)
    if k_coded is not None:
        score = torch.where(coded, q @ spread(k_coded).transpose(-1, -2), score)
    score = score * call.scale
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    weight = torch.softmax(score.masked_fill(~mask, torch.finfo(score.dtype).min), dim=-1)
    if v_coded is None:
        return weight @ spread(v)
    return (weight * ~coded) @ spread(v) + (weight * coded) @ spread(v_coded)


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
) -> Score:
    """Score `codec` on windows of token ids, one at a time, where the model is."""
    codec = codec.to(model.device)
    score = Score([], [], [], [])
    for window in windows:
        start = prefill(model, torch.tensor([list(window)], device=model.device), decoded)
        score.add(start, decode(model, start, codec))
        progress()
    return score
