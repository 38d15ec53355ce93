import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import save_tiny

from calib import codec as codecs
from calib import deltakv, vqkv
from calib.cli import main
from calib.models import load
from calib.recall import KINDS, samples, score

WORDS = " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40))
SMALL = ["k_entries=16", "v_entries=16", "sinks=2", "window=8", "block=4"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a tiny model and a text; quick fits that are quick here too."""
    save_tiny(tmp_path / "model", "llama", num_hidden_layers=2)
    (tmp_path / "words.txt").write_text(WORDS)
    quick = vqkv.Effort(vectors=20, least=4, share=1.0, queries=16, warm=3, sweeps=2)
    monkeypatch.setitem(vqkv.EFFORTS, "quick", quick)
    monkeypatch.setitem(deltakv.EFFORTS, "quick", deltakv.Effort(tokens=8, least=2, queries=16))
    return tmp_path


def call(place, *arguments: str) -> int:
    command, *rest = arguments
    common = ["--model", str(place / "model"), "--text", str(place / "words.txt")]
    return main([command, *common, *rest])


def fitted(place, *arguments: str) -> int:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    common = ["--method", "vqkv", "--context", "128", "--out", str(place / "codec"), "--effort", "quick"]
    return call(place, "fit", *common, *settings, *arguments)


def fitted_deltakv(place, *arguments: str) -> int:
    settings = ["--set", "window=8", "--set", "block=4", "--set", "neighbors=2"]
    common = ["--method", "deltakv", "--fit", "fast", "--context", "128", "--out", str(place / "codec")]
    return call(place, "fit", *common, "--effort", "quick", *settings, *arguments)


def test_fit_then_quality_report_as_json(place, capsys):
    assert fitted(place, "--ratio", "0.172", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ratio"] == pytest.approx(0.1719 / 2, abs=2e-4)  # 16 entries halve the bits
    assert report["config"]["k_entries"] == 16 and report["texts"][0]["name"] == "words.txt"
    assert sorted(report["errors"]) == ["0", "1"]
    options = ("--codec", str(place / "codec"), "--context", "128", "--windows", "2", "--json")
    assert call(place, "quality", *options) == 0
    quality = json.loads(capsys.readouterr().out)
    row = quality["texts"]["words.txt"]
    assert (quality["context"], quality["decoded"], row["windows"]) == (128, 64, 2)
    assert row["kl"] > 0 and row["interval"][0] <= row["increase"] <= row["interval"][1]


def test_reports_for_people_name_what_was_done(place, capsys):
    assert fitted(place) == 0
    out = capsys.readouterr().out
    assert "ratio 0.0859" in out and "held-out error per stage" in out and str(place / "codec") in out
    assert call(place, "quality", "--codec", str(place / "codec"), "--context", "128", "--windows", "1") == 0
    assert "mean perplexity increase" in capsys.readouterr().out


def test_deltakv_chooses_and_fits_as_json(place, capsys):
    assert fitted_deltakv(place, "--ratio", "0.4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ratio"] <= 0.405 and (report["method"], report["fit"]) == ("deltakv", "fast")
    assert report["config"]["full_layers"] == report["choice"]["full_layers"]
    assert set(report["errors"]) == set(report["choice"]["layers"])
    options = ("--codec", str(place / "codec"), "--context", "128", "--windows", "1", "--json")
    assert call(place, "quality", *options) == 0
    assert json.loads(capsys.readouterr().out)["texts"]["words.txt"]["kl"] > 0


@pytest.mark.parametrize(
    ("arguments", "field", "value", "said"),
    [
        (["--select-fraction", "0.25"], "select_fraction", 0.25, "reads 0.25 of the tokens"),
        (["--select-count", "12"], "select_count", 12, "observer"),
        (["--select", "all"], "select_count", 0, "reads all tokens"),
    ],
)
def test_deltakv_reports_for_people_tell_what_decode_steps_read(place, capsys, arguments, field, value, said):
    assert fitted_deltakv(place, "--ratio", "0.7", *arguments) == 0
    out = capsys.readouterr().out
    assert said in out and "fast fit" in out and "of the best configurations" in out
    assert ("coverage" in out) == (arguments[-1] != "all")
    assert json.loads((place / "codec" / "codec.json").read_text())["config"][field] == value


def test_a_ratio_exceeded_by_set_is_said(place, capsys):
    assert fitted(place, "--ratio", "0.0625", "--set", "k_groups=16", "--set", "k_stages=16+16") == 0
    assert "above --ratio 0.0625" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratio", "0.9"], "--ratio takes 0.0625 to 0.3125"),
        (["--set", "nonsense=1"], "one of the keys k_groups"),
        (["--context", "999999"], "--context 999999 must be from 64 to the model's limit of 4096"),
        (["--seed", "-1"], "--seed -1"),
        (["--text", "missing.txt"], "missing.txt: cannot be read"),
        (["--effort", "full", "--set", "k_entries=256"], "a full fit needs"),
        (["--fit", "quality"], "--fit has no meaning with --method vqkv"),
        (["--fit", "fast"], "--fit has no meaning with --method vqkv"),
        (["--select-count", "5"], "no meaning with --method vqkv"),
        (["--select-fraction", "0.5"], "no meaning with --method vqkv"),
        (["--select", "all"], "no meaning with --method vqkv"),
        (["--method", "other"], "method 'other' is unknown"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(place, capsys, arguments, said):
    assert fitted(place, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1
    assert not (place / "codec").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--select-fraction", "much"], "--set select_fraction=much: cannot be read"),
        (["--select-fraction", "1.5"], "select_fraction=1.5"),
        (["--select-count", "9", "--set", "select_fraction=0.5"], "two ways to set one budget"),
        (["--ratio", "0.0001"], "--ratio takes"),
        (["--set", "full_layers=0,1"], "no layer is left to compress"),
        (["--select-count", "9", "--set", "full_layers="], "no full layer comes before it"),
    ],
)
def test_what_deltakv_cannot_be_is_one_sentence_and_exit_code_2(place, capsys, arguments, said):
    assert fitted_deltakv(place, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("error: ") and said in captured.err.splitlines()[-1]
    assert not (place / "codec").exists()


# -- exact recall, and reading less than the codec was fitted for


def measured(place, capsys, *arguments: str) -> dict:
    capsys.readouterr()
    common = ["--codec", str(place / "codec"), "--context", "1024", "--windows", "1", "--json"]
    assert call(place, "quality", *common, *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_quality_scores_exact_recall_of_every_kind(place, capsys):
    assert fitted_deltakv(place) == 0
    report = measured(place, capsys, "--recall", "2")
    assert set(report["recall"]) == set(KINDS)
    loaded, made = load(str(place / "model"), progress=False), codecs.load(place / "codec")
    asked = samples("pairs", loaded.tokenizer, WORDS, 1024, 2, seed=0)
    row, wanted = report["recall"]["pairs"], score(loaded.model, made, asked)
    assert row.pop("by_depth") == wanted.pop("by_depth")
    assert row == pytest.approx(wanted, rel=1e-5) and row["samples"] == 2
    assert row["log_likelihood"] != row["exact_log_likelihood"]
    common = ["--codec", str(place / "codec"), "--context", "1024", "--windows", "1"]
    assert call(place, "quality", *common, "--recall", "1") == 0
    out = capsys.readouterr().out
    assert "exact recall" in out and all(f"\n{kind} " in out for kind in KINDS)
    assert measured(place, capsys)["recall"] == {}


def test_quality_measures_what_reading_less_costs_without_another_fit(place, capsys):
    assert fitted_deltakv(place, "--ratio", "0.7", "--select-count", "12") == 0
    own = measured(place, capsys)
    found = {
        "all": measured(place, capsys, "--select", "all"),
        "0.02": measured(place, capsys, "--select-fraction", "0.02"),
        "12": measured(place, capsys, "--select-count", "12"),
    }
    budgets = {name: (r["config"]["select_fraction"], r["config"]["select_count"]) for name, r in found.items()}
    assert budgets == {"all": (0.0, 0), "0.02": (0.02, 0), "12": (0.0, 12)}
    kl = {name: report["texts"]["words.txt"]["kl"] for name, report in found.items()}
    assert kl["12"] == own["texts"]["words.txt"]["kl"] and len(set(kl.values())) == 3
    assert {report["ratio"] for report in found.values()} == {own["ratio"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--select-fraction", "1.5"], "select_fraction=1.5"),
        (["--select-fraction", "0"], "--select-fraction 0 must be above 0; --select all reads everything"),
        (["--select-count", "-3"], "--select-count -3 must be above 0"),
        (["--select-count", "9"], "no full layer comes before it to choose what it reads"),
        (["--windows", "0"], "--windows 0 must be at least 1"),
        (["--recall", "-1"], "--recall -1 must be 0 or more"),
        (["--recall", "1", "--context", "128"], "a context of 128 tokens is too short for a recall sample"),
    ],
)
def test_quality_refuses_what_it_cannot_measure(place, capsys, arguments, said):
    assert fitted_deltakv(place, "--set", "full_layers=") == 0
    capsys.readouterr()
    assert call(place, "quality", "--codec", str(place / "codec"), "--context", "512", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1


def test_a_codec_that_reads_everything_by_nature_takes_no_selection(place, capsys):
    assert fitted(place) == 0
    for option in (["--select", "all"], ["--select-count", "4"], ["--select-fraction", "0.5"]):
        assert call(place, "quality", "--codec", str(place / "codec"), *option) == 2
        assert f"no meaning with {place / 'codec'}, a codec of method vqkv" in capsys.readouterr().err


# -- the quality fit, in one process and in several


WORKER = """
import sys
import torch
from calib import cli, deltakv, train
torch.use_deterministic_algorithms(True)
deltakv.EFFORTS["quick"] = deltakv.Effort(tokens=8, least=2, queries=16)
train.PLANS["quick"] = train.TrainPlan(tokens=3 * 512, batch=512, micro=256, lr=0.02)
if "--break" in sys.argv:
    step = train._Trainer.step
    def broken(self, *arguments):
        assert self.world.rank == 0, "broken"
        return step(self, *arguments)
    train._Trainer.step = broken
sys.exit(cli.main([word for word in sys.argv[1:] if word != "--break"]))
"""


def together(place, processes: int, *arguments: str) -> subprocess.CompletedProcess:
    """`calib fit --fit quality` of a tiny model by that many processes; the codec goes to place / "codec"."""
    (place / "worker.py").write_text(WORKER)
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(place / "worker.py"), "fit", "--model", str(place / "model"), "--text", str(place / "words.txt")]
    command += ["--method", "deltakv", "--fit", "quality", "--effort", "quick", "--context", "128", "--ratio", "0.7"]
    command += ["--set", "window=8", "--set", "block=4", "--set", "neighbors=2", "--out", str(place / "codec")]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)


def test_two_processes_fit_what_one_does_and_one_of_them_tells(place):
    done = together(place, 2, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fit"] == "quality" and report["choice"]["training"]["steps"] == 3
    assert done.stderr.count("choosing layers") == 1 and not (place / "codec.partial").exists()
    pair = codecs.load(place / "codec")
    done = together(place, 1)  # with as many threads, on which the last bits depend
    assert done.returncode == 0, done.stderr
    assert "quality fit" in done.stdout and "3 steps of training took the held-out KL divergence" in done.stdout
    alone = codecs.load(place / "codec")
    assert alone.config == pair.config and sorted(alone.layers) == sorted(pair.layers)
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(pair.tensors()[name], tensor, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--break"], "AssertionError: broken"),
        (["--ratio", "0.0001"], "error: ratio 0.0001 is out of reach"),
        (["--fit", "fast"], "error: --fit fast runs in one process, not in 2: leave torchrun out"),
    ],
)
def test_a_process_that_fails_ends_them_all(place, arguments, said):
    done = together(place, 2, *arguments)
    assert done.returncode != 0 and done.stdout == "" and not (place / "codec").exists()
    assert done.stderr.count(said) == 1


def test_quality_refuses_a_codec_of_another_model_and_a_short_text(place, capsys):
    assert fitted(place) == 0
    save_tiny(place / "other", "llama", seed=1, num_hidden_layers=2)
    text = ["--text", str(place / "words.txt"), "--codec", str(place / "codec"), "--context", "128"]
    assert main(["quality", "--model", str(place / "other"), *text]) == 2
    assert "the codec was fitted for model" in capsys.readouterr().err
    (place / "words.txt").write_text("a few words")
    assert main(["quality", "--model", str(place / "model"), *text]) == 2
    assert "words.txt has fewer than 128 tokens" in capsys.readouterr().err


def test_the_command_line_itself_needs_no_heavy_import():
    code = "import sys; from calib.cli import parser; parser(); print([m for m in HEAVY if m in sys.modules])"
    code = code.replace("HEAVY", "('torch', 'transformers', 'safetensors')")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
