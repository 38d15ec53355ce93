"""What DenseAttention means, in float32 torch: the whole history is kept, a sliding window only masks it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attend, causal_mask, rotate
from ..layer import LayerSpec

Rope = tuple[Tensor, Tensor] | None  # cos, sin [limit, rotary_dim] of one layer


def turn(x: Tensor, rope: Rope, first: int) -> Tensor:
    """x [B, H, S, D] rotated at positions first, first + 1, ..."""
    if rope is None:
        return x
    span = slice(first, first + x.shape[2])
    return rotate(x, rope[0][None, span], rope[1][None, span])


class LayerCache:
    """One layer of one sequence. state_dtype is what a stored number is rounded to (fresh ones are exact)."""

    def __init__(self, spec: LayerSpec, rope: Rope, state_dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.rope, self.state_dtype = spec, rope, state_dtype
        empty = torch.zeros(1, spec.num_kv_heads, 0, spec.head_dim)
        self.key, self.value = empty, empty.clone()

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, Hq, S, D], k and v [1, H, S, D] before RoPE -> the output [1, Hq, S, D]; appends k and v."""
        past = self.key.shape[2]
        key = turn(k, self.rope, past)
        mask = causal_mask(q.shape[2], past + q.shape[2], self.spec.window)
        out = attend(
            turn(q, self.rope, past),
            torch.cat((self.key, key), dim=2),
            torch.cat((self.value, v), dim=2),
            mask,
            self.spec.scale,
            self.spec.softcap,
        )
        self.key = torch.cat((self.key, key.to(self.state_dtype).float()), dim=2)
        self.value = torch.cat((self.value, v.to(self.state_dtype).float()), dim=2)
        return out

    def attention_received(self, q: Tensor, k: Tensor) -> Tensor:
        """Attention of one new token to each stored one, the largest of all heads: float32 [past].

        q [1, Hq, 1, D], k [1, H, 1, D] before RoPE, not yet stored.
        """
        past, group = self.key.shape[2], self.spec.group
        keys = torch.cat((self.key, turn(k, self.rope, past)), dim=2).repeat_interleave(group, dim=1)
        score = turn(q, self.rope, past) @ keys.transpose(-1, -2) * self.spec.scale
        if self.spec.softcap:
            score = self.spec.softcap * torch.tanh(score / self.spec.softcap)
        return torch.softmax(score, dim=-1)[0, :, 0, :past].amax(0)
