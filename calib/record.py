"""Record what the quantisers are fitted to: keys, values and error metrics, as the model reads long text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from plugins.attention import attend, causal_mask, rotate
from plugins.errors import UserError
from plugins.vqkv.config import VQKVConfig

from .adapter import AttentionCall, intercept

TILE = 512  # query rows per tile where scores have to be formed
PAIRS = 4  # keys drawn per query when keys are coded before RoPE
WEIGHTS = (0.3, 50.0)  # least and most of a token's weight, in means
PROJECTIONS = ("o_proj", "out_proj", "dense", "wo")


@dataclass
class LayerRecord:
    """What one layer was seen to store, float32.

    keys (in the recorded key space), values: [Hkv, n, D], the same tokens in every layer, in the windows' order.
    query_metric: [Hkv, D, D], sum of u u^T over what keys are multiplied with, u, weighted by squared attention and
    summed over the GQA group: an error e of a key changes the outputs by about e^T query_metric e.
    value_metric: [Hkv, D, D], W_o,h^T W_o,h summed over the GQA group: the same for values.
    attention: [Hkv, n], root mean square attention that each token receives from queries past the window; mean 1.
    """

    keys: Tensor
    values: Tensor
    query_metric: Tensor
    value_metric: Tensor
    attention: Tensor


def causal_attention(call: AttentionCall) -> Tensor:
    """The model's own attention [B, Hq, S, D], without forming the whole score matrix."""
    q, k = rotate(call.q, call.cos, call.sin), rotate(call.k, call.cos, call.sin)
    rows = q.shape[2]
    if call.softcap == 0.0 and call.window == 0:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), call.v.repeat_interleave(group, dim=1)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale)
    mask = causal_mask(rows, rows, call.window, q.device)
    tiles = [slice(first, min(first + TILE, rows)) for first in range(0, rows, TILE)]
    out = [
        attend(
            q[:, :, tile],
            k[:, :, : tile.stop],
            call.v[:, :, : tile.stop],
            mask[tile, : tile.stop],
            call.scale,
            call.softcap,
        )
        for tile in tiles
    ]
    return torch.cat(out, dim=2)


