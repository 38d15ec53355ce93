"""The torch side of verification, in a process of its own: what the engine should have answered.

`python -m export.oracle REQUEST RESULT`: a JSON file in, a safetensors file out, both in a temporary folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calib import codec as codecs
from calib import models
from calib.adapter import frozen_rope
from calib.codec import Codec
from calib.reference import ReferenceModel
from plugins import methods
from plugins.errors import UserError


@torch.no_grad()
def answer(request: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of the eager model at the prompts' picks, and of the reference caches at every decode step.

    request: model, sha256, codec (folder or null), engine (safetensors with the rows the engine stored), sequences
    (token lists), prompts (lengths), part (tokens of a prompt that the engine took at once), picks (positions per
    sequence), max_length, state_dtype, tie. "codes", int64 [n, 3], holds what `LayerCache.compare` counted, per
    sequence and layer; "selections" the same of `ReferenceModel.compare_selections`, per sequence and step.
    """
    loaded = models.load(request["model"], progress=False)
    if loaded.sha256 != request["sha256"]:
        raise UserError(f"{request['model']} is not the model the engine was built from: pass that one to --model")
    codec = codecs.load(request["codec"]) if request["codec"] else None
    found = load_file(request["engine"])
    results: dict[str, Tensor] = {}
    counts: list[tuple[int, int, int]] = []
    sets: list[tuple[int, int, int]] = []
    for number, (tokens, prompt) in enumerate(zip(request["sequences"], request["prompts"], strict=True)):
        if frozen_rope(loaded.model):  # the model itself would use the angles of this prompt's length
            eager = ReferenceModel(loaded.model, None, request["max_length"]).step(tokens[:prompt])
        else:
            eager = loaded.model(input_ids=torch.tensor([tokens[:prompt]]), use_cache=False).logits[0].float()
        results[f"{number}.prefill"] = eager[request["picks"][number]].clone()
        del eager
        given = {layer: stored(codec, found, f"{number}.{layer}.") for layer in (codec.layers if codec else ())}
        reference = ReferenceModel(
            loaded.model, codec, request["max_length"], getattr(torch, request["state_dtype"]), given
        )
        for start in range(0, prompt, request["part"]):
            reference.step(tokens[start : min(start + request["part"], prompt)])
        decoded = []
        for step, token in enumerate(tokens[prompt:]):
            selected = selections(found, number, step)
            decoded.append(reference.step([token], selected))
            sets.append(reference.compare_selections(selected, request["tie"]))
        results[f"{number}.decode"] = torch.cat(decoded)
        counts += [reference.caches[layer].compare(rows, request["tie"]) for layer, rows in given.items()]
    if counts:
        results["codes"] = torch.tensor(counts)
        results["selections"] = torch.tensor(sets)
    return {name: tensor.contiguous() for name, tensor in results.items()}


def stored(codec: Codec, found: dict[str, Tensor], prefix: str) -> Any:
    """The stored rows of one sequence and layer, as its LayerCache takes them."""
    state = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    return methods.reference(codec.info.method).stored_rows(codec.config, state)


def selections(found: dict[str, Tensor], sequence: int, step: int) -> dict[int, Tensor]:
    """Observing layer -> the compressed rows that the engine selected in a decode step."""
    prefix = f"{sequence}.selected."
    rows = {int(n.removeprefix(prefix)): t[step].long() for n, t in found.items() if n.startswith(prefix)}
    return {layer: row[row >= 0] for layer, row in rows.items()}


if __name__ == "__main__":
    try:
        save_file(answer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), sys.argv[2])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
