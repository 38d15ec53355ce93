"""The self-check: an engine that computes something else than when it was built says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_artefact as tiny
from engines import make_engine
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from plugins.errors import UserError
from plugins.vqkv.config import VQKVConfig
from runtime import Engine, SelfCheckFailed, canary
from runtime.artefact import write_config
from runtime.canary import CANARY, CANARY_STEPS
from runtime.cli import main

PROMPT = 260  # beyond sinks, window and several blocks


def sign(folder: Path, **changes: object) -> None:
    """Hash the files anew, as whoever altered them on purpose would."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("files", "digest")}
    write_config(folder, {**config, **changes})


def add_canary(folder: Path, length: int = PROMPT + CANARY_STEPS) -> Path:
    with Engine.open(folder, threads=1) as engine:
        vocab = engine.artefact.vocab_size
        canary.record(engine, np.random.default_rng(0).integers(vocab - 2, size=(2, length)), folder)
    sign(folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed engine of a tiny model, its cache in float32."""
    folder = tmp_path_factory.mktemp("canary") / "engine"
    make_engine(folder, "llama", VQKVConfig.from_ratio(0.25, 32), num_hidden_layers=2)
    return add_canary(folder)


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "engine")


def test_an_intact_engine_passes_and_returns_what_it_measured(built: Path) -> None:
    with Engine.open(built, threads=1) as engine:
        (check,) = engine.self_check()
    assert check.ok and check.value <= 1e-4 and check.limit == canary.LOGITS_DECODE
    assert "max |difference of logits|" in check.name


def test_a_cache_in_fp16_is_held_to_divergence_and_agreement(tmp_path: Path) -> None:
    folder = add_canary(tiny.make(tmp_path / "engine", geometry=tiny.SMALL))
    with Engine.open(folder, threads=1) as engine:
        divergence, top1 = engine.self_check()
    assert divergence.value == 0 and divergence.limit == canary.FP16_KL
    assert top1.value == 0 and top1.limit == pytest.approx(1 - canary.FP16_TOP1)


def _scale_tables(name: str) -> Callable[[onnx.ModelProto], int]:
    def change(model: onnx.ModelProto) -> int:
        found = [tensor for tensor in model.graph.initializer if name in tensor.name and tensor.data_type == 1]
        for tensor in found:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.05), tensor.name))
        return len(found)

    return change


def _forget_the_sinks(model: onnx.ModelProto) -> int:
    """Exchange the encoded rows' source: an engine that stores the wrong tokens."""
    found = [node for node in model.graph.node if node.domain == "kvpack" and "enc_src" in node.input]
    for node in found:
        node.input[list(node.input).index("enc_src")] = "enc_dst"
    return len(found)


@pytest.mark.parametrize(
    "change", [_scale_tables("layernorm"), _scale_tables("book"), _forget_the_sinks], ids=["weights", "codec", "graph"]
)
def test_an_engine_that_was_altered_and_hashed_anew_fails(change: Callable, copied: Path) -> None:
    model = onnx.load(copied / "model.onnx")
    assert change(model) > 0
    (copied / "model.onnx.data").unlink()
    onnx.save(model, copied / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    sign(copied)
    with Engine.open(copied, threads=1) as engine:
        with pytest.raises(SelfCheckFailed, match=r"is \d.*, above 0.002") as caught:
            engine.self_check()
        assert str(copied) in str(caught.value) and "\n" not in str(caught.value)


def test_logits_that_are_no_numbers_fail(copied: Path) -> None:
    stored = load_file(copied / CANARY)
    stored["logits"][0, 0, 0] = np.nan
    save_file(stored, copied / CANARY)
    sign(copied)
    with Engine.open(copied, threads=1) as engine, pytest.raises(SelfCheckFailed, match="is nan"):
        engine.self_check()


@pytest.mark.parametrize("damage", ["missing", "garbage", "other", "short"])
def test_a_canary_that_cannot_be_replayed_is_one_sentence(damage: str, copied: Path) -> None:
    stored = load_file(copied / CANARY)
    if damage == "missing":
        (copied / CANARY).unlink()
    elif damage == "garbage":
        (copied / CANARY).write_bytes(b"no tensors")
    elif damage == "other":
        save_file({"tokens": stored["tokens"]}, copied / CANARY)
    else:
        save_file({**stored, "tokens": stored["tokens"][:, :CANARY_STEPS].copy()}, copied / CANARY)
    sign(copied)
    with Engine.open(copied, threads=1) as engine, pytest.raises(UserError, match=CANARY) as caught:
        engine.self_check()
    assert not isinstance(caught.value, SelfCheckFailed) and "rebuild" in str(caught.value)


def test_the_command_line_checks_before_it_generates(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "sessions", "--engine", str(copied), "--count", "1", "--threads", "1", "--self-check"]
    assert main(command) == 0
    capsys.readouterr()
    stored = load_file(copied / CANARY)
    save_file({**stored, "logits": -stored["logits"]}, copied / CANARY)
    sign(copied)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "failed its self-check on cpu" in captured.err
    latency = ["bench", "latency", "--engine", str(copied), "--input-len", "8", "--past", "8", "--self-check"]
    assert main(latency) == 2
    assert "failed its self-check on cpu" in capsys.readouterr().err
