"""Record what methods are fitted to: keys, values and error metrics, as the model reads long text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.attention import attend, causal_mask, rotate
from plugins.deltakv.reference import pack
from plugins.errors import UserError
from plugins.vqkv.config import VQKVConfig

from .adapter import AttentionCall, intercept
from .texts import Text, token_windows

TILE = 512  # query rows per tile where scores have to be formed
PAIRS = 4  # keys drawn per query when keys are coded before RoPE
WEIGHTS = (0.3, 50.0)  # least and most of a token's weight, in means
PROJECTIONS = ("o_proj", "out_proj", "dense", "wo")
HELD_OUT = 8  # every eighth window is kept from the fit
RIDGE = 0.02  # of a metric's mean eigenvalue, added to all of them


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


@dataclass
class WindowRecord:
    """Whole windows of what one layer was seen to store, and what errors in it cost; float32.

    rows: x [windows, N, X], keys before RoPE and then values, see `plugins.deltakv.reference.pack`.
    metric: [2 * Hkv, D, D], of the keys' heads and then the values': when every token that a query sees compressed has
    an independent error e, the attention block's output changes by the sum over heads of E e^T metric e (mean square).
    energy: mean squared norm of the attention block's output.
    asked: int64 [windows, m], the queries' positions. attention: their softmax probabilities [windows, Hq, m, N] where
    asked for.
    """

    rows: Tensor
    metric: Tensor
    energy: float
    asked: Tensor
    attention: Tensor | None = None


def held_out(windows: int) -> list[bool]:
    """Which windows are kept from the fit: every eighth, or the last of fewer."""
    step = min(HELD_OUT, windows)
    return [index % step == step - 1 for index in range(windows)]


def windows_to_fit(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    context: int,
    count: int,
    usable: int,
    least: int,
    effort: str,
) -> list[list[int]]:
    """Windows of `context` token ids: `count` to fit on and those held out beside them, or fewer where the texts end.

    Raises UserError when those to fit on have fewer than `least` tokens, of which a window has `usable`.
    """

    def with_held(fitted: int) -> int:
        return fitted + max(1, -(-fitted // (HELD_OUT - 1)))

    windows = token_windows(tokenizer, texts, context, with_held(count))
    if held_out(len(windows)).count(False) * usable < least:
        need = with_held(math.ceil(least / usable)) * context
        raise UserError(
            f"the texts give {len(windows) * context} tokens in windows of {context}, a {effort} fit needs {need}; "
            "give more with --text, or shorten --context"
        )
    return windows


def metric_root(metric: Tensor) -> Tensor:
    """Symmetric square root of metric [T, D, D], scaled to a mean eigenvalue of 1 and kept invertible by RIDGE."""
    metric = metric.double()
    scale = metric.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
    metric = metric / scale[:, None, None] + RIDGE * torch.eye(metric.shape[-1], device=metric.device)
    value, vector = torch.linalg.eigh(metric)
    return (vector * value.clamp_min(1e-12).sqrt()[:, None] @ vector.transpose(1, 2)).float()


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


def read(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    see: Callable[[AttentionCall, int], None],
    progress: Callable[[], None],
) -> None:
    """Run the model over `windows` one by one, exactly; `see` is shown each attention and its window's number."""
    number = 0

    def on_attention(call: AttentionCall) -> Tensor:
        see(call, number)
        return causal_attention(call)

    with intercept(model, on_attention):
        for number, ids in enumerate(windows):  # noqa: B007 (on_attention reads it)
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
            progress()


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

    def see(call: AttentionCall, number: int) -> None:
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

    read(model, windows, see, progress)
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


@dataclass
class Asked:
    """Attention of some queries of one window, float32. Hkv: KV heads, g: query heads of each, m: queries.

    query [Hkv, g * m, D], after RoPE. chance [Hkv, g * m, N], softmax probabilities. slope [Hkv, g * m, N], what a
    change of q.k * scale is multiplied with (1 without a softcap). coded: bool [g * m, N], tokens past the sinks and
    further back than the window.
    """

    query: Tensor
    chance: Tensor
    slope: Tensor | float
    coded: Tensor


