"""The benches that set engines beside each other: what they measure, find, add up and refuse."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tiny_artefact as tiny
from transformers import AutoConfig

from plugins.errors import UserError
from runtime import bench, machine
from runtime.artefact import Artefact, state_bytes
from runtime.bench import memory, process
from runtime.bench.latency import DECODE_STEPS
from runtime.bench.oom import STEP, longest, longest_planned
from runtime.bench.process import TIDY, OutOfMemory, asked, measure
from runtime.bench.report import entries, label
from runtime.cli import main

LATENCY = {"input_len": 40, "output_len": 5, "batch": 2, "past": [30, 300], "prefill": [20, 40], "repeats": 2}
BALLAST = 1 << 15  # bytes per token, so that one step of the search is 8 MiB and noise is far smaller


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("bench") / "dense", max_length=500, ballast=BALLAST)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "coded"
    return tiny.make(folder, geometry=tiny.SMALL, max_length=500, ballast=BALLAST // 2)


@pytest.fixture(scope="module")
def timed(dense: Path, coded: Path) -> dict[str, Any]:
    return bench.latency([dense, coded], threads=1, **LATENCY)


def test_latency_reports_every_quantity_and_they_add_up(timed: dict[str, Any], dense: Path, coded: Path) -> None:
    assert timed == json.loads(json.dumps(timed)) and timed["bench"] == "latency"
    first, second = timed["engines"]
    assert (first["label"], second["label"]) == ("none", "vqkv 1")
    assert (first["engine"], second["engine"]) == (str(dense), str(coded))
    for entry in timed["engines"]:
        itl = entry["itl_ms"]
        assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"]
        assert itl["mean"] == pytest.approx(entry["tpot_ms"])  # of two repeats the median is the mean
        assert [one["length"] for one in entry["prefill"]] == [20, 40]
        assert [one["past"] for one in entry["decode"]] == [30, 300]
        for one in entry["prefill"]:
            assert one["tokens_per_second"] * one["ms"] == pytest.approx(1e3 * 2 * one["length"])
        for one, base in zip(entry["decode"], first["decode"], strict=True):
            assert one["tokens_per_second"] * one["ms"] == pytest.approx(1e3 * 2)
            assert one["ratio"] == pytest.approx(one["ms"] / base["ms"])
        assert entry["ratios"]["ttft"] == pytest.approx(entry["ttft_ms"] / first["ttft_ms"])
        assert entry["ratios"]["tpot"] == pytest.approx(entry["tpot_ms"] / first["tpot_ms"])
        stored = LATENCY["input_len"] + LATENCY["output_len"] - 1
        assert entry["cache_bytes"] == state_bytes(Artefact.open(entry["engine"]), stored, batch=2)
        assert entry["peak_resident_bytes"] > 10 << 20


def test_transformers_with_a_static_cache_is_measured_beside(dense: Path, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    settings = LATENCY | {"repeats": 1, "decode": [(3, 50)]}
    found = bench.latency([dense], threads=1, transformers=tmp_path, **settings)
    plain, more = found["transformers"], found["engines"][0]["more"]
    assert [(one["batch"], one["past"]) for one in [*plain["more"], *more]] == [(3, 50), (3, 50)]
    assert plain["more"][0]["ratio"] == pytest.approx(plain["more"][0]["ms"] / more[0]["ms"])
    assert more[0]["tokens_per_second"] * more[0]["ms"] == pytest.approx(3e3)
    assert [one["past"] for one in plain["decode"]] == [30, 300] and plain["graph"] is False
    for one, base in zip(plain["decode"], found["engines"][0]["decode"], strict=True):
        assert one["tokens_per_second"] * one["ms"] == pytest.approx(1e3 * 2)
        assert one["ratio"] == pytest.approx(one["ms"] / base["ms"])


def test_a_static_cache_needs_a_models_folder(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a Hugging Face model folder"):
        bench.latency([dense], threads=1, transformers=tmp_path, **(LATENCY | {"repeats": 1}))


def test_every_repeat_visits_every_engine_and_another_one_first(
    dense: Path, coded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def visit(job: dict[str, Any]) -> dict[str, Any]:
        seen.append((Path(job["engine"]).name, job["verify"], job["self_check"]))
        place = len(seen)  # later visits are slower: the median over repeats must show the middle one
        return {
            "ttft": place, "gaps": [place, 3 * place], "prefill": {"40": place},
            "decode": {"30": [place] * DECODE_STEPS}, "cache_bytes": 7, "peak": place,
        }  # fmt: skip

    module = import_module("runtime.bench.latency")  # the package shows the function of that name
    monkeypatch.setattr(module, "measure", visit)
    report = bench.latency([dense, coded], input_len=40, output_len=3, past=[30], repeats=3, self_check=True)
    order = ["dense", "coded", "coded", "dense", "dense", "coded"]
    assert seen == [(name, place < 2, place < 2) for place, name in enumerate(order)]
    first, second = report["engines"]
    assert first["ttft_ms"] == 4000 and second["ttft_ms"] == 3000  # of 1, 4, 5 and of 2, 3, 6 s
    assert first["tpot_ms"] == 8000 and second["ratios"] == {"ttft": 0.75, "tpot": 0.75}
    assert first["itl_ms"]["mean"] == pytest.approx(1e3 * (1 + 3 + 4 + 12 + 5 + 15) / 6)
    assert second["peak_resident_bytes"] == 6


def job(engine: Path, **more: Any) -> dict[str, Any]:
    return {**asked(str(engine), "cpu", 1, True, False), "seed": 0, "prefill": False, "untouched": 0, **more}


def test_oom_length_finds_the_limit_that_the_bytes_give(dense: Path, coded: Path) -> None:
    base = measure(job(dense, task="base"), TIDY)["base"]
    artefacts = [Artefact.open(path) for path in (dense, coded)]
    room = base + state_bytes(artefacts[0], 25 * STEP + STEP // 2)
    report = bench.oom_length([coded, dense], memory=room, prefill=True, threads=1)
    assert report == json.loads(json.dumps(report)) and report["bench"] == "oom-length"
    half, whole = report["engines"]  # `none` is the reference wherever it stands
    assert whole["found"] == 25 * STEP and whole["gain"] == 1
    assert 48 * STEP <= half["found"] <= 51 * STEP
    assert half["gain"] == pytest.approx(half["found"] / whole["found"])
    each = [state_bytes(a, e["found"]) / e["found"] for a, e in zip(artefacts, (whole, half), strict=True)]
    assert half["allowed_gain"] == pytest.approx(each[0] / each[1]) and 1.9 < half["allowed_gain"] < 2.1
    assert half["of_gain"] == pytest.approx(half["gain"] / half["allowed_gain"])
    for entry, artefact in zip((whole, half), artefacts, strict=True):
        tried = {one["tokens"]: one for one in entry["trials"]}
        assert tried[entry["found"]]["fits"] and not tried[entry["found"] + STEP]["fits"]
        assert all(bool(one["why"]) != one["fits"] for one in entry["trials"])
        assert entry["bound"] == longest_planned(artefact, room - entry["base_bytes"])
        assert entry["prefill_found"] == 256  # within the engine's own limit, in steps
        assert [point["tokens"] for point in entry["curve"]] == [1024, 2048, 4096, 8192][: len(entry["curve"])]
        for point in entry["curve"]:
            assert point["planned_bytes"] == state_bytes(artefact, point["tokens"])
            assert point["resident_bytes"] == pytest.approx(point["planned_bytes"], rel=0.05)


def test_memory_too_small_for_any_context_is_a_result(dense: Path) -> None:
    entry = bench.oom_length([dense], memory=20 << 20, threads=1)["engines"][0]
    assert entry["found"] == entry["bound"] == 0 and entry["curve"] == []
    assert entry["of_bound"] is entry["gain"] is entry["allowed_gain"] is entry["of_gain"] is None
    assert [one["tokens"] for one in entry["trials"]] == [STEP] and not entry["trials"][0]["fits"]


def test_running_into_the_data_limit_is_a_result(dense: Path) -> None:
    with pytest.raises(OutOfMemory, match="no memory for a cache of 262144 tokens"):
        measure(job(dense, task="trial", what="context", tokens=1 << 18, memory=1 << 30))
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY  # here nothing was limited


def test_on_a_gpu_a_ballast_leaves_just_the_memory_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        free = 10 << 30

        def allocate(self, nbytes: int) -> None:
            self.free -= nbytes

        def free_bytes(self) -> int:
            return self.free

        def total_bytes(self) -> int:
            return 16 << 30

    device = Device()
    monkeypatch.setattr(memory, "device", lambda: device)
    limit = memory.Limit(3 << 30, "cuda", 0)
    assert device.free == 3 << 30 and limit.peak() == 0
    device.free -= 1 << 30
    assert limit.peak() == 1 << 30
    with pytest.raises(UserError, match="--memory is 3.0 GiB and the device has 2.0 GiB free"):
        memory.Limit(3 << 30, "cuda", 0)


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        ("kill -9 $$", OutOfMemory, "killed"),
        ("echo 'terminate called after throwing std::bad_alloc' >&2; kill -6 $$", OutOfMemory, "bad_alloc"),
        ('echo \'{"out_of_memory": "a failed step"}\'', OutOfMemory, "a failed step"),
        ("echo 'error: no such option' >&2; exit 2", UserError, "^no such option$"),
        ("echo first >&2; echo last >&2; exit 3", UserError, r"exit code 3 \(last\)"),
        ("exit 1", UserError, "it said nothing"),
    ],
)
def test_how_a_worker_ends_decides_what_it_means(
    script: str, error: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "python"
    worker.write_text(f"#!/bin/sh\n{script}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(worker))
    with pytest.raises(error, match=told):
        measure({"engine": "e"})


def _silent(left: int) -> int | None:
    return left if left >= 0 else None


def _exact(left: int) -> int:
    return left


def _timid(left: int) -> int:
    return left // 50


def _bold(left: int) -> int:
    return 3 * left


@pytest.mark.parametrize("guess", [1, 999, 70_000, 1 << 22])
@pytest.mark.parametrize("limit", [0, 100, 256, 5_000, 70_001, 1_000_000])
@pytest.mark.parametrize(("tell", "most"), [(_exact, 5), (_silent, 26), (_timid, 30), (_bold, 30)])
def test_the_search_encloses_the_limit_from_any_guess(
    guess: int, limit: int, tell: Callable[[int], int | None], most: int
) -> None:
    tried: list[int] = []

    def spare(tokens: int) -> int | None:
        tried.append(tokens)
        return tell(limit - tokens)

    assert longest(spare, guess, 256, 1 << 20) == limit // 256 * 256
    assert len(tried) == len(set(tried)) <= most and all(tokens % 256 == 0 for tokens in tried)


def test_the_search_ends_where_nothing_longer_may_be_tried() -> None:
    assert longest(lambda tokens: 0, 256, 256, 1 << 20) == 1 << 20
    assert longest(lambda tokens: 1 << 40, 256, 256, 1000) == 768


def test_the_bound_is_the_last_length_whose_cache_fits(coded: Path) -> None:
    artefact = Artefact.open(coded)
    for tokens in (256, 4096, 100_096):
        size = state_bytes(artefact, tokens)
        assert longest_planned(artefact, size) == tokens
        assert longest_planned(artefact, size - 1) == tokens - 256
    assert longest_planned(artefact, -5) == 0


def test_labels_are_short_and_unique(dense: Path, coded: Path) -> None:
    assert [label("vqkv", 0.17187), label("deltakv", 0.2901), label("int4", 0.28125)] == [
        "vqkv 0.172",
        "deltakv 0.29",
        "int4",
    ]
    found = entries([Artefact.open(path) for path in (coded, dense, coded, coded)])
    assert [entry["label"] for entry in found] == ["vqkv 1", "none", "vqkv 1 (2)", "vqkv 1 (3)"]
    keys = ["engine", "label", "method", "ratio", "model", "dtype", "kv_dtype", "max_length"]
    assert [list(entry) for entry in found] == [keys] * 4


@pytest.mark.parametrize("name", ["latency", "oom-length"])
def test_the_commands_print_tables_and_write_the_json(
    name: str, dense: Path, tmp_path: Path, timed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    head = {key: timed["engines"][0][key] for key in ("engine", "label", "method")}
    point = {"tokens": 1024, "planned_bytes": 2 << 20, "resident_bytes": 3 << 20}
    filled = {
        "bench": "oom-length",
        "settings": {"memory": 3 << 30, "prefill": True, "provider": "cpu"},
        "engines": [
            {**head, "base_bytes": 1 << 30, "found": 2048, "bound": 4096, "of_bound": 0.5, "prefill_found": 256,
             "gain": 1.0, "allowed_gain": 1.0, "of_gain": 1.0, "curve": [point], "trials": []},
            {**head, "base_bytes": 4 << 30, "found": 0, "bound": 0, "of_bound": None, "prefill_found": 0,
             "gain": None, "allowed_gain": None, "of_gain": None, "curve": [], "trials": []},
        ],
    }  # fmt: skip
    canned = {"latency": timed, "oom-length": filled}[name]
    given: dict[str, Any] = {}

    def fake(engines: list[str], **options: Any) -> dict[str, Any]:
        given.update(options, engines=engines)
        return canned

    monkeypatch.setattr(bench, name.replace("-", "_"), fake)
    own = {"latency": ["--past", "5,6"], "oom-length": ["--memory", "3GiB", "--prefill"]}[name]
    command = ["bench", name, "--engine", str(dense), "--against", "a", "b", "--out", str(tmp_path / "x.json"), *own]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "x.json").read_text()) == canned
    assert given["engines"] == [str(dense), "a", "b"] and not given["self_check"] and given["verify"]
    assert given.get("past", [5, 6]) == [5, 6] and given.get("memory", 3 << 30) == 3 << 30
    assert main(command) == 0
    printed = capsys.readouterr().out
    for cell in {"latency": ["none", "vqkv 1", "TTFT"], "oom-length": ["2,048", "50 %", "1.500", "3.00 GiB"]}[name]:
        assert cell in printed


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda e: bench.latency([e], input_len=490, output_len=64), "need 4131 tokens and .* allows 500"),
        (lambda e: bench.latency([e], input_len=0), "input_len 0"),
        (lambda e: bench.latency([e], output_len=1), "output_len 1: each must"),
        (lambda e: bench.latency([e], past=[0]), "must be at least 1"),
        (lambda e: bench.latency([]), "no engine"),
        (lambda e: bench.oom_length([], memory=1), "no engine"),
        (lambda e: bench.oom_length([e], memory=0), "--memory is 0"),
        (lambda e: bench.oom_length([e], memory=1 << 60), r"GiB available: lower it"),
        (lambda e: bench.oom_length([e / "x"], memory=1 << 30), "not an engine folder"),
        (lambda e: bench.oom_length([e], memory=1 << 30, threads=0), "threads is 0"),
        (
            lambda e: bench.latency([e], input_len=9, output_len=2, past=[9], self_check=True),
            "canary.safetensors is missing",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(call: Callable[[Path], Any], complaint: str, dense: Path) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        call(dense)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_for_the_result_is_found_before_measuring(
    dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "oom-length", "--engine", str(dense), "--memory", "1GiB", "--out", "/nowhere/x.json"]
    assert main(command) == 2
    assert "no folder /nowhere" in capsys.readouterr().err


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found == json.loads(json.dumps(found))
    assert found["cpu"] and found["cores"] >= 1 and found["versions"]["numpy"]
    assert 0 < machine.available_bytes() <= found["memory_bytes"]
