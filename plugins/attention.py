"""Plain attention and rotary embedding in torch: the arithmetic that references, recording and simulation share."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotary embedding of x [B, H, S, D] by cos, sin [B or 1, S, rotary_dim]; later dimensions pass through."""
    if cos is None or sin is None:
        return x
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def causal_mask(rows: int, total: int, window: int, device: torch.device | None = None) -> Tensor:
    """True where the last `rows` of `total` positions may look: bool [rows, total], causal, within a sliding window."""
    query = torch.arange(total - rows, total, device=device)[:, None]
    key = torch.arange(total, device=device)[None, :]
    mask = key <= query
    return mask & (key > query - window) if window else mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Grouped-query attention in the inputs' dtype: q [B, Hq, S, D], k and v [B, H, N, D], mask bool [S, N]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    score = q @ k.transpose(-1, -2) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~mask, torch.finfo(score.dtype).min)
    return torch.softmax(score, dim=-1) @ v