def _turn(call: AttentionCall, x: Tensor, index: Tensor, sign: int) -> Tensor:
    """x [Hkv, n, D] of one window by the rotary angles of positions [Hkv, n], or back with sign -1."""
    if call.cos is None or call.sin is None:
        return x
    return rotate(x[:, None], call.cos[0][index], sign * call.sin[0][index])[:, 0]


def _ask(call: AttentionCall, asked: Tensor, sinks: int, window: int) -> Asked:
    """The attention of the queries at positions `asked` [m], over all tokens up to each."""
    _, heads, length, dim = call.k.shape
    position = torch.arange(length, device=asked.device)
    repeated = asked.repeat(call.q.shape[1] // heads)
    query = call.q[0, :, asked].float().reshape(heads, -1, dim)
    query = _turn(call, query, repeated.expand(heads, -1), 1)
    key = _turn(call, call.k[0].float(), position.expand(heads, -1), 1)
    score, slope = query @ key.transpose(1, 2) * call.scale, 1.0
    if call.softcap:
        bent = torch.tanh(score / call.softcap)
        score, slope = call.softcap * bent, 1 - bent.square()
    behind = repeated[:, None] - position
    chance = torch.softmax(score.masked_fill(behind < 0, torch.finfo(score.dtype).min), dim=-1)
    return Asked(query, chance, slope, (behind >= window) & (position >= sinks))


def _score_metric(call: AttentionCall, seen: Asked, square: Tensor, generator: torch.Generator) -> Tensor:
    """Sum of square_ij u u^T over pairs of query i and key j, where u . k_j is the score before RoPE: [Hkv, D, D].

    square: [Hkv, g * m, N]. u = R_j^T R_i q_i depends on the pair, so keys are drawn in proportion, PAIRS per query.
    """
    mass = square.sum(dim=-1, keepdim=True)  # [Hkv, g * m, 1]
    if call.cos is None:
        return (seen.query * mass).transpose(1, 2) @ seen.query
    bound = square.cumsum(dim=-1)
    metric = seen.query.new_zeros(len(mass), seen.query.shape[-1], seen.query.shape[-1])
    for _ in range(PAIRS):
        level = torch.rand(mass.shape, generator=generator).to(mass.device) * bound[..., -1:]
        chosen = torch.searchsorted(bound, level).clamp_max(square.shape[-1] - 1)[..., 0]
        turned = _turn(call, seen.query, chosen, -1)
        metric += (turned * mass).transpose(1, 2) @ turned
    return metric / PAIRS


def attention_statistics(
    call: AttentionCall, asked: Tensor, config: VQKVConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """From the queries at positions `asked`: the key metric [Hkv, D, D] and the attention tokens receive [Hkv, S].

    Only what a query would see coded counts: tokens past the sinks and further back than the window. The score of key
    j for query i is u.k with u = R_i q_i after RoPE, and u = R_j^T R_i q_i before it. The metric is the sum of
    p_ij^2 u u^T; before RoPE the keys j are drawn in proportion to p_ij^2.
    """
    seen = _ask(call, asked, config.sinks, config.window)
    square = seen.chance.square() * seen.coded
    received = (square.sum(dim=1) / seen.coded.sum(dim=0).clamp_min(1)).sqrt()
    if config.key_space == "post_rope":
        return (seen.query * square.sum(dim=-1, keepdim=True)).transpose(1, 2) @ seen.query, received
    return _score_metric(call, seen, square, generator), received


@torch.no_grad()
def record_windows(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    layers: Sequence[int],
    queries: int,
    sinks: int,
    window: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
    attention: bool = False,
) -> dict[int, WindowRecord]:
    """Read `windows`, all of one length, and keep everything that `layers` would store; see WindowRecord.

    `queries` tokens of each window, drawn at random past sinks and window, weigh the errors (as many as there are,
    where there are fewer). The result depends on the seed and the windows only, not on which other layers are kept.
    """
    weights = {layer: output_weight(model, layer).detach().float() for layer in layers}
    kept: dict[int, list[tuple[Tensor, Tensor, float, Tensor, Tensor | None]]] = {layer: [] for layer in layers}

    def see(call: AttentionCall, number: int) -> None:
        if call.layer in kept:
            first = min(sinks + window, call.k.shape[2] - 1)
            draw = torch.randperm(call.k.shape[2] - first, generator=_generator(seed, number))[:queries]
            asked = (draw.sort().values + first).to(call.k.device)
            seen = _ask(call, asked, sinks, window)
            draw = _generator(seed, number, call.layer)
            metric, energy = output_statistics(call, seen, asked, weights[call.layer], draw)
            chance = seen.chance.unflatten(1, (-1, len(asked))).flatten(0, 1) if attention else None
            kept[call.layer].append((pack(call.k, call.v)[0].float(), metric.double(), energy, asked, chance))

    read(model, windows, see, progress)
    result = {}
    for layer in layers:
        rows, metrics, energies, asked, chances = zip(*kept.pop(layer), strict=True)
        result[layer] = WindowRecord(
            torch.stack(rows),
            torch.stack(metrics).mean(0).float(),
            sum(energies) / len(energies),
            torch.stack(asked),
            torch.stack(chances) if attention else None,
        )
    return result


def output_statistics(
    call: AttentionCall, seen: Asked, asked: Tensor, weight: Tensor, generator: torch.Generator
) -> tuple[Tensor, float]:
    """From the queries at `asked`: the metric [2 * Hkv, D, D] and the energy of a WindowRecord.

    weight: the output projection [hidden, Hq * D]. An error e of value j changes a query's output by p W_h e, and of
    key j by p * scale * (u . e) W_h (v_j - o), with o the head's own output and W_h its columns of the projection. The
    heads of a group share values and keys: their joint effect is counted for values, their separate ones for keys.
    """
    heads, dim, count = len(seen.query), seen.query.shape[-1], len(asked)
    value = call.v[0].float()
    out = (seen.chance @ value).unflatten(1, (-1, count))  # [Hkv, g, m, D]
    part = weight.unflatten(1, (heads, -1, dim))  # [hidden, Hkv, g, D]
    both = torch.einsum("ohgd,ohfe->hgfde", part, part)  # W_g^T W_f of every two heads of a group
    gram = both.diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)  # [Hkv, g, D, D]
    pulled = value[:, None] @ gram  # [Hkv, g, N, D]
    reach = (pulled * value[:, None]).sum(-1)[:, :, None] - 2 * out @ pulled.transpose(-1, -2)
    reach = (reach + ((out @ gram) * out).sum(-1, keepdim=True)).clamp_min(0)  # |W_h (v_j - o_i)|^2
    square = seen.chance.square() * seen.coded  # [Hkv, g * m, N]
    moved = square * (seen.slope * call.scale) ** 2 * reach.flatten(1, 2)
    keys = _score_metric(call, seen, moved, generator)
    received = (seen.chance * seen.coded).unflatten(1, (-1, count)).flatten(2)  # [Hkv, g, m * N]
    mass = received @ received.transpose(1, 2)  # [Hkv, g, g]
    values = (both * mass[..., None, None]).sum(dim=(1, 2))
    energy = (out.permute(2, 0, 1, 3).flatten(1) @ weight.T).square().sum(dim=1).mean()
    return torch.cat((keys, values)) / count, float(energy)


def output_metric(model: PreTrainedModel, layer: int, kv_heads: int, dim: int) -> Tensor:
    """W_o,h^T W_o,h summed over the query heads of each KV head: float32 [Hkv, D, D].

    Raises UserError when the layer's output projection is not found.
    """
    weight = output_weight(model, layer).detach().float().unflatten(1, (kv_heads, -1, dim))  # [hidden, Hkv, g, D]
    return torch.einsum("ohgd,ohge->hde", weight, weight)


def output_weight(model: PreTrainedModel, layer: int) -> Tensor:
    """The weight [hidden, Hq * D] of a layer's output projection. Raises UserError when it is not found."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) != layer:
            continue
        for name in PROJECTIONS:
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Linear):
                return projection.weight
    raise UserError(
        f"layer {layer} of {type(model).__name__} has no output projection named {', '.join(PROJECTIONS)}; "
        "fit with --method vqkv --set value_weighting=false"
    )
