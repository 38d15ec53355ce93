import json
import subprocess
import sys

import pytest
from families import save_tiny

from calib import deltakv, vqkv
from calib.cli import main

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
    assert said in out and "fast fit" in out and "by number of full layers" in out
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
        (["--fit", "quality"], "--fit quality trains deltakv's compressors"),
        (["--select-count", "5"], "no meaning with --method vqkv"),
        (["--method", "other"], "method 'other' is unknown"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(place, capsys, arguments, said):
    assert fitted(place, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err and captured.err.count("\n") == 1
    assert not (place / "codec").exists()


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
