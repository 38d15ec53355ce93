import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_engine
from families import VOCAB, save_tiny

from calib import codec as codecs
from calib import models
from calib.adapter import layer_specs
from calib.quality import decode
from calib.texts import default_text, read_texts, token_windows
from export.cli import main
from export.eval import evaluate, run
from export.eval.ruler import KINDS
from export.eval.sample import Sample
from export.eval.subjects import Simulation, engine_logits, open_subjects
from export.plans import codec_bytes
from plugins.deltakv.config import DeltaKVConfig
from plugins.vqkv.config import VQKVConfig
from runtime import Engine
from runtime.artefact import Artefact, state_bytes

LENGTH, TASKS = 900, ("ppl", "kld", "multiturn")
CONFIGS = {
    "vqkv": VQKVConfig.from_ratio(0.172, 32),
    "deltakv": DeltaKVConfig(head_dim=32, kv_heads=2, latents="16x8+8x4", full_layers=(0,), select_fraction=0.3),
    "none": None,
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines and codec folders of one tiny model, by method, the model's folder and a text."""
    home = tmp_path_factory.mktemp("shop")
    for name, config in CONFIGS.items():
        _, codec = make_engine(home / name, "llama", config, {"kv_dtype": "fp32"}, num_hidden_layers=2)
        if codec is not None:
            codecs.save(codec, home / f"{name}-codec")
    (home / "text.txt").write_text(default_text().content[:50_000], encoding="utf-8")
    return home


def model_of(shop: Path) -> str:
    return str(shop / "none-model")


def cell(evaluation: dict, label: str, task: str, variant: str = "") -> dict:
    wanted = (label, task, variant)
    return next(c for c in evaluation["cells"] if (c["subject"], c["task"], c["variant"]) == wanted)


@pytest.mark.parametrize("method", ["vqkv", "deltakv"])
def test_the_simulation_and_the_engine_measure_the_same(shop: Path, method: str, tmp_path: Path) -> None:
    paths = [shop / method, shop / f"{method}-codec"]
    given = {"tasks": TASKS, "lengths": (LENGTH,), "samples": 1, "texts": [shop / "text.txt"], "progress": False}
    found = evaluate(paths, model_of(shop), **given, out=tmp_path / "out")
    engine, codec = (subject["label"] for subject in found["subjects"])
    assert (engine, codec) == tuple(
        f"{label} ({path.name})" for label, path in zip([engine.split(" (")[0]] * 2, paths, strict=True)
    )  # noqa: E501
    ours, theirs = (cell(found, label, "ppl") for label in (engine, codec))
    assert math.log(ours["value"]) == pytest.approx(math.log(theirs["value"]), rel=1e-3)
    assert ours["exact"] == pytest.approx(theirs["exact"], rel=1e-3) and abs(ours["change"]) > 1e-4
    assert cell(found, engine, "kld")["value"] == pytest.approx(cell(found, codec, "kld")["value"], rel=1e-2)
    for variant in ("first", "again"):
        ours, theirs = (cell(found, label, "multiturn", variant) for label in (engine, codec))
        assert ours["value"] == theirs["value"]
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], rel=1e-3)
        assert abs(ours["log_likelihood"] - ours["exact_log_likelihood"]) > 1e-3
    facts = found["subjects"]
    assert facts[0]["fixed_bytes"] == facts[1]["fixed_bytes"] > 0
    assert facts[0]["digest"] != facts[1]["digest"] and facts[0]["summary"] == facts[1]["summary"]


