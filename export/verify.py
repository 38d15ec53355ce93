"""Proof that an engine computes what it claims: against the eager model, the reference caches and itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from plugins.contract import row_count
from plugins.errors import UserError
from runtime import Engine, canary
from runtime.canary import LOGITS_DECODE, Check, closeness, coarsest
from runtime.session import Session

from .plans import DTYPES

PICKS = 32  # prompt positions whose logits are compared
STEPS = 64  # decode steps of the build's own check
LOGITS_PREFILL = 2e-4  # max abs, float32, against the eager model, times the scale of the logits (below)
LOGIT_SCALE = 10.0  # logits larger than this loosen the prefill bound in proportion: float32 has no more digits
TIE = 1e-4  # relative gap of squared distances under which two codes are a tie
# Share of codes that may differ where what is coded was rounded to 16 bits: 0.5 % of SmolLM2's do with vqkv in fp16,
# while its logits are within a KL divergence of 2e-6 of the reference's.
CODES = {"fp16": 1e-2, "bf16": 5e-2}


def verification_tokens(engine: Engine, text: str) -> tuple[list[list[int]], list[int]]:
    """Two sequences of different lengths that cross the window and several blocks, and their prompt lengths."""
    geometry = engine.artefact.geometry
    base = geometry.sinks + geometry.window if geometry else 96
    block = geometry.block if geometry else 32
    limit = engine.artefact.max_length
    ids = engine.text.encode(text)
    prompts = [base + 3 * block + 5, max(base - block // 2, 2)]
    steps = min(STEPS, limit - max(prompts))
    if steps < 1:
        raise UserError(
            f"--max-length {limit} leaves no room to check the codes: it must be at least {max(prompts) + 1} with "
            f"these sinks, window and block"
        )
    needed = sum(prompts) + 2 * steps
    while len(ids) < needed:
        ids = ids + ids
    sequences = [ids[: prompts[0] + steps], ids[needed - prompts[1] - steps : needed]]
    return sequences, prompts


def against_model(
    engine: Engine, model: str, sequences: Sequence[Sequence[int]], prompts: Sequence[int]
) -> list[Check]:
    """Prefill against the eager model and decode against the reference caches, both run by `export.oracle`.

    sequences: token ids, all with the same number of tokens after their prompt. Raises UserError when `model` is not
    the engine's model.
    """
    artefact = engine.artefact
    sequences, prompts = sequences[: engine.sequences], prompts[: engine.sequences]
    part, most = _largest_part(engine, prompts)
    # Only the first part of a prompt attends to nothing but exact keys and values.
    picks = [np.linspace(0, n - 1, min(n, most)).astype(np.int64) for n in np.minimum(prompts, part)]
    with engine.session(batch=len(sequences)) as session:
        width = max(len(p) for p in picks)
        padded = np.stack([np.pad(p, (0, width - len(p)), mode="edge") for p in picks])
        prefill = _prefill(session, [s[:n] for s, n in zip(sequences, prompts, strict=True)], part, padded)
        rest = [s[n:] for s, n in zip(sequences, prompts, strict=True)]
        decode, selected = decode_steps(session, list(zip(*rest, strict=True)))
        rows = stored_rows(session) | selected
    alone = []
    for tokens, prompt in zip(sequences, prompts, strict=True):
        with engine.session() as session:
            _prefill(session, [tokens[:prompt]], part)
            alone.append(np.stack([session.decode([token])[0] for token in tokens[prompt:]]))
    request = {
        "model": model,
        "sha256": artefact.config["model"]["sha256"],
        "codec": str(artefact.path) if rows else None,
        "tie": TIE,
        "sequences": [[int(t) for t in s] for s in sequences],
        "prompts": [int(n) for n in prompts],
        "part": part,
        "picks": [p.tolist() for p in picks],
        "max_length": artefact.max_length,
        "state_dtype": DTYPES[artefact.config["kv_dtype"]],
    }
    expected = ask_oracle(request, rows)
    exact = [expected[f"{i}.prefill"] for i in range(len(sequences))]
    cached = [expected[f"{i}.decode"] for i in range(len(sequences))]
    got = [prefill[i, : len(p)] for i, p in enumerate(picks)]
    checks = closeness(
        "prefill against the eager model",
        got,
        exact,
        artefact.config["dtype"],
        LOGITS_PREFILL * _scale(exact),
    )
    rounding = coarsest(artefact.config)
    checks += closeness("decode against the reference", list(decode), cached, rounding, LOGITS_DECODE)
    checks += closeness("batch of 2 against each alone", list(decode), alone, rounding, LOGITS_DECODE)
    for what in ("codes", "selections"):
        counts = expected.get(what, np.zeros((1, 3))).sum(0)
        checks += _agreement(what, counts, rounding) if counts[0] else []
    return checks


def _largest_part(engine: Engine, prompts: Sequence[int]) -> tuple[int, int]:
    """Tokens of a prompt that every step of a verification takes at once, and of how many it gives the logits."""
    part, picks = max(prompts), PICKS
    for batch in (1, len(prompts)):
        with engine.session(batch, capacity=min(part + STEPS, engine.artefact.max_length)) as session:
            if session.most is not None:
                part, picks = min(part, session.most[0]), min(picks, session.most[1])
    while part > 2 and any(n > part and n % part == 1 for n in prompts):
        part -= 1  # a last token alone would be a decode step, which may read a selection only
    return part, min(part, picks)


def _prefill(
    session: Session, prompts: Sequence[Sequence[int]], part: int, picks: np.ndarray | None = None
) -> np.ndarray:
    """Feed prompts in steps of `part` tokens; returns the logits at `picks` (default: the last) of the first step."""
    first = session.step([prompt[:part] for prompt in prompts], "last" if picks is None else picks)
    for start in range(part, max(map(len, prompts)), part):
        session.step([prompt[start : start + part] for prompt in prompts])
    return first


def _scale(logits: Sequence[np.ndarray]) -> float:
    return max(1.0, max(float(np.abs(x).max()) for x in logits) / LOGIT_SCALE)


def stored_rows(session: Session) -> dict[str, np.ndarray]:
    """The encoded rows a session holds, as its state has them: "<sequence>.<layer>.<state>" -> used rows.

    Those in bfloat16 come as float32.
    """
    artefact = session.engine.artefact
    found = {}
    for spec in artefact.states:
        if spec.row_symbol not in (None, "rows"):
            layer, name = spec.name.removeprefix("layer").split(".")
            array = session.state(spec.name)
            if spec.dtype == "bfloat16":  # numpy has its bits only
                array = (array.astype(np.uint32) << 16).view(np.float32)
            for number, length in enumerate(session.lengths):
                rows = row_count(spec.row_symbol, int(length), artefact.geometry)
                used = (number, *(slice(None),) * (spec.row_axis - 1), slice(0, rows))
                found[f"{number}.{layer}.{name}"] = array[used].copy()
    return found


def decode_steps(session: Session, steps: Sequence[Sequence[int]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Decode one token per sequence and step: logits [B, T, V], and which compressed rows the observing layers chose.

    "<sequence>.selected.<layer>" -> int32 [T, M], filled up with -1.
    """
    geometry = session.engine.artefact.geometry
    session.watch_selected = True
    logits: list[np.ndarray] = []
    sets: dict[str, list[np.ndarray]] = {}
    for tokens in steps:
        counts = geometry.selected(session.lengths) if geometry else ()
        logits.append(session.decode(tokens))
        for layer, rows in session.selected.items():
            for number, count in enumerate(counts):
                sets.setdefault(f"{number}.selected.{layer}", []).append(rows[number, :count])
    selected = {}
    for name, rows in sets.items():
        width = max(len(row) for row in rows)
        selected[name] = np.stack([np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows])
    return np.stack(logits, axis=1), selected


