"""A whole model over the methods' reference caches: what an engine must reproduce, token by token, without ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plugins.dense.reference import LayerCache as DenseCache
from plugins.dense.reference import Rope
from plugins.methods import reference

from .adapter import AttentionCall, intercept, layer_specs, rope_tables
from .codec import Codec, observing_layers


class ReferenceModel:
    """One sequence through `model`, its layers cached as `codec` says (None: uncompressed).

    state_dtype: what stored numbers are rounded to. given: layer -> the rows another implementation stored, as the
    method's LayerCache.step takes them, read in place of our own (which are kept in `caches` all the same).
    observed: observing layer -> the compressed rows that the last step of one token chose, and the scores of all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec | None,
        max_length: int,
        state_dtype: torch.dtype = torch.float32,
        given: dict[int, Any] | None = None,
    ) -> None:
        self.model, self.given = model, given or {}
        tables = [(torch.cat((c, c), -1), torch.cat((s, s), -1)) for c, s in rope_tables(model, max_length)]
        specs = layer_specs(model)
        self.geometry = codec.config.geometry() if codec else None
        self.observer = observing_layers(codec.config, specs) if codec else {}
        self.observed: dict[int, tuple[Tensor, Tensor]] = {}
        self.caches: dict[int, Any] = {}
        for spec in specs:
            rope: Rope = None if spec.rope is None else tables[spec.rope]
            if codec is None or spec.layer not in codec.layers:
                self.caches[spec.layer] = DenseCache(spec, rope, state_dtype)
            else:
                cache = reference(codec.info.method).LayerCache
                self.caches[spec.layer] = cache(spec, rope, codec.layers[spec.layer], state_dtype)

    @torch.no_grad()
    def step(self, tokens: Sequence[int], selected: dict[int, Tensor] | None = None) -> Tensor:
        """Append `tokens` and return their logits, float32 [len(tokens), vocabulary].

        selected: observing layer -> compressed rows int64 [M] that another implementation chose for this step.
        """
        self.selected = selected or {}
        self.observed = {}
        with intercept(self.model, self._attention):
            return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def compare_selections(self, theirs: dict[int, Tensor], tie: float) -> tuple[int, int, int]:
        """Sets in all, sets of `theirs` (as `step` takes them) unlike what the last step observed, and flipped ties.

        A set with another row differs by a tie when that row's score is within a part `tie` of the last one chosen.
        """
        wrong = flips = 0
        for layer, (own, score) in self.observed.items():
            other = theirs[layer]
            odd = torch.tensor(sorted(set(own.tolist()) ^ set(other.tolist())), dtype=torch.int64)
            if len(odd) or len(own) != len(other):
                edge = score[own[-1]] if len(own) else score.new_zeros(())
                tied = len(own) == len(other) and bool(((score[odd] - edge).abs() <= tie * edge).all())
                wrong, flips = wrong + (not tied), flips + tied
        return len(self.observed), wrong, flips

    def _attention(self, call: AttentionCall) -> Tensor:
        cache, single = self.caches[call.layer], call.q.shape[2] == 1
        extra: dict[str, Any] = {"given": self.given[call.layer]} if call.layer in self.given else {}
        if single and self.geometry and call.layer in self.observer.values():
            past = cache.key.shape[2]
            rows = self.geometry.encoded(past)
            score = cache.attention_received(call.q, call.k)[self.geometry.sinks : self.geometry.sinks + rows]
            count = int(self.geometry.selected(np.array([past]))[0])
            self.observed[call.layer] = (score.sort(descending=True, stable=True).indices[:count], score)
        if single and call.layer in self.observer:
            source = self.observer[call.layer]
            extra["selected"] = self.selected.get(source, self.observed[source][0])
        return cache.step(call.q, call.k, call.v, **extra)
