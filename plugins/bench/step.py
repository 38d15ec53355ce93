"""A layer's step with everything prepared, so that calling it does nothing but launch kernels."""

from __future__ import annotations

import numpy as np
import torch

from plugins.native.layer import NativeLayer


class BoundStep:
    """One step of `layer` after `past` stored tokens, of `length` new ones per sequence with random q, k and v.

    Calling it launches the step on torch's current stream; again and again, always the same one. selected: code rows to
    read, int32 [B, M], where the op selects. out: [B, S, Hq * D].
    """

    def __init__(
        self, layer: NativeLayer, past: int, length: int = 1, selected: torch.Tensor | None = None, seed: int = 0
    ) -> None:
        spec, batch, device = layer.spec, layer.batch, layer.device
        generator = torch.Generator(device).manual_seed(seed)
        packed = (batch, length, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        qkv = torch.empty(packed, dtype=layer.dtype, device=device).normal_(generator=generator)
        self.out = layer.output(length)
        layer.lengths = np.full(batch, past, np.int32)
        feeds = layer.feeds(np.full(batch, length, np.int32), length, selected)
        self._bound = layer.bound(qkv, None, None, self.out, feeds)
        self.encodes, self.workspace_bytes = self._bound.step.encode, self._bound.step.workspace_bytes

    def __call__(self) -> None:
        self._bound()