@pytest.mark.parametrize("method", ["vqkv", "deltakv"])
def test_a_later_turns_chunk_reads_what_the_first_one_left_compressed(shop: Path, method: str) -> None:
    loaded = models.load(model_of(shop), progress=False)
    engine, codec = open_subjects([shop / method, shop / f"{method}-codec"])
    ids = np.random.default_rng(0).integers(3, VOCAB, 600).tolist()
    sample = Sample(ids, (*(1,) * 9, 120, *(1,) * 40))
    simulation = Simulation(loaded)
    start = simulation.exact(sample)
    theirs = simulation.coded(sample, start, codec)
    with Engine.open(engine.path) as opened:
        exact, ours = engine_logits(opened, sample)
    torch.testing.assert_close(exact, start.logits[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=1e-3)
    singly = decode(loaded.model, start, codec.codec)[0]
    assert (singly - theirs).abs().max() > 0.02  # it matters that the chunk is one step


def test_the_uncompressed_engine_has_the_perplexity_of_the_model(shop: Path, tmp_path: Path) -> None:
    given = {"tasks": ("ppl",), "lengths": (LENGTH,), "samples": 2, "texts": [shop / "text.txt"], "progress": False}
    found = cell(evaluate([shop / "none"], **given, out=tmp_path / "out"), "none", "ppl")
    loaded = models.load(model_of(shop), progress=False)
    losses = []
    for ids in token_windows(loaded.tokenizer, read_texts([shop / "text.txt"]), LENGTH, 2):
        window = torch.tensor([ids])
        logits = loaded.model(input_ids=window).logits[0, -(LENGTH // 4) : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, -(LENGTH // 4) + 1 :]).item())
    assert found["exact"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
    assert found["value"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
    assert found["samples"] == 2 and abs(found["change"]) < 1e-3


def test_an_interrupted_run_goes_on_and_gives_what_one_run_gives(shop: Path, tmp_path: Path, monkeypatch) -> None:
    given = {"model": model_of(shop), "tasks": ("ppl", "kld", "niah"), "lengths": (500,), "samples": 2}
    given |= {"texts": [shop / "text.txt"], "progress": False}
    paths = [shop / "vqkv-codec", shop / "deltakv"]
    whole = evaluate(paths, **given, out=tmp_path / "whole")
    calls, real = [], run.measure

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(run, "measure", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(paths, **given, out=tmp_path / "parts")
    with open(tmp_path / "parts" / run.RESULTS, "a", encoding="utf-8") as file:
        file.write('{"key": "torn')
    parts = evaluate(paths, **given, out=tmp_path / "parts")
    assert parts["cells"] == whole["cells"]
    assert len(calls) == 3 + 2 * 4 - 2  # the two that were finished are not made again
    monkeypatch.setattr(run, "measure", None)
    assert evaluate(paths, **given, out=tmp_path / "parts")["cells"] == whole["cells"]
    some = evaluate(paths[:1], **(given | {"tasks": ("kld",)}), out=tmp_path / "parts")["cells"]
    assert some == [c for c in whole["cells"] if c["task"] == "kld" and c["subject"] == some[0]["subject"]]


def test_other_samples_and_other_subjects_do_not_mix_with_what_is_there(shop: Path, tmp_path: Path) -> None:
    given = {"model": model_of(shop), "tasks": ("niah",), "lengths": (LENGTH,), "samples": 1, "progress": False}
    given |= {"texts": [shop / "text.txt"], "out": tmp_path / "out"}
    count = lambda: len((tmp_path / "out" / run.RESULTS).read_text(encoding="utf-8").splitlines())  # noqa: E731
    evaluate([shop / "vqkv-codec"], **given)
    assert count() == 1
    evaluate([shop / "vqkv-codec"], **(given | {"seed": 1}))
    assert count() == 2
    codec = codecs.load(shop / "vqkv-codec")
    next(iter(codec.layers.values())).k.mean.add_(0.5)
    codecs.save(codec, tmp_path / "vqkv-codec")
    evaluate([tmp_path / "vqkv-codec"], **given)
    assert count() == 3
    evaluate([shop / "vqkv-codec"], **given)
    assert count() == 3


@pytest.mark.parametrize("method", ["vqkv", "deltakv"])
def test_a_codecs_bytes_are_those_of_its_engine(shop: Path, method: str) -> None:
    artefact, codec = Artefact.open(shop / method), codecs.load(shop / f"{method}-codec")
    specs = layer_specs(models.load(model_of(shop), progress=False).model)
    fixed, held = codec_bytes(codec, specs, "fp32", artefact.max_length, (200, 900, 4096, 9000))
    assert held == {tokens: state_bytes(artefact, tokens) for tokens in held}
    assert fixed == artefact.config["fixed_bytes"]
    assert codec_bytes(codec, specs, "fp16", artefact.max_length, (900,))[1][900] < held[900]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_bad_input_is_refused_in_one_sentence(shop: Path, tmp_path: Path, capsys) -> None:
    def refused(path: Path, *more: object) -> str:
        return refusal(capsys, "eval", "--engine", path, "--text", shop / "text.txt", "--out", tmp_path / "out", *more)

    codec, engine, model = shop / "vqkv-codec", shop / "vqkv", ("--model", model_of(shop))
    assert "task 'haiku' is unknown" in refused(engine, "--tasks", "ppl,haiku")
    assert "no task is named" in refused(engine, "--tasks", ",")
    assert "--lengths 5000 must be from 64 to the limit of 4096" in refused(engine, "--lengths", "900,5000")
    assert "--samples 0 must be at least 1" in refused(engine, "--samples", 0)
    assert "--seed -1 must be 0 or more" in refused(engine, "--seed", -1)
    assert "name that with --model" in refused(codec)
    assert "is neither an engine folder nor a codec folder" in refused(tmp_path)
    assert "given twice" in refused(engine, "--against", engine)
    assert "--threads 0 must be at least 1" in refused(engine, "--threads", 0)
    assert "a context of 200 tokens is too short" in refused(engine, "--lengths", 200, "--tasks", "niah")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    short = refusal(capsys, "eval", "--engine", engine, "--text", tmp_path / "short.txt", "--out", tmp_path / "out")
    assert "--text short.txt has" in short
    save_tiny(tmp_path / "other", "llama", seed=1, num_hidden_layers=2)
    assert "has hash" in refused(codec, "--model", tmp_path / "other")
    other = codecs.load(codec)
    other.info.model["sha256"] = 64 * "0"
    codecs.save(other, tmp_path / "else")
    assert "evaluate one model at a time" in refused(engine, "--against", tmp_path / "else")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear", encoding="utf-8")
    other = refusal(capsys, "eval", "--engine", codec, *model, "--out", tmp_path / "full")
    assert "holds something other than an evaluation" in other


def test_reports_are_merged_from_evaluations_and_benches(shop: Path, tmp_path: Path, capsys) -> None:
    given = ["--tasks", "ppl,kld", "--lengths", "256", "--samples", "2", "--text", str(shop / "text.txt")]
    for name in ("vqkv", "none"):
        out = ["--out", str(tmp_path / name), "--json"]
        capsys.readouterr()
        assert main(["eval", "--engine", str(shop / name), *given, *out]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["evaluations"][0]["command"].startswith(f"python -m export eval --engine {shop / name}")
        assert json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8"))["format"] == 1
        assert "<svg" in (tmp_path / name / "report.html").read_text(encoding="utf-8")
    bench = {"bench": "latency", "machine": {}, "settings": {}, "engines": []}
    (tmp_path / "latency.json").write_text(json.dumps(bench), encoding="utf-8")
    merged = ["report", str(tmp_path / "vqkv"), str(tmp_path / "none"), "--bench", str(tmp_path / "latency.json")]
    assert main([*merged, "--out", str(tmp_path / "both")]) == 0
    both = json.loads((tmp_path / "both" / "report.json").read_text(encoding="utf-8"))
    assert [e["subjects"][0]["method"] for e in both["evaluations"]] == ["vqkv", "none"]
    assert both["benches"] == [bench]
    assert "holds no report.json" in refusal(capsys, "report", tmp_path, "--out", tmp_path / "x")
    assert "there is nothing to report" in refusal(capsys, "report", "--out", tmp_path / "x")
    bad = refusal(capsys, "report", "--bench", tmp_path / "both" / "report.json", "--out", tmp_path / "x")
    assert "is of neither latency nor oom-length" in bad


def test_small_models_get_a_note_about_ruler(shop: Path, tmp_path: Path) -> None:
    given = {"lengths": (1800,), "samples": 1, "texts": [shop / "text.txt"], "progress": False}
    paths, out = [shop / "vqkv-codec"], tmp_path / "out"
    found = evaluate(paths, model_of(shop), tasks=("ruler",), **given, out=out)
    assert found["notes"] == ["RULER asks more than a model of 0 million parameters can do."]
    assert [cell["variant"] for cell in found["cells"]] == list(KINDS)
    assert all(abs(cell["log_likelihood"] - cell["exact_log_likelihood"]) > 1e-4 for cell in found["cells"])
    assert evaluate(paths, model_of(shop), tasks=("kld",), **given, out=out)["notes"] == []
