"""A layer's step with everything prepared, so that calling it does nothing but launch kernels."""

from __future__ import annotations

import numpy as np
import torch

from plugins.native.abi import Step
from plugins.native.layer import NativeLayer


class BoundStep:
    """One step of `layer` after `past` stored tokens, of `length` new ones per sequence with random q, k and v.

    Calling it launches the step on torch's current stream; again and again, always the same one. selected: code rows to
    read, int32 [B, M], where the op selects. out: [B, Hq, S, D].
    """

    def __init__(
        self, layer: NativeLayer, past: int, length: int = 1, selected: torch.Tensor | None = None, seed: int = 0
    ) -> None:
        spec, batch, device = layer.spec, layer.batch, layer.device
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(heads: int) -> torch.Tensor:
            sizes = (batch, heads, length, spec.head_dim)
            return torch.empty(sizes, dtype=layer.dtype, device=device).normal_(generator=generator)

        tensors = {"q": drawn(spec.num_heads), "k": drawn(spec.num_kv_heads), "v": drawn(spec.num_kv_heads)}
        self.out = tensors["out"] = torch.empty_like(tensors["q"])
        layer.lengths = np.full(batch, past, np.int32)
        feeds = layer.feeds(np.full(batch, length, np.int32), length, selected)
        tensors |= {name: feeds[name] for name in ("past_len", "new_len", "enc_src", "enc_dst")}
        if layer.rope is not None:
            tensors |= dict(zip(("cos", "sin"), layer.rope, strict=True))
        state = type(layer.structure).from_buffer_copy(layer.structure)
        chosen = feeds.get("selected")
        if layer.plan.op == "DenseObservedAttention":
            chosen = torch.empty((batch, feeds["select_width"]), dtype=torch.int32, device=device)
        if chosen is not None:
            state.selected, state.select_width = chosen.data_ptr(), chosen.shape[1]
            state.select_len = feeds["select_len"].data_ptr()
            tensors |= {"selected": chosen, "select_len": feeds["select_len"]}
        self.encodes = feeds["enc_src"].shape[1]
        step = Step(batch=batch, length=length, live=feeds["live"], encode=self.encodes)
        for name in {name for name, _ in Step._fields_} & set(tensors):
            setattr(step, name, tensors[name].data_ptr())
        step.rope_rows = 0 if layer.rope is None else len(layer.rope[0])
        size = layer.library.workspace(layer.op, layer.layer, step, state)
        workspace = torch.empty(size + 256, dtype=torch.uint8, device=device)
        step.workspace, step.workspace_bytes = -(-workspace.data_ptr() // 256) * 256, size
        self.workspace_bytes = size
        self._kept = (layer, tensors, workspace)
        self._step, self._state = step, state

    def __call__(self) -> None:
        layer = self._kept[0]
        self._step.stream = torch.cuda.current_stream().cuda_stream if layer.device != "cpu" else None
        layer.library.attention(layer.op, layer.layer, self._step, self._state)
