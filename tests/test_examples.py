"""The example scripts, run as a reader would run them, on engines of a tiny model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine

from plugins.vqkv.config import VQKVConfig
from runtime import bench

EXAMPLES = Path(__file__).parent.parent / "examples"
LENGTH = 900


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """An uncompressed engine and one of VQKV."""
    home = tmp_path_factory.mktemp("examples")
    config = VQKVConfig.from_ratio(0.172, 32, window=16, block=8)
    for name, given in (("none", None), ("coded", config)):
        make_engine(home / name, "llama", given, {"kv_dtype": "fp16"}, num_hidden_layers=2)
    return [str(home / "none"), str(home / "coded")]


def start(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def kept(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """What the bench `name` returns from now on."""
    results: list[dict[str, Any]] = []
    measure = getattr(bench, name)

    def keep(*arguments: Any, **options: Any) -> dict[str, Any]:
        results.append(measure(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(bench, name, keep)
    return results


def test_latency(engines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    results = kept(monkeypatch, "latency")
    lengths = ["--input-len", "64", "--output-len", "4", "--past", "128", "192", "--repeats", "1", "--threads", "1"]
    start(monkeypatch, "latency", *engines, *lengths)
    first, second = results[0]["engines"]
    assert [entry["engine"] for entry in (first, second)] == engines
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[0] == f"none ({engines[0]})" and lines[5].startswith("vqkv 0.172 (")
    assert f"{first['ttft_ms']:.1f} ms, 1.00 times that of none" in lines[1]
    assert f"{second['tpot_ms']:.2f} ms a token, {second['ratios']['tpot']:.2f} times" in lines[7]
    assert lines[9] == f"  at 192 stored tokens {second['decode'][1]['tokens_per_second']:.1f} tokens/s"
    with pytest.raises(SystemExit, match="error: .*no-engine is not an engine folder"):
        start(monkeypatch, "latency", "no-engine")


def test_oom_length(engines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("runtime.bench.oom.FINENESS", 8)  # a coarser search, which the bench's own tests look into
    monkeypatch.setattr("runtime.bench.oom.SHORTEST_CURVE", 1 << 17)
    results = kept(monkeypatch, "oom_length")
    start(monkeypatch, "oom_length", *engines, "--memory", "0.12", "--threads", "1")
    first, second = results[0]["engines"]
    out = capsys.readouterr().out
    for entry in (first, second):
        assert f"\n{entry['label']}: {entry['found']:,} tokens" in f"\n{out}"
        assert all(f"  {one['tokens']:,} tokens did not fit" in out for one in entry["trials"] if not one["fits"])
    assert results[0]["settings"]["memory"] == int(0.12 * 2**30)
    assert f"  {second['found'] / first['found']:.2f} times as long" in out and second["found"] > first["found"] > 0
    with pytest.raises(SystemExit, match="error: .*no-engine is not an engine folder"):
        start(monkeypatch, "oom_length", "no-engine", "--memory", "1")


def test_quality(
    engines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Entry {n} of this list says that {n * n} is the square of {n}.\n" for n in range(400)))
    arguments = [*engines, "--text", str(text), "--length", str(LENGTH), "--samples", "1", "--out", f"{tmp_path}/out"]
    start(monkeypatch, "quality", *arguments, "--allow", "0.0001")
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    changes = {cell["subject"]: cell["change"] for cell in found["cells"] if cell["task"] == "ppl"}
    coded = next(subject for subject in found["subjects"] if subject["method"] == "vqkv")
    assert lines[0] == f"{coded['label']}: {coded['fractions'][str(LENGTH)]:.1%} of an fp16 cache"
    assert lines[1].startswith(f"  perplexity {changes[coded['label']]:+.2%}, KL ")
    assert changes[coded["label"]] > 0.0001 > abs(changes["none"])
    assert lines[-1] == f"take {engines[0]}"
    start(monkeypatch, "quality", *arguments, "--allow", "9")
    assert capsys.readouterr().out.splitlines()[-1] == f"take {engines[1]}"
    start(monkeypatch, "quality", *arguments, "--allow", "-1")
    assert capsys.readouterr().out.splitlines()[-1] == "none loses at most -100.0%"
    with pytest.raises(SystemExit, match="error: .*no-engine"):
        start(monkeypatch, "quality", "no-engine", "--out", str(tmp_path / "other"))
