"""Take over the attention of a transformers model: q, k and v before RoPE in, the attention's output out.

Every supported family calls its module-level `apply_rotary_pos_emb` and then the function registered under
`config._attn_implementation`. `intercept` makes the first one an identity that notes cos and sin, and hands
the call to a function of ours: recording, simulation, the reference and the exporter all meet the model here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from plugins.attention import attend, causal_mask, rotate
from plugins.layer import LayerSpec

ATTENTION = "kvpack"


@dataclass
class AttentionCall:
    """One layer's attention of one forward pass.

    q: [B, Hq, S, D], k and v: [B, Hkv, S, D], before RoPE (k after bias and k_norm). cos, sin: [B or 1, S, rotary_dim],
    or None where the layer uses no RoPE. scale multiplies q.k; softcap and window (sliding) are 0 where there is none.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    scale: float
    softcap: float
    window: int


_handler: Callable[[AttentionCall], Tensor] | None = None
_rotary: tuple[Tensor, Tensor] | None = None


def _note_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object):
    global _rotary
    _rotary = (cos, sin)
    return q, k


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    global _rotary
    assert _handler is not None
    cos, sin = _rotary or (None, None)
    _rotary = None
    call = AttentionCall(
        layer=module.layer_idx,
        q=query,
        k=key,
        v=value,
        cos=cos,
        sin=sin,
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        softcap=float(softcap or 0.0),
        window=int(sliding_window or 0),
    )
    return _handler(call).transpose(1, 2), None  # [B, S, Hq, D]


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def intercept(model: PreTrainedModel, handler: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """Within the context every attention of `model` is computed by `handler(call) -> [B, Hq, S, D]`.

    Not re-entrant; call the model with use_cache=False and without an attention mask.
    """
    global _handler
    if _handler is not None:
        raise RuntimeError("intercept() is already active")
    home = sys.modules[type(model).__module__]
    rotary, implementation = home.apply_rotary_pos_emb, model.config._attn_implementation
    _handler = handler
    home.apply_rotary_pos_emb = _note_rotary
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        home.apply_rotary_pos_emb = rotary
        _handler = None


def exact(call: AttentionCall) -> Tensor:
    """The model's own attention, as a handler."""
    q, k = rotate(call.q, call.cos, call.sin), rotate(call.k, call.cos, call.sin)
    mask = causal_mask(q.shape[2], q.shape[2], call.window, q.device)
    return attend(q, k, call.v, mask, call.scale, call.softcap)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> tuple[list[LayerSpec], list[tuple[nn.Module, tuple[object, ...]]]]:
    """Run two tokens and note each layer's shapes and which rotary module (and extra arguments) made its cos."""
    made: list[tuple[Tensor, nn.Module, tuple[object, ...]]] = []  # keeps cos alive, so identity is unambiguous

    def on_rotary(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], out: tuple[Tensor, Tensor]):
        made.append((out[0], module, args[2:] + tuple(v for n, v in kwargs.items() if n != "position_ids")))

    specs: list[LayerSpec] = []
    tables: list[tuple[nn.Module, tuple[object, ...]]] = []

    def on_attention(call: AttentionCall) -> Tensor:
        rope = None
        if call.cos is not None:
            module, extra = next((m, e) for cos, m, e in made if cos is call.cos)
            if (module, extra) not in tables:
                tables.append((module, extra))
            rope = tables.index((module, extra))
        specs.append(
            LayerSpec(
                layer=call.layer,
                num_heads=call.q.shape[1],
                num_kv_heads=call.k.shape[1],
                head_dim=call.q.shape[3],
                scale=call.scale,
                softcap=call.softcap,
                window=call.window,
                rope=rope,
                rotary_dim=0 if call.cos is None else call.cos.shape[-1],
            )
        )
        return exact(call)

    hooks = [
        module.register_forward_hook(on_rotary, with_kwargs=True)
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    ]
    try:
        with intercept(model, on_attention):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return specs, tables


def layer_specs(model: PreTrainedModel) -> list[LayerSpec]:
    """The attention of every layer, in order, found by running two tokens through the model."""
    return _probe(model)[0]


@torch.no_grad()
def rope_tables(model: PreTrainedModel, limit: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin [limit, rotary_dim / 2], float32, of every distinct rotary embedding, for positions 0 .. limit-1.

    Scalings that depend on the length (dynamic, longrope) are evaluated, and so frozen, at `limit`.
    """
    position = torch.arange(limit, device=model.device)[None]
    like = torch.zeros(1, 1, device=model.device, dtype=torch.float32)
    tables = []
    for module, extra in _probe(model)[1]:
        cos, sin = (t[0].float() for t in module(like, position, *extra))
        half = cos.shape[-1] // 2
        if not torch.equal(cos[:, :half], cos[:, half:]):
            raise NotImplementedError("interleaved rotary embeddings are not supported")
        tables.append((cos[:, :half].contiguous(), sin[:, :half].contiguous()))
    return tables


def frozen_rope(model: PreTrainedModel) -> list[str]:
    """The rotary scalings of `model` whose angles depend on the length, which `rope_tables` freezes at its limit."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    kinds = [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    return sorted({p["rope_type"] for p in kinds if p.get("rope_type") in ("dynamic", "longrope")})
