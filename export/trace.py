"""A transformers model as an ONNX graph whose attentions are opaque `kvpack::Attention` nodes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calib.adapter import AttentionCall, intercept
from plugins.graph import DOMAIN, OPSET

OPAQUE = "Attention"


class _Traced(nn.Module):
    """input_ids [B, S], logit_index [B, P] -> logits [B, P, vocabulary], float32, only at the hidden states picked."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, logit_index: Tensor) -> Tensor:
        def pick(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            hidden = args[0]  # [B, S, C]
            return (torch.gather(hidden, 1, logit_index[:, :, None].expand(-1, -1, hidden.shape[-1])),)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            return self.model(input_ids=input_ids, use_cache=False).logits.float()
        finally:
            hook.remove()


def _opaque(call: AttentionCall) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (call.q, call.k, call.v))  # [B, S, heads * D]
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{OPAQUE}", (q, k, v), {"layer": call.layer}, dtypes=(q.dtype,), shapes=(q.shape,), version=1
    )
    return out.unflatten(-1, (call.q.shape[1], -1)).transpose(1, 2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports its progress on stdout and its doubts as warnings; our own checks judge the result."""
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


@torch.no_grad()
def trace(model: PreTrainedModel) -> ir.Model:
    """Export `model`, in the dtype it is in, with sizes >= 2 so that no dimension becomes a constant."""
    batch, sequence, picks = (torch.export.Dim(n, min=1) for n in ("batch", "sequence", "picks"))
    example = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long))
    with intercept(model, _opaque), _quiet():
        program = torch.onnx.export(
            _Traced(model),
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=["input_ids", "logit_index"],
            output_names=["logits"],
            dynamic_shapes=({0: batch, 1: sequence}, {0: batch, 1: picks}),
            optimize=True,
            verbose=False,
        )
    return program.model
