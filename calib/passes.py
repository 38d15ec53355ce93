"""A model read twice: exactly, and with every query seeing tokens past its window as DeltaKV gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from plugins.attention import attend, rotate
from plugins.deltakv.reference import pack, unpack
from plugins.geometry import Geometry

from .adapter import AttentionCall, intercept
from .compressors import Compressors, restore
from .record import causal_attention

TILE = 512  # query rows that share one list of keys
LOGITS = 1 << 27  # logits formed at once


@dataclass(frozen=True)
class Tile:
    """Queries `rows` and what they see: compressed positions up to `edge`, then the sinks and exact positions `exact`.

    mask: bool, a row per query and a column per position in that order.
    """

    rows: slice
    edge: int
    exact: slice
    mask: Tensor


def tiles(geometry: Geometry, total: int, device: torch.device | str = "cpu", size: int = TILE) -> list[Tile]:
    """All queries of `total` positions in tiles of `size` rows."""
    sinks, made = geometry.sinks, []
    for first in range(0, total, size):
        last = min(first + size, total)
        border = torch.from_numpy(sinks + geometry.encoded(np.arange(first, last)))[:, None]
        begin, edge = int(border[0]), int(border[-1])
        query = torch.arange(first, last)[:, None]
        near = torch.cat((torch.arange(min(sinks, last)), torch.arange(begin, last)))
        exact = (near <= query) & ((near < sinks) | (near >= border))
        mask = torch.cat((torch.arange(sinks, edge) < border, exact), dim=1)
        made.append(Tile(slice(first, last), edge, slice(begin, last), mask.to(device)))
    return made


def mixed_attention(call: AttentionCall, restored: Tensor, parts: Sequence[Tile], sinks: int) -> Tensor:
    """Attention [B, Hq, N, D] over `restored` x [B, N, X] past the window and the call's own keys and values."""
    dtype, group = call.v.dtype, call.q.shape[1] // call.k.shape[1]
    k_coded, v_coded = unpack(restored, call.k.shape[1])
    q, k, k_coded = (rotate(x, call.cos, call.sin).to(dtype) for x in (call.q, call.k, k_coded))
    v_coded = v_coded.to(dtype)
    out = []
    for tile in parts:
        keys, values = (
            torch.cat(
                (coded[:, :, sinks : tile.edge], own[:, :, : min(sinks, tile.rows.stop)], own[:, :, tile.exact]), 2
            )
            for coded, own in ((k_coded, k), (v_coded, call.v))
        )
        if call.softcap:
            out.append(attend(q[:, :, tile.rows], keys, values, tile.mask, call.scale, call.softcap))
            continue
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        out.append(
            scaled_dot_product_attention(q[:, :, tile.rows], keys, values, attn_mask=tile.mask, scale=call.scale)
        )
    return torch.cat(out, dim=2)


@dataclass
class Exact:
    """What the exact pass over ids [B, N] saw: layer -> x [B, N, X] float32, and the last hidden states [B, N, H]."""

    x: dict[int, Tensor]
    hidden: Tensor


@torch.no_grad()
def exact_pass(model: PreTrainedModel, ids: Tensor, layers: Sequence[int]) -> Exact:
    """Run ids [B, N] exactly and keep x of `layers`."""

    seen: dict[int, Tensor] = {}

    def on_attention(call: AttentionCall) -> Tensor:
        if call.layer in layers:
            seen[call.layer] = pack(call.k, call.v).float()
        return causal_attention(call)

    with intercept(model, on_attention):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return Exact(seen, hidden)


def compressed_pass(
    model: PreTrainedModel, ids: Tensor, exact: Exact, compressors: Compressors, inputs: str, parts: Sequence[Tile]
) -> tuple[Tensor, Tensor]:
    """The last hidden states [B, N, H] of the second pass, and the relative error of x per layer [layers].

    inputs: what is compressed, the "exact" pass's keys and values or the second pass's "own". parts: `tiles`.
    """
    errors: list[Tensor] = []

    def on_attention(call: AttentionCall) -> Tensor:
        if call.layer not in exact.x:
            return causal_attention(call)
        tables, truth = compressors.layer(call.layer), exact.x[call.layer]
        with torch.autocast(ids.device.type, enabled=False):
            restored = restore(tables, truth if inputs == "exact" else pack(call.k, call.v).float())
            energy = (truth - tables.center).square().sum((1, 2)).clamp_min(1e-30)
            errors.append(((restored - truth).square().sum((1, 2)) / energy).mean())
        return mixed_attention(call, restored, parts, tables.config.sinks)

    with intercept(model, on_attention):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden, torch.stack(errors)


def next_token(model: PreTrainedModel, hidden: Tensor, exact: Tensor, ids: Tensor, objective: str) -> Tensor:
    """Mean over tokens of the cross entropy, or of the divergence from what the exact pass says.

    hidden, exact: last hidden states [B, N, H]. Logits are formed in pieces, and again for the gradients.
    """
    head = model.get_output_embeddings()
    softcap = getattr(model.config, "final_logit_softcapping", None)

    def logits(x: Tensor) -> Tensor:
        y = head(x).float()
        return softcap * torch.tanh(y / softcap) if softcap else y

    def piece(x: Tensor, truth: Tensor, target: Tensor) -> Tensor:
        if objective == "ce":
            return cross_entropy(logits(x), target, reduction="sum")
        with torch.no_grad():
            wanted = log_softmax(logits(truth), dim=-1)
        return kl_div(log_softmax(logits(x), dim=-1), wanted, reduction="sum", log_target=True)

    x, truth, target = hidden[:, :-1].flatten(0, 1), exact[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    step = max(1, LOGITS // head.weight.shape[0])
    total = x.new_zeros((), dtype=torch.float32)
    for part in zip(x.split(step), truth.split(step), target.split(step), strict=True):
        if x.requires_grad:
            total = total + checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False)
        else:
            total = total + piece(*part)
    return total / len(x)