@torch.no_grad()
def record(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    layers: Sequence[int],
    rows: int,
    queries: int,
    config: VQKVConfig,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[int, LayerRecord]:
    """Read `windows` and keep `rows` tokens of each, drawn at random past the sinks, for each of `layers`.

    The attention of `queries` tokens of each window weighs the errors, see `attention_statistics`. Which tokens are
    kept, and so the whole result, depends on the seed and the windows only, not on `layers`.
    """
    kept: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {layer: [] for layer in layers}
    metrics: dict[int, Tensor] = {}
    number = 0

    def on_attention(call: AttentionCall) -> Tensor:
        if call.layer in kept:
            draw = _generator(seed, number)
            usable = call.k.shape[2] - config.sinks
            token = torch.randperm(usable, generator=draw)[:rows].sort().values + config.sinks
            asked = torch.randperm(usable, generator=draw)[:queries].sort().values + config.sinks
            token, asked = token.to(call.k.device), asked.to(call.k.device)
            keys = rotate(call.k, call.cos, call.sin) if config.key_space == "post_rope" else call.k
            metric, received = attention_statistics(call, asked, config, _generator(seed, number, call.layer))
            kept[call.layer].append((keys[0, :, token].clone(), call.v[0, :, token].clone(), received[:, token]))
            metrics[call.layer] = metrics.get(call.layer, 0) + metric.double()
        return causal_attention(call)

    with intercept(model, on_attention):
        for number, window in enumerate(windows):  # noqa: B007 (on_attention reads it)
            model(input_ids=torch.tensor([list(window)], device=model.device), use_cache=False, logits_to_keep=1)
            progress()
    result = {}
    for layer in layers:
        keys, values, received = (torch.cat(part, dim=1) for part in zip(*kept.pop(layer), strict=True))
        received = received / received.mean(dim=1, keepdim=True).clamp_min(1e-30)
        heads, _, dim = keys.shape
        result[layer] = LayerRecord(
            keys,
            values,
            metrics[layer].float(),
            output_metric(model, layer, heads, dim) if config.value_weighting else values.new_zeros(heads, dim, dim),
            received.clamp(*WEIGHTS),
        )
    return result


def _generator(*salt: int) -> torch.Generator:
    value = 0
    for item in salt:
        value = (value * 1_000_003 + item + 1) % (1 << 62)
    return torch.Generator().manual_seed(value)


def attention_statistics(
    call: AttentionCall, asked: Tensor, config: VQKVConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """From the queries at positions `asked`: the key metric [Hkv, D, D] and the attention tokens receive [Hkv, S].

    Only what a query would see coded counts: tokens past the sinks and further back than the window. The score of key
    j for query i is u.k with u = R_i q_i after RoPE, and u = R_j^T R_i q_i before it. The metric is the sum of
    p_ij^2 u u^T; before RoPE the keys j are drawn in proportion to p_ij^2, PAIRS per query.
    """
    _, heads, length, dim = call.k.shape
    cos, sin = (None, None) if call.cos is None or call.sin is None else (call.cos[0], call.sin[0])
    group = call.q.shape[1] // heads

    def turn(x: Tensor, index: Tensor, sign: int) -> Tensor:  # x [Hkv, m, D] by the angles of positions [Hkv, m]
        if cos is None or sin is None:
            return x
        return rotate(x[:, None], cos[index], sign * sin[index])[:, 0]

    query = call.q[0, :, asked].float().reshape(heads, -1, dim)  # [Hkv, group * m, D]
    query = turn(query, asked.repeat(group).expand(heads, -1), 1)
    key = turn(call.k[0].float(), torch.arange(length, device=asked.device).expand(heads, -1), 1)
    score = query @ key.transpose(1, 2) * call.scale
    if call.softcap:
        score = call.softcap * torch.tanh(score / call.softcap)
    position = torch.arange(length, device=asked.device)
    behind = asked.repeat(group)[:, None] - position  # [group * m, S]
    chance = torch.softmax(score.masked_fill(behind < 0, torch.finfo(score.dtype).min), dim=-1)
    coded = (behind >= config.window) & (position >= config.sinks)
    square = chance.square() * coded
    received = (square.sum(dim=1) / coded.sum(dim=0).clamp_min(1)).sqrt()

    mass = square.sum(dim=-1, keepdim=True)  # [Hkv, group * m, 1]
    if config.key_space == "post_rope" or cos is None:
        return (query * mass).transpose(1, 2) @ query, received
    bound = square.cumsum(dim=-1)
    metric = query.new_zeros(heads, dim, dim)
    for _ in range(PAIRS):
        level = torch.rand(mass.shape, generator=generator).to(mass.device) * bound[..., -1:]
        chosen = torch.searchsorted(bound, level).clamp_max(length - 1)[..., 0]
        seen = turn(query, chosen, -1)
        metric += (seen * mass).transpose(1, 2) @ seen
    return metric / PAIRS, received


def output_metric(model: PreTrainedModel, layer: int, kv_heads: int, dim: int) -> Tensor:
    """W_o,h^T W_o,h summed over the query heads of each KV head: float32 [Hkv, D, D].

    Raises UserError when the layer's output projection is not found.
    """
    for module in model.modules():
        if getattr(module, "layer_idx", None) != layer:
            continue
        for name in PROJECTIONS:
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Linear):
                weight = projection.weight.detach().float().unflatten(1, (kv_heads, -1, dim))  # [hidden, Hkv, g, D]
                return torch.einsum("ohgd,ohge->hde", weight, weight)
    raise UserError(
        f"layer {layer} of {type(model).__name__} has no output projection named {', '.join(PROJECTIONS)}; "
        "fit with --set value_weighting=false"
    )
