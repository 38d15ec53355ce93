"""The canary: a few tokens stored with the logits that the build computed, replayed to prove that this host agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from plugins.errors import UserError
from runtime.artefact import REBUILD

if TYPE_CHECKING:
    from runtime.engine import Engine

CANARY = "canary.safetensors"
CANARY_STEPS = 8
LOGITS_DECODE = 2e-3  # max abs, float32
# Where weights or cache rows of 16 bits are rounded, a last bit of float32 decides which way; hence shares.
FP16_KL, FP16_TOP1 = 1e-4, 0.99
BF16_KL, BF16_TOP1 = 1e-3, 0.98  # rounded to eight bits instead of eleven


class SelfCheckFailed(UserError):
    """The engine does not compute the logits that were stored when it was built."""


@dataclass
class Check:
    """One measured number and its bound; `ok` says whether it holds."""

    name: str
    value: float
    limit: float
    ok: bool
    detail: str = ""

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, detail: str = "") -> Check:
        return cls(name, float(value), float(limit), bool(value <= limit), detail)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def record(engine: Engine, tokens: np.ndarray, folder: str | Path) -> None:
    """Write the engine's own logits on `tokens`, int64 [B, N > CANARY_STEPS], to the canary of `folder`."""
    save_file({"tokens": tokens, "logits": replay(engine, tokens)}, Path(folder) / CANARY)


def replay(engine: Engine, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, 2, V]: logits after the prompt and after the last of CANARY_STEPS decode steps."""
    if engine.sequences is not None and engine.sequences < len(tokens):
        return np.concatenate([replay(engine, row[None]) for row in tokens])
    with engine.session(batch=len(tokens)) as session:
        first = session.prefill(tokens[:, :-CANARY_STEPS].tolist())[:, 0]
        for step in range(CANARY_STEPS):
            last = session.decode(tokens[:, step - CANARY_STEPS].tolist())
    return np.stack([first, last], axis=1)


def compare(engine: Engine) -> list[Check]:
    """The stored logits beside those computed here. Raises UserError when there is no canary to replay."""
    tokens, logits = _stored(engine)
    rounding = coarsest(engine.artefact.config)
    return closeness("logits stored at build", list(replay(engine, tokens)), list(logits), rounding, LOGITS_DECODE)


def self_check(engine: Engine) -> list[Check]:
    """`compare`, but raises SelfCheckFailed, with the measured numbers, when a check does not hold."""
    checks = compare(engine)
    if failed := [check for check in checks if not check.ok]:
        told = " and ".join(f"{check.name} is {check.value:.3g}, above {check.limit:.3g}" for check in failed)
        raise SelfCheckFailed(
            f"{engine.artefact.path} failed its self-check on {engine.provider} ({told}): do not trust what it "
            f"generates here; copy the engine again, or {REBUILD}."
        )
    return checks


def coarsest(config: Mapping[str, object]) -> str:
    """The coarsest dtype that decoding rounds to: in one of 16 bits, sums that differ in the last bit round apart."""
    return next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in (config["dtype"], config["kv_dtype"]))


def closeness(
    name: str, got: Sequence[np.ndarray], expected: Sequence[np.ndarray], rounding: str, limit: float
) -> list[Check]:
    """Largest difference of the logits; with a rounding to 16 bits KL divergence and top-1 agreement instead."""
    if rounding == "fp32":
        worst = np.max([np.abs(g - e).max() for g, e in zip(got, expected, strict=True)])
        return [Check.at_most(f"{name}: max |difference of logits|", worst, limit)]
    g, e = (np.concatenate([x.reshape(-1, x.shape[-1]) for x in side]) for side in (got, expected))
    most, top1 = (BF16_KL, BF16_TOP1) if rounding == "bf16" else (FP16_KL, FP16_TOP1)
    true, approx = log_softmax(e), log_softmax(g)
    kl = float((np.exp(true) * (true - approx)).sum(-1).mean())
    differ = float((g.argmax(-1) != e.argmax(-1)).mean())
    return [
        Check.at_most(f"{name}: KL divergence", kl, most),
        Check.at_most(f"{name}: share of differing top-1", differ, 1 - top1),
    ]


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _stored(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int64 [B, N], and logits, float32 [B, 2, V], of the engine's canary."""
    artefact = engine.artefact
    path = artefact.path / CANARY
    if CANARY not in artefact.config["files"]:
        raise UserError(f"{path} is missing, so this engine cannot check itself: {REBUILD}.")
    try:
        stored = load_file(path)
        tokens, logits = stored["tokens"], stored["logits"]
    except (SafetensorError, KeyError):
        raise UserError(f"{path} holds no tokens and logits: {REBUILD}.") from None
    if tokens.ndim != 2 or tokens.shape[1] <= CANARY_STEPS or logits.shape != (len(tokens), 2, artefact.vocab_size):
        raise UserError(
            f"{path} holds tokens {list(tokens.shape)} and logits {list(logits.shape)}, which do not belong together "
            f"or to this engine: {REBUILD}."
        )
    return tokens, logits