def ask_oracle(request: dict[str, object], rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the torch side in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("request.json", "rows.safetensors", "result.safetensors")]
        save_file(rows or {"none": np.zeros(1, np.int16)}, paths[1])
        paths[0].write_text(json.dumps({**request, "engine": str(paths[1])}), encoding="utf-8")
        command = [sys.executable, "-m", "export.oracle", str(paths[0]), str(paths[2])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if done.returncode:
            raise RuntimeError(f"the reference process failed:\n{done.stderr}")
        return load_file(paths[2])


def _agreement(what: str, counts: np.ndarray, rounding: str) -> list[Check]:
    """counts: codes or selections in all, different, flipped ties. They must equal the reference's but for ties.

    With a rounding to 16 bits what they are made from may differ by a rounding: then few may differ at all.
    """
    total, wrong, flips = (int(count) for count in counts)
    detail = f"{flips} flipped ties and {wrong} other differences in {total:,} {what}"
    if rounding != "fp32":
        return [Check.at_most(f"share of {what} that differ and are no ties", wrong / total, CODES[rounding], detail)]
    return [Check.at_most(f"{what} that differ and are no ties", wrong, 0, detail)]


def make_canary(engine: Engine, sequences: Sequence[Sequence[int]], prompts: Sequence[int], folder: Path) -> None:
    """Store the engine's own logits on a few tokens, so that a later host can tell whether it computes the same."""
    length = min(prompts) + canary.CANARY_STEPS
    canary.record(engine, np.stack([np.asarray(sequence[:length], np.int64) for sequence in sequences]), folder)


def verify(
    path: str | Path, model: str | None, provider: str | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """Check a built engine: hashes, contract, aliases and stored logits; with `model`, the model and references too.

    provider: as for `Engine.open`.

    An engine that could not run where it was built stores no logits: it needs `model`.
    """
    from calib.texts import default_text

    with Engine.open(path, provider=provider) as engine:  # hashes, contract and aliases
        checks = []
        if model is None or canary.CANARY in engine.artefact.config["files"]:
            say("stored logits")
            checks = canary.compare(engine)
        if model is not None:
            say("model and reference caches")
            checks += against_model(engine, model, *verification_tokens(engine, default_text().content))
    return checks
