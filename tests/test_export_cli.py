"""`python -m export` as its user meets it: a build from a folder, its report, inspection, verification, bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engines import random_codec
from families import save_tiny
from safetensors.numpy import load_file, save_file

from calib import codec as codecs
from calib import models
from export import build, verify
from export.cli import main
from plugins.contract import bytes_at
from plugins.deltakv.config import DeltaKVConfig
from plugins.vqkv.config import VQKVConfig
from runtime import Engine
from runtime.artefact import Artefact, fp16_bytes, state_bytes, write_config
from runtime.canary import CANARY
from runtime.cli import main as runtime_main

SMALL = ["--method", "vqkv", "--set", "k_entries=16", "--set", "v_entries=16", "--context", "256"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory):
    """A tiny model's folder, a text, and a cache of its own."""
    home = tmp_path_factory.mktemp("workshop")
    save_tiny(home / "model", "llama", num_hidden_layers=2)
    save_tiny(home / "other", "llama", seed=1, num_hidden_layers=2)
    words = np.random.default_rng(0).integers(0, 400, 9000)
    (home / "text.txt").write_text(" ".join(f"word{word}" for word in words), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPACK_CACHE", str(home / "cache"))
        yield home


@pytest.fixture(scope="module")
def built(workshop: Path) -> Path:
    """An engine built as a user would, codec fitted on the way."""
    out = workshop / "engine"
    arguments = ["build", "--model", str(workshop / "model"), "--text", str(workshop / "text.txt"), "--ratio", "0.125"]
    assert main([*arguments, *SMALL, "--out", str(out)]) == 0
    return out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must end with exit code 2 and one sentence; returns the sentence."""
    capsys.readouterr()
    command = runtime_main if arguments[0] == "generate" else main
    assert command([str(a) for a in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


def test_a_build_writes_a_verified_engine_with_a_report(built: Path) -> None:
    report = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert all(check["ok"] for check in report["checks"]) and len(report["checks"]) >= 5
    assert report["method"]["ratio"] == pytest.approx(0.0625)  # 16 entries: half of the bits that the ratio allows
    assert 0 < report["quality"]["top1"] <= 1 and report["codec"]["errors"].keys() == {"0", "1"}
    with Engine.open(built) as engine:
        assert len(engine.generate(["hello"], None)[0].tokens) > 0


def test_inspect_prints_bytes_that_the_runtime_holds(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(built), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    row = next(r for r in described["memory"] if r["tokens"] == 4096)
    with Engine.open(built) as engine, engine.session() as session:
        session.prefill([5] * 4096)
        assert row["bytes"] == session.nbytes
    config, per_head = VQKVConfig.from_json(described["method"]["config"]), 2 * 2  # layers x KV heads
    by_hand = per_head * (
        (4096 - 4 - 128) // 32 * 32 * (config.lookups("k") + config.lookups("v"))  # one byte a code
        + config.lookups("k") + config.lookups("v")  # the trash row
        + 2 * (4 + 128 + 32) * 32 * 2  # exact rows in fp16
    )  # fmt: skip
    assert row["bytes"] == by_hand
    assert row["ratio"] == pytest.approx(by_hand / (4096 * per_head * 2 * 32 * 2))
    assert described["aliases"]["layer0.codes_k"] == "layer0.codes_k_out"
    even = described["break_even"]
    artefact = Artefact.open(built)
    assert bytes_at(artefact.states, even, artefact.geometry) + described["fixed_bytes"] <= fp16_bytes(artefact, even)
    assert state_bytes(artefact, even - 64) + described["fixed_bytes"] > fp16_bytes(artefact, even - 64)
    assert main(["inspect", str(built)]) == 0
    assert "Break-even" in capsys.readouterr().out


@pytest.fixture(scope="module")
def residual(workshop: Path) -> Path:
    """The same with DeltaKV, whose decode steps read a part of the tokens."""
    out = workshop / "engine-deltakv"
    arguments = ["build", "--model", str(workshop / "model"), "--text", str(workshop / "text.txt"), "--ratio", "0.7"]
    arguments += ["--method", "deltakv", "--fit", "fast", "--select-fraction", "0.3", "--context", "256"]
    assert main([*arguments, "--out", str(out)]) == 0
    return out


def test_a_deltakv_build_tells_what_it_chose_and_what_it_checked(residual: Path) -> None:
    report = json.loads((residual / "report.json").read_text(encoding="utf-8"))
    assert all(check["ok"] for check in report["checks"])
    assert {"codes", "selections"} <= {name for check in report["checks"] for name in check["name"].split()}
    config, choice = report["method"]["config"], report["codec"]["choice"]
    assert config["full_layers"] == choice["full_layers"] == [0] and config["select_fraction"] == 0.3
    assert choice["layers"].keys() == {"1"} and choice["layers"]["1"]["observer"] == 0
    assert 0 < choice["layers"]["1"]["coverage"] <= 1
    with Engine.open(residual) as engine:
        assert len(engine.generate(["hello"], None)[0].tokens) > 0


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_inspect_prints_deltakvs_bytes_as_the_runtime_holds_them(
    residual: Path, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", str(residual), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    config = DeltaKVConfig.from_json(described["method"]["config"])
    rows = (tokens - config.sinks - config.window) // config.block * config.block
    by_hand = tokens * config.width * 2 + config.width * 2  # the full layer and its trash row, fp16
    by_hand += (rows + 1) * (config.latent_bits // 8 + 2 * config.scales + 2 * config.neighbors)
    by_hand += (-(-rows // config.stride) + 1) * config.width * 2
    by_hand += (config.sinks + config.window + config.block) * config.width * 2
    with Engine.open(residual) as engine, engine.session() as session:
        session.prefill([5] * tokens)
        held = sum(session.state(spec.name).nbytes for spec in engine.artefact.states)
        assert held == session.nbytes == by_hand == state_bytes(engine.artefact, tokens)
    shown = {row["tokens"]: row["bytes"] for row in described["memory"]}
    assert shown.get(tokens, by_hand) == by_hand and 4096 in shown


def test_verify_repeats_the_checks(built: Path, workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["verify", str(built), "--model", str(workshop / "model"), "--json"]) == 0
    names = [check["name"] for check in json.loads(capsys.readouterr().out)]
    assert any("eager" in n for n in names) and any("codes" in n for n in names) and any("stored" in n for n in names)
    assert "not the model the engine was built from" in refusal(capsys, "verify", built, "--model", workshop / "other")


def test_verify_notices_weights_that_changed_under_a_consistent_hash(built: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(built, tmp_path / "engine")
    data = bytearray((bad / "model.onnx.data").read_bytes())
    weights = np.frombuffer(data, np.float32)
    weights[: len(weights) // 2] *= 1.05
    (bad / "model.onnx.data").write_bytes(data)
    config = json.loads((bad / "config.json").read_text(encoding="utf-8"))
    write_config(bad, {key: value for key, value in config.items() if key not in ("files", "digest")})
    assert main(["verify", str(bad)]) == 1


@pytest.mark.parametrize("damage", ["corrupt", "truncate", "swap", "edit", "remove", "stray", "link"])
def test_a_damaged_engine_is_refused_in_one_sentence(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    bad = shutil.copytree(built, tmp_path / "engine")
    target = bad / "model.onnx.data"
    if damage == "corrupt":
        data = bytearray(target.read_bytes())
        data[len(data) // 2] ^= 1
        target.write_bytes(data)
    elif damage == "truncate":
        target.write_bytes(target.read_bytes()[:-1])
    elif damage == "swap":
        (bad / "codec.json").rename(bad / "kept")
        (bad / "tokenizer.json").rename(bad / "codec.json")
        (bad / "kept").rename(bad / "tokenizer.json")
        target = bad / "codec.json"
    elif damage == "edit":
        target = bad / "config.json"
        target.write_text(target.read_text(encoding="utf-8").replace("4096", "8192"), encoding="utf-8")
    elif damage == "remove":
        target.unlink()
    elif damage == "stray":
        target = bad / "extra.so"
        target.write_bytes(b"")
    else:
        target.unlink()
        target.symlink_to(built / "model.onnx.data")
    for command in (["inspect", bad], ["verify", bad], ["generate", "--engine", bad, "--prompt", "x"]):
        assert target.name in refusal(capsys, *command)


def test_bad_input_gives_one_sentence_and_leaves_nothing_behind(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "out" / "engine", ["--model", workshop / "model"]
    short = tmp_path / "short.txt"
    short.write_text("too short", encoding="utf-8")
    cases = {
        "0.9": ["--method", "vqkv", "--ratio", "0.9"],
        "0.001": ["--ratio", "0.001"],
        "1.2": ["--ratio", "1.2"],
        "--ratio has no meaning": ["--method", "none", "--ratio", "0.2"],
        "--effort has no meaning": ["--method", "none", "--effort", "full"],
        "zstd": ["--method", "zstd"],
        "tensorrt": ["--backend", "tensorrt"],
        "k_colour": ["--set", "k_colour=3"],
        "k_entries=1024": ["--method", "vqkv", "--set", "k_entries=1024"],
        "latents=24x5": ["--set", "latents=24x5"],
        "two ways": ["--set", "select_count=9", "--select-fraction", "0.5"],
        "select_fraction=2": ["--select-fraction", "2"],
        "no meaning with --method vqkv": ["--method", "vqkv", "--select-count", "64"],
        "leave --fit out": ["--method", "vqkv", "--fit", "quality"],
        "short": ["--text", short],
        "nowhere.txt": ["--text", tmp_path / "nowhere.txt"],
        "100000": ["--max-length", "100000"],
        "no-codec": ["--codec", tmp_path / "no-codec"],
        "leave one out": ["--codec", tmp_path / "no-codec", "--ratio", "0.2"],
    }
    for expected, arguments in cases.items():
        assert expected in refusal(capsys, "build", *model, *arguments, "--out", out)
        assert not list(tmp_path.glob("out/*")) and not list(tmp_path.glob("out/.*"))
    assert "exists" in refusal(capsys, "build", *model, "--out", workshop / "model")
    with pytest.raises(SystemExit) as unknown:
        main(["build", "--out", str(out), "--turbo"])
    assert unknown.value.code == 2


def test_a_build_under_torchrun_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in refusal(capsys, "build", "--out", tmp_path / "engine")


def test_a_codec_of_another_model_is_refused(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = models.load(str(workshop / "other"), progress=False)
    codecs.save(random_codec(loaded.model, VQKVConfig.from_ratio(0.172, 32), loaded.sha256), tmp_path / "codec")
    said = refusal(
        capsys, "build", "--model", workshop / "model", "--codec", tmp_path / "codec", "--out", tmp_path / "engine"
    )
    assert "fitted for" in said


def test_builds_at_once_fit_a_codec_one_after_the_other(tmp_path: Path) -> None:
    inside, seen = [], []

    def fit(number: int) -> None:
        with build._alone(tmp_path / "codecs" / "key"):
            inside.append(number)
            time.sleep(0.1)
            seen.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fit, range(3)))
    assert seen == [1, 1, 1]


def test_a_failed_check_fails_the_build_and_leaves_no_engine(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "LOGITS_PREFILL", 0.0)
    said = refusal(
        capsys, "build", "--model", workshop / "model", "--method", "none", "--out", tmp_path / "x" / "engine"
    )
    assert "prefill against the eager model" in said and not list((tmp_path / "x").iterdir())


def test_a_prompt_longer_than_the_limit_is_refused(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "4096" in refusal(capsys, "generate", "--engine", built, "--prompt", "word " * 5000)


def test_a_canary_that_was_tampered_with_is_found(built: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(built, tmp_path / "engine")
    stored = load_file(bad / CANARY)
    save_file({**stored, "logits": stored["logits"] + np.linspace(0, 3, stored["logits"].shape[-1], dtype=np.float32)},
              bad / CANARY)  # fmt: skip
    config = json.loads((bad / "config.json").read_text(encoding="utf-8"))
    write_config(bad, {key: value for key, value in config.items() if key not in ("files", "digest")})
    assert main(["verify", str(bad)]) == 1


@pytest.mark.parametrize("package", ["export", "calib", "runtime"])
def test_help_imports_nothing_heavy(package: str) -> None:
    script = (
        f"import sys; from {package}.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_rotary_angles_that_depend_on_the_length_are_frozen_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 1024,
    }
    save_tiny(tmp_path / "model", "phi3", num_hidden_layers=2, rope_parameters=rope)
    arguments = ["build", "--model", str(tmp_path / "model"), "--method", "none", "--out", str(tmp_path / "engine")]
    assert main(arguments) == 0
    assert "longrope are frozen as they are at 4,096 tokens" in " ".join(capsys.readouterr().out.split())
