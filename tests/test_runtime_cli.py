"""The command line: what it prints, what it refuses, what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_artefact as tiny

from runtime.cli import byte_count, main

ROOT = Path(__file__).parent.parent
BENCHES = ("latency", "oom-length", "capacity", "sessions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("cli"), geometry=tiny.SMALL, max_length=500)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_runtime_imports_no_training_package(folder: Path) -> None:
    source = f"""
import sys
from runtime import Engine, SamplingParams
with Engine.open({str(folder)!r}, threads=1) as engine:
    engine.generate([[{{"role": "user", "content": "hi"}}], "x"], SamplingParams(max_tokens=3, temperature=1.0))
import runtime.cli, runtime.bench
print(sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "calib", "export", "gguf"}


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"], *(["bench", name] for name in BENCHES)])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    source = f"""
import sys
from runtime.cli import build_parser
try:
    build_parser().parse_args({[*command, "--help"]!r})
except SystemExit:
    heavy = {{"numpy", "onnxruntime", "tokenizers", "jinja2", "rich"}} & set(sys.modules)
    sys.exit(repr(heavy) if heavy else 0)
"""
    done = python("-c", source)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m runtime" in done.stdout


def test_one_prompt_streams_its_text_and_ends_with_one_line_of_figures(folder: Path) -> None:
    done = python("-m", "runtime", "generate", "--engine", str(folder), "--prompt", "hi", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("\n")) == 12
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("12 tokens in ") and "an fp16 cache" in done.stderr


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_template_is_applied_unless_raw(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--engine", str(folder), "--prompt", "hi", "--max-tokens", "3"]
    templated = run(capsys, *command)["sequences"][0]
    rendered = "<start>user\nhi<end>\n<start>assistant\n"
    assert templated["prompt_tokens"] == len(tiny.tokenizer().encode(rendered))
    with_system = run(capsys, *command, "--system", "be kind")["sequences"][0]
    assert with_system["prompt_tokens"] > templated["prompt_tokens"]
    assert run(capsys, *command, "--raw")["sequences"][0]["prompt_tokens"] == 2


def test_prompts_and_files_make_a_batch_and_seeds_repeat(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("from a file é")
    command = ["generate", "--engine", str(folder), "--prompt", "hi", "--prompt-file", str(tmp_path / "p.txt")]
    command += ["--max-tokens", "9", "--temperature", "30", "--seed", "4", "--top-p", "0.9", "--top-k", "20"]
    first, second = run(capsys, *command), run(capsys, *command)
    assert [len(one["tokens"]) for one in first["sequences"]] == [9, 9]
    assert first["sequences"] == second["sequences"]
    assert first["tokens"] == 18 and first["cache_bytes"] > 0
    lengths = [one["prompt_tokens"] + 8 for one in first["sequences"]]
    assert first["fp16_cache_bytes"] == sum(lengths) * 2 * tiny.WIDTH * 2
    assert main([*command, "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("--- 1\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompt", "x", "--engine", "/nowhere"], "not an engine folder"),
        ([], "there is no prompt"),
        (["--prompt", "x" * 600, "--raw"], "exceed the engine's limit of 500"),
        (["--prompt", "x", "--prompt", "x" * 600], "sequence 1 holds 0 tokens"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "x", "--threads", "0"], "threads is 0"),
        (["--prompt", "x", "--memory-limit", "1KB"], "--memory-limit"),
        (["--prompt", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["--prompt-file", "/nowhere/p.txt"], "/nowhere/p.txt cannot be read"),
        (["--prompt", ""], None),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    folder: Path, arguments: list[str], complaint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "--engine", str(folder), "--max-tokens", "2", *arguments])
    captured = capsys.readouterr()
    if complaint is None:  # the template makes an empty message a prompt
        assert code == 0
        return
    assert code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and complaint in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--memory-limit", "lots"], ["--colour", "red"], ["--max-tokens", "many"]])
def test_unreadable_options_exit_with_code_2(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--engine", str(folder), "--prompt", "x", *arguments])
    assert caught.value.code == 2


def test_sizes_are_read_in_both_kinds_of_units() -> None:
    sizes = {"4GiB": 4 << 30, "500MB": 500_000_000, "1.5k": 1500, "123": 123, "2 tib": 2 << 40, "7B": 7}
    assert {text: byte_count(text) for text in sizes} == sizes


def test_the_capacity_bench_goes_beyond_the_limit_and_prints_ratios(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "capacity", "--engine", str(folder), "--length", "400", "--capacities", "500,5000"]
    report = run(capsys, *command, "--steps", "3")
    assert [row["capacity"] for row in report["rows"]] == [500, 5000]
    assert report["rows"][0]["ratio"] == 1.0 and report["rows"][1]["cache MiB"] > 5 * report["rows"][0]["cache MiB"]
    assert main([*command, "--steps", "3"]) == 0
    assert "median ms" in capsys.readouterr().out
    assert main([*command, "--steps", "300"]) == 2
    assert "exceed 500" in capsys.readouterr().err


def test_a_thousand_sessions_leave_memory_flat(folder: Path) -> None:
    command = ["bench", "sessions", "--engine", str(folder), "--count", "1000", "--prompt-len", "16", "--steps", "4"]
    done = python("-m", "runtime", *command, "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["sessions"] for row in report["rows"]] == [1, 100, 1000]
    assert report["growth_mib"] < 5
