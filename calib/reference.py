"""A whole model over the methods' reference caches: what an engine must reproduce, token by token, without ONNX."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plugins.dense.reference import LayerCache as DenseCache
from plugins.dense.reference import Rope
from plugins.vqkv.reference import LayerCache as VQKVCache

from .adapter import AttentionCall, intercept, layer_specs, rope_tables
from .codec import Codec


class ReferenceModel:
    """One sequence through `model`, its layers cached as `codec` says (None: uncompressed).

    state_dtype: what stored numbers are rounded to. codes: layer -> (K, V) codes int64 [H, n, L] of another
    implementation, read in place of our own; what we would have coded is kept in `caches[layer].codes` all the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec | None,
        max_length: int,
        state_dtype: torch.dtype = torch.float32,
        codes: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.model, self.codes = model, codes or {}
        tables = [(torch.cat((c, c), -1), torch.cat((s, s), -1)) for c, s in rope_tables(model, max_length)]
        self.caches: dict[int, DenseCache | VQKVCache] = {}
        for spec in layer_specs(model):
            rope: Rope = None if spec.rope is None else tables[spec.rope]
            if codec is None or spec.layer not in codec.layers:
                self.caches[spec.layer] = DenseCache(spec, rope, state_dtype)
            else:
                sides = codec.layers[spec.layer]
                self.caches[spec.layer] = VQKVCache(
                    spec, rope, codec.config.geometry(), sides["k"], sides["v"],
                    codec.config.key_space == "pre_rope", state_dtype,
                )  # fmt: skip

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append `tokens` and return their logits, float32 [len(tokens), vocabulary]."""
        with intercept(self.model, self._attention):
            return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def _attention(self, call: AttentionCall) -> Tensor:
        cache = self.caches[call.layer]
        if call.layer in self.codes:
            return cache.step(call.q, call.k, call.v, self.codes[call.layer])
        return cache.step(call.q, call.k, call.v)
