"""The evaluation itself: every subject over every sample, written down as it goes, so that it can go on later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from calib.fit import bars
from calib.texts import Text, read_texts
from plugins.errors import UserError
from plugins.files import write_whole

from .score import cells, measure
from .subjects import Simulation, Subject, count_bytes, engine_logits, open_subjects
from .tasks import DEFAULT_TASKS, TASKS, Case, cases

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from calib.models import LoadedModel

FORMAT = 1
RESULTS, EVALUATION = "results.jsonl", "evaluation.json"
DEFAULT_LENGTH, DEFAULT_SAMPLES, LEAST_LENGTH = 4096, 8, 64
RULER_LEAST = 300_000_000  # parameters


def evaluate(
    paths: Sequence[str | Path],
    model: str | None = None,
    tasks: Sequence[str] = DEFAULT_TASKS,
    lengths: Sequence[int] = (),
    samples: int = DEFAULT_SAMPLES,
    texts: Sequence[str | Path] = (),
    seed: int = 0,
    out: str | Path = "evaluation",
    provider: str | None = None,
    threads: int | None = None,
    progress: bool = True,
    command: str = "",
) -> dict[str, Any]:
    """Evaluate engine and codec folders made for one model, and return what is written to out/evaluation.json.

    Each sample's context is prefilled exactly; what follows is fed through the cache in one-token steps (but for the
    later turns of multiturn) and scored beside the logits of an exact prefill of the same tokens.

    model: needed for codecs, which are simulated in torch, on the GPU where there is one; as `calib.models.load` takes
    it. tasks: of TASKS. lengths: tokens of a sample (default: 4096, or the limit). samples: windows of each text, and
    questions of each kind. texts: UTF-8 files (default: the topics of Python's help()); haystacks come of the first.
    provider, threads: of the engines. Results go to out/results.jsonl as they are made, and a second call makes only
    those that are not there. Raises UserError.
    """
    _check(tasks, samples, seed, threads)
    subjects = open_subjects(paths)
    contents = read_texts(texts)
    if len({text.name for text in contents}) < len(contents):
        raise UserError("two texts of --text have the same name: rename one")
    out = _folder(Path(out))
    loaded = _model(subjects, model)
    limit, specs = _limit(subjects, loaded), _specs(loaded)
    lengths = _lengths(lengths, limit)
    for subject in subjects:
        if subject.codec is not None:
            subject.codec.check_model(specs, loaded.sha256)
        count_bytes(subject, lengths, specs, limit)
    plan = cases(_tokenizer(loaded, subjects[0]), contents, tasks, lengths, samples, seed)
    out.mkdir(parents=True, exist_ok=True)
    done = _read(out / RESULTS)
    with _appending(out / RESULTS) as file, bars(progress) as bar:
        _run_codecs([s for s in subjects if s.codec is not None], loaded, plan, done, file, bar, threads)
        _run_engines([s for s in subjects if s.codec is None], plan, done, file, bar, provider, threads)
    evaluation = _evaluation(subjects, loaded, contents, tasks, lengths, seed, command)
    for subject in subjects:
        found = [done[_key(subject, case)] for case in plan]
        evaluation["cells"] += cells(plan, found, subject.label, tasks)
    write_whole(out / EVALUATION, json.dumps(evaluation, indent=1) + "\n")
    return evaluation


# -- what is asked for


def _check(tasks: Sequence[str], samples: int, seed: int, threads: int | None) -> None:
    if unknown := [task for task in tasks if task not in TASKS]:
        raise UserError(f"task {unknown[0]!r} is unknown: use {', '.join(TASKS)}")
    if not tasks:
        raise UserError(f"no task is named: use {', '.join(TASKS)}")
    if samples < 1:
        raise UserError(f"--samples {samples} must be at least 1")
    if seed < 0:
        raise UserError(f"--seed {seed} must be 0 or more")
    if threads is not None and threads < 1:
        raise UserError(f"--threads {threads} must be at least 1")


def _folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a folder: name another one")
    if out.is_dir() and any(out.iterdir()) and not (out / RESULTS).is_file():
        raise UserError(f"--out {out} holds something other than an evaluation: name another folder")
    return out


def _model(subjects: Sequence[Subject], model: str | None) -> LoadedModel | None:
    """The model in torch, where a codec needs it."""
    coded = next((subject for subject in subjects if subject.codec is not None), None)
    if coded is None:
        return None
    if model is None:
        raise UserError(f"{coded.path} is a codec, which is measured on its model: name that with --model")
    from calib import models

    loaded = models.load(model)
    if coded.model["sha256"] and loaded.sha256 != coded.model["sha256"]:
        raise UserError(
            f"--model {model} has hash {loaded.sha256[:12]} and {coded.path} was fitted for {coded.model['name']} "
            f"({coded.model['sha256'][:12]}): give that one"
        )
    return loaded


def _specs(loaded: LoadedModel | None) -> Sequence[Any]:
    from calib.adapter import layer_specs

    return layer_specs(loaded.model) if loaded else ()


def _limit(subjects: Sequence[Subject], loaded: LoadedModel | None) -> int:
    limits = [subject.limit for subject in subjects if subject.limit is not None]
    return min([*limits, int(loaded.model.config.max_position_embeddings)] if loaded else limits)


def _lengths(lengths: Sequence[int], limit: int) -> list[int]:
    for length in lengths:
        if not LEAST_LENGTH <= length <= limit:
            raise UserError(f"--lengths {length} must be from {LEAST_LENGTH} to the limit of {limit} tokens")
    return sorted(set(lengths)) or [min(DEFAULT_LENGTH, limit)]


def _tokenizer(loaded: LoadedModel | None, subject: Subject) -> PreTrainedTokenizerBase:
    if loaded is not None:
        return loaded.tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(subject.path, local_files_only=True)


# -- results on disk


def _key(subject: Subject, case: Case) -> str:
    """Equal for equal subjects and samples, whatever they are called."""
    return hashlib.sha256(f"{FORMAT} {subject.digest} {case.sample.digest}".encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by their key; a line that was not finished is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            found[entry["key"]] = entry["result"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


@contextmanager
def _appending(path: Path) -> Iterator[TextIO]:
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with open(path, "a", encoding="utf-8") as file:
        if torn:
            file.write("\n")
        yield file


def _write(file: TextIO, done: dict[str, Any], subject: Subject, case: Case, result: Mapping[str, Any]) -> None:
    key = _key(subject, case)
    done[key] = result
    line = {
        "key": key,
        "subject": subject.label,
        "task": case.task,
        "variant": case.variant,
        "text": case.text,
        "length": case.length,
        "index": case.index,
        "result": result,
    }
    file.write(json.dumps(line) + "\n")
    file.flush()


# -- running


def _run_codecs(
    subjects: Sequence[Subject],
    loaded: LoadedModel | None,
    plan: Sequence[Case],
    done: dict[str, Any],
    file: TextIO,
    bar: Any,
    threads: int | None,
) -> None:
    """Samples outside, codecs inside, so that an exact prefill serves them all."""
    missing = {id(case): [s for s in subjects if _key(s, case) not in done] for case in plan}
    if not any(missing.values()) or loaded is None:
        return
    simulation = Simulation(loaded, threads)
    for label, members in _by_task(plan):
        step = bar(label, len(members), sum(not missing[id(case)] for case in members))
        for case in members:
            if not missing[id(case)]:
                continue
            start = simulation.exact(case.sample)
            for subject in missing[id(case)]:
                logits = simulation.coded(case.sample, start, subject)
                _write(file, done, subject, case, measure(case.sample, start.logits[0], logits))
            step()


def _run_engines(
    subjects: Sequence[Subject],
    plan: Sequence[Case],
    done: dict[str, Any],
    file: TextIO,
    bar: Any,
    provider: str | None,
    threads: int | None,
) -> None:
    """Engines outside: one is open at a time."""
    from runtime import Engine

    for subject in subjects:
        missing = [case for case in plan if _key(subject, case) not in done]
        if not missing:
            continue
        step = bar(subject.label, len(plan), len(plan) - len(missing))
        with Engine.open(subject.path, provider=provider, threads=threads, verify=False) as engine:
            for case in missing:
                _write(file, done, subject, case, measure(case.sample, *engine_logits(engine, case.sample)))
                step()


def _by_task(plan: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    groups: dict[str, list[Case]] = {}
    for case in plan:
        groups.setdefault(f"{case.task} {case.variant} {case.length}".replace("  ", " "), []).append(case)
    return list(groups.items())


def _evaluation(
    subjects: Sequence[Subject],
    loaded: LoadedModel | None,
    texts: Sequence[Text],
    tasks: Sequence[str],
    lengths: Sequence[int],
    seed: int,
    command: str,
) -> dict[str, Any]:
    from runtime.machine import describe

    size = _parameters(subjects[0], loaded)
    notes = []
    if "ruler" in tasks and size < RULER_LEAST:
        notes.append(f"RULER asks more than a model of {size / 1e6:.0f} million parameters can do.")
    return {
        "format": FORMAT,
        "model": subjects[0].model,
        "command": command,
        "machine": describe(),
        "seed": seed,
        "texts": [text.to_json() for text in texts],
        "lengths": list(lengths),
        "tasks": [task for task in TASKS if task in tasks],
        "notes": notes,
        "subjects": [subject.facts for subject in subjects],
        "cells": [],
    }


def _parameters(subject: Subject, loaded: LoadedModel | None) -> int:
    """Of the model; for an engine, which does not say, what its weights have room for."""
    if loaded is not None:
        return sum(parameter.numel() for parameter in loaded.model.parameters())
    from runtime.artefact import Artefact

    config = Artefact.open(subject.path, verify=False).config
    size = sum(entry["bytes"] for name, entry in config["files"].items() if name.startswith("model.onnx"))
    return size // {"fp32": 4, "fp16": 2, "bf16": 2}[config["dtype"]]
