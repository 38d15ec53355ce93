"""What is evaluated: engines, run by the runtime, and codecs, simulated in torch. Both give logits of a sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calib import codec as codecs
from calib.quality import Prefill, decode, prefill, steps_past
from plugins.contract import dense_bytes
from plugins.errors import UserError
from plugins.methods import config_class, label
from runtime.artefact import Artefact, state_bytes

from .sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from calib.codec import Codec
    from calib.models import LoadedModel
    from plugins.layer import LayerSpec
    from runtime import Engine

KV_DTYPE = "fp16"  # of the exact rows that a codec's bytes are counted with


@dataclass
class Subject:
    """One compressed cache. facts: its entry in the evaluation; digest: SHA-256 of what decides its logits.

    model: the model it was made for, as the evaluation names it. limit: longest sequence, where it is the subject's.
    """

    path: Path
    digest: str
    facts: dict[str, Any]
    model: dict[str, Any]
    limit: int | None = None
    codec: Codec | None = None

    @property
    def label(self) -> str:
        return self.facts["label"]


def open_subjects(paths: Sequence[str | Path]) -> list[Subject]:
    """Engine and codec folders, told apart, read and labelled; all made for one model. Raises UserError."""
    if not paths:
        raise UserError("there is nothing to evaluate: give an engine or a codec folder")
    found = [_open(Path(path)) for path in paths]
    if len({subject.path.resolve() for subject in found}) < len(found):
        raise UserError("the same folder is given twice: leave one out")
    first = found[0]
    for other in found[1:]:
        if other.model["sha256"] != first.model["sha256"]:
            raise UserError(
                f"{other.path} was made for {other.model['name']} ({other.model['sha256'][:12]}) and {first.path} for "
                f"{first.model['name']} ({first.model['sha256'][:12]}): evaluate one model at a time"
            )
    _label(found)
    return found


def _open(path: Path) -> Subject:
    if (path / "config.json").is_file() and (path / "model.onnx").exists():
        return _engine(path)
    if (path / codecs.DESCRIPTION).is_file():
        return _codec(path)
    raise UserError(
        f"{path} is neither an engine folder nor a codec folder: make one with `python -m export build` or "
        "`python -m calib fit`"
    )


def _engine(path: Path) -> Subject:
    artefact = Artefact.open(path)
    config = artefact.config
    method = config["method"]
    summary, fit, effort = "uncompressed", "", ""
    if method["name"] != "none":
        summary = config_class(method["name"]).from_json(method["config"]).summary()
        made = json.loads((path / codecs.DESCRIPTION).read_text(encoding="utf-8"))
        fit, effort = made.get("fit", ""), made.get("effort", "")
    facts = {
        "label": "",
        "method": method["name"],
        "ratio": method["ratio"],
        "summary": summary,
        "fit": fit,
        "effort": effort,
        "source": "engine",
        "path": str(path),
        "digest": config["digest"],
        "kv_dtype": config["kv_dtype"],
        "fixed_bytes": config["fixed_bytes"],
    }
    keys = ("name", "sha256", "architecture", "num_layers", "num_kv_heads", "head_dim")
    return Subject(path, config["digest"], facts, {key: config["model"][key] for key in keys}, artefact.max_length)


def _codec(path: Path) -> Subject:
    codec = codecs.load(path)
    digest = hashlib.sha256()
    for name in (codecs.DESCRIPTION, codecs.TENSORS):
        digest.update((path / name).read_bytes())
    facts = {
        "label": "",
        "method": codec.info.method,
        "ratio": codec.config.ratio(codec.info.model["num_layers"]),
        "summary": codec.config.summary(),
        "fit": codec.info.fit,
        "effort": codec.info.effort,
        "source": "codec",
        "path": str(path),
        "digest": digest.hexdigest(),
        "kv_dtype": KV_DTYPE,
    }
    model = {key: codec.info.model[key] for key in sorted(codecs.MODEL_KEYS)}
    return Subject(path, digest.hexdigest(), facts, model, codec=codec)


def _label(subjects: Sequence[Subject]) -> None:
    """Give every subject a label of its own: method and ratio, with the folder's name and a number where they must."""
    names = [label(subject.facts["method"], subject.facts["ratio"]) for subject in subjects]
    names = [
        f"{name} ({subject.path.name})" if names.count(name) > 1 else name
        for name, subject in zip(names, subjects, strict=True)
    ]
    for number, (name, subject) in enumerate(zip(names, subjects, strict=True)):
        before = names[:number].count(name)
        subject.facts["label"] = f"{name} ({before + 1})" if before else name


def count_bytes(subject: Subject, lengths: Sequence[int], specs: Sequence[LayerSpec], limit: int) -> None:
    """Add to the subject's facts what it holds: per sequence at `lengths`, as fractions of an fp16 cache, and tables.

    specs, limit: of the model; used for a codec.
    """
    if subject.codec is None:
        artefact = Artefact.open(subject.path, verify=False)
        held = {length: state_bytes(artefact, length) for length in lengths}
    else:
        from export.plans import codec_bytes

        fixed, held = codec_bytes(subject.codec, specs, KV_DTYPE, limit, lengths)
        subject.facts["fixed_bytes"] = fixed
    subject.facts["bytes"] = {str(length): size for length, size in held.items()}
    subject.facts["fractions"] = {
        str(length): size / dense_bytes(subject.model, length) for length, size in held.items()
    }


# -- logits


class Simulation:
    """A model in torch, on the GPU where there is one. The exact prefill of a sample serves every codec."""

    def __init__(self, loaded: LoadedModel, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._codecs: dict[str, Codec] = {}

    def exact(self, sample: Sample) -> Prefill:
        ids = torch.tensor([sample.ids], device=self.model.device)
        return prefill(self.model, ids, sum(sample.feeds), sample.picks)

    def coded(self, sample: Sample, start: Prefill, subject: Subject) -> Tensor:
        """Logits [R, vocabulary] of the sample's picks through the subject's cache."""
        if subject.digest not in self._codecs:
            assert subject.codec is not None
            self._codecs[subject.digest] = subject.codec.to(self.model.device)
        past = steps_past(sample.first, sample.feeds)
        return decode(self.model, start, self._codecs[subject.digest], past, sample.picks)[0]


def engine_logits(engine: Engine, sample: Sample) -> tuple[Tensor, Tensor]:
    """Logits [R, vocabulary] of the sample's picks: of one exact prefill, and through the cache; on the CPU."""
    with engine.session() as session:
        exact = session.prefill(sample.ids, logits=np.asarray(sample.picks))[0]
    wanted, position, rows = set(sample.picks), sample.first, []
    with engine.session() as session:
        session.prefill(sample.ids[:position])
        for size in sample.feeds:
            if position > sample.picks[-1]:
                break  # nothing that comes after is scored
            picks = [at for at in range(size) if position + at in wanted]
            step = sample.ids[position : position + size]
            logits = session.prefill(step, logits=picks or "last")[0] if size > 1 else session.decode(step)
            rows.append(logits[: len(picks)])
            position += size
    return torch.from_numpy(exact), torch.from_numpy(np.concatenate(rows))
