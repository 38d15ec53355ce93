"""`python -m plugins`: what its arguments mean, what it says without a compiler or a GPU, and what the bench counts."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugins import cli
from plugins.bench import cases, run, show
from plugins.bench.step import BoundStep
from plugins.contract import LIVE_STEP
from plugins.errors import UserError
from plugins.native import build
from plugins.native.layer import NativeLayer

TINY = cases.layer_spec((2, 8, 64))
BY_NAME = {case.name: case for case in cases.CASES}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that refuses its arguments."""
    try:
        assert cli.main(list(arguments)) == 2
    except SystemExit as left:
        assert left.code == 2
    return capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from plugins import cli\n"
        "try: cli.main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'onnx_ir', 'rich'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--shape" in done.stdout and done.stderr.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "gpt-2"], "'gpt-2' is no shape: use llama-3.1-8b, qwen2.5-7b, or KV heads"),
        (["bench", "--shape", "8,30,128"], "30 query heads are no multiple of 8 KV heads"),
        (["bench", "--batch", "0,8"], "'0,8' is not a list of positive integers"),
        (["bench", "--repeats", "5"], "--repeats 5 is too few for a median: use 25 or more"),
        (["bench", "--json", "nowhere/at/all.json"], "there is no folder nowhere/at"),
        (["bench", "--method", "int5"], "--method int5: use some of none, int8, int4, vqkv, deltakv"),
        (["build", "--arch", "hopper"], "'hopper' is not a list of positive integers"),
        (["build", "--jobs", "0"], "--jobs 0 must be 1 or more"),
        (["build", "--nvcc", "/nowhere/nvcc"], "--nvcc /nowhere/nvcc is not a program"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, *arguments)


def test_shapes_and_architectures_are_read() -> None:
    parsed = cli.build_parser().parse_args(["bench", "--shape", "2,8,64", "--length", "1024", "--no-prefill"])
    assert parsed.shape == (2, 8, 64) and parsed.length == [1024] and parsed.prefill == []
    assert cli.build_parser().parse_args(["bench", "--shape", "qwen2.5-7b"]).shape == (4, 28, 128)
    assert cli.architectures("sm_90,80,90") == [80, 90] and cli.architectures("native") == []


def test_the_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "the bench needs an NVIDIA GPU" in said(capsys, "bench")


def test_arch_native_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "native_arches", lambda: ())
    assert "--arch native needs a GPU that nvidia-smi shows" in said(capsys, "build", "--arch", "native")


def test_build_compiles_for_the_gpus_there_are_and_else_for_the_common_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[tuple[int, ...], Path]] = []

    def compile(arches: Any, out: Path, **options: Any) -> build.BuildReport:
        calls.append((tuple(arches), out))
        kernels = (
            build.Kernel("a.cu", "f<half, 64>", 80, 40, 0, 0, 0, 16),
            build.Kernel("a.cu", "f<half, 96>", 80, 60, 4, 8, 0, 32),
        )
        return build.BuildReport(out, Path("nvcc"), "13.0", tuple(arches), None, None, kernels, 1.0)

    monkeypatch.setattr(build, "compile", compile)
    monkeypatch.setattr(build, "native_arches", lambda: ())
    out = tmp_path / "lib.so"
    assert cli.main(["build", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "sm_80" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["a.cu", "sm_80", "f", "2", "60", "12", "32"]
    assert "Without ops for ONNX Runtime" in printed and "Without ops for TensorRT" in printed
    assert str(out) in printed.replace("\n", "")
    monkeypatch.setattr(build, "native_arches", lambda: (86,))
    assert cli.main(["build", "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["arches"] == [86] and report["kernels"][1]["spill_loads"] == 8
    assert report["onnxruntime"] is None and report["tensorrt"] is None
    assert cli.main(["build", "--out", str(out), "--arch", "90"]) == 0
    assert calls == [((80, 90), out), ((86,), out), ((90,), out)]


# -- the bench


class Recorder:
    """Stands for the native library: keeps the arguments of the last step."""

    def prepared(self, *_: Any) -> int:
        return 0

    def workspace(self, *_: Any) -> int:
        return 1024

    def attention(self, op: str, layer: Any, step: Any, state: Any) -> None:
        self.op, self.layer, self.step, self.state = op, layer, step, state


def layer_of(name: str, length: int, library: Recorder) -> tuple[NativeLayer, int]:
    """A filled layer of a case on the CPU, and the tokens it stores."""
    config = BY_NAME[name].make(TINY)
    past = cases.settled(length, None if config is None else config.geometry())
    layer = cases.make_layer(BY_NAME[name], TINY, library, 2, past + 32, torch.bfloat16, "cpu")
    layer.fill(past)
    return layer, past


@pytest.mark.parametrize("name", BY_NAME)
def test_every_row_of_the_bench_becomes_a_step(name: str) -> None:
    library = Recorder()
    layer, past = layer_of(name, 700, library)
    step = BoundStep(layer, past, selected=cases.random_selection(layer, past))
    step()
    given = library.step
    assert (given.batch, given.length, given.encode) == (2, 1, 0)
    assert read(given.past_len, 2).tolist() == [past, past] and given.live == -(-past // LIVE_STEP) * LIVE_STEP
    assert given.workspace % 256 == 0 and given.workspace_bytes == 1024 and given.rope_rows > past
    assert all(getattr(given, name) for name in ("q", "k", "v", "out", "cos", "sin"))
    if not BY_NAME[name].make(TINY) or BY_NAME[name].observes:
        assert library.op == "dense" and bool(library.state.selected) == BY_NAME[name].observes
        return
    step = BoundStep(layer, past - 1, selected=cases.random_selection(layer, past - 1))
    step()
    assert library.step.encode == step.encodes == 32
    rows = int(layer.geometry.encoded(past - 1))
    assert set(read(library.step.enc_dst, 64).tolist()) == set(range(rows, rows + 32))


@pytest.mark.parametrize(
    ("name", "count", "room"), [("deltakv-select-0.17", 93, 96), ("deltakv-select-2048", 544, 544)]
)
def test_a_selection_names_existing_rows_once(name: str, count: int, room: int) -> None:
    library = Recorder()
    layer, past = layer_of(name, 700, library)
    assert layer.geometry.encoded(past) == 544
    step = BoundStep(layer, past, selected=cases.random_selection(layer, past))
    step()
    assert library.state.select_width == room and read(library.state.select_len, 2).tolist() == [count, count]
    for row in read(library.state.selected, 2 * room).reshape(2, room):
        assert len(set(row.tolist())) == room and row.min() >= 0 and row.max() < 544


def test_all_rows_are_read_where_nothing_is_selected() -> None:
    library = Recorder()
    layer, past = layer_of("deltakv-all", 700, library)
    step = BoundStep(layer, past, selected=cases.random_selection(layer, past))
    step()
    assert not library.state.selected and not library.state.selects


def read(address: int, count: int) -> np.ndarray:
    """int32 [count] at an address."""
    return np.array((ctypes.c_int32 * count).from_address(address))


def test_the_bytes_of_a_step_are_those_of_its_rows() -> None:
    library = Recorder()
    heads, dim, batch = 2, 64, 2
    layer, past = layer_of("none", 700, library)
    assert cases.bytes_read(layer, past) == batch * heads * past * dim * 2 * 2

    layer, past = layer_of("int4", 700, library)
    coded = (past - 132) // 32 * 32
    exact = batch * heads * (4 + 128 + 32) * dim * 2 * 2
    assert cases.bytes_read(layer, past) == exact + batch * heads * coded * 2 * (dim // 2 + 2 * 2)

    layer, past = layer_of("vqkv-0.125-tiles", 700, library)
    assert cases.bytes_read(layer, past) == exact + batch * heads * coded * 2 * (dim // 4)

    layer, past = layer_of("deltakv-select-0.17", 700, library)
    config, coded = BY_NAME["deltakv-select-0.17"].make(TINY), (past - 136) // 32 * 32
    taken = int(np.ceil(0.17 * coded))
    ring = (8 + 128 + 32) * config.width * 2
    rows = taken * (config.latent_bits // 8 + 3 * 2 + 2 * 2)  # latents, three scales, two indices
    references = min(2 * taken, -(-coded // 64)) * config.width * 2
    assert cases.bytes_read(layer, past) == batch * (ring + rows + references)


def test_a_length_is_settled_when_the_next_token_encodes_nothing_and_the_last_one_did() -> None:
    geometry = BY_NAME["int4"].make(TINY).geometry()
    past = cases.settled(1000, geometry)
    assert past <= 1000 < past + geometry.block
    assert geometry.encoded(past + 1) == geometry.encoded(past) == geometry.encoded(past - 1) + geometry.block
    with pytest.raises(UserError, match="--length 150 is too short: from 164 tokens on something is compressed"):
        cases.settled(150, geometry)


def test_rows_are_chosen_by_method_or_by_name_and_always_beside_none() -> None:
    assert [case.name for case in cases.chosen(["int4", "deltakv-all"])] == ["none", "int4", "deltakv-all"]
    assert [case.name for case in cases.chosen(["vqkv"]) if case.method != "vqkv"] == ["none"]
    assert len(cases.chosen([])) == len(BY_NAME) == len(cases.CASES)


def test_ratios_are_to_the_best_16_bit_attention_and_to_the_copy() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "kind": "16 bits", "us": 40.0, "bytes": 40_000},
        {"name": "b", "kind": "16 bits", "us": 20.0, "bytes": 40_000},
        {"name": "c", "kind": "fp8", "us": 10.0, "bytes": 20_000},
        {"name": "d", "why": "not installed"},
        {"name": "e", "kind": "kvpack", "us": 5.0, "bytes": 10_000},
    ]
    run._compare(rows, bandwidth=4e9)
    assert [row.get("faster") for row in rows] == [0.5, 1.0, 2.0, None, 4.0]
    assert [row.get("of_roof") for row in rows] == [0.25, 0.5, 0.5, None, 0.5]


def test_the_whole_bench_visits_every_place_and_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU: everything but the measuring itself."""

    def decode(case: cases.Case, problem: Any, library: Any, repeats: int) -> dict[str, Any]:
        if case.name == "int8":
            raise UserError("no kernels for int8")
        kind = "16 bits" if case.name == "none" else "kvpack"
        return {"kind": kind, "us": 10.0 * problem.batch, "bytes": 1000 * problem.length}

    def baseline(baseline: Any, problem: Any, repeats: int) -> dict[str, Any]:
        kind = "16 bits" if baseline.itemsize == 2 else "fp8"
        return {"kind": kind, "us": 40.0 * problem.batch, "bytes": 4000 * problem.length}

    def prompt(case: cases.Case, *_: Any) -> dict[str, Any]:
        plain = case.name == "none"
        kind, time = ("16 bits", 2.5e3) if plain else ("kvpack", 3e3)
        return {"kind": kind, "us": time, "workspace_bytes": 0, "encoded": 0 if plain else 960}

    steps: list[str] = []
    totals: list[int] = []

    @contextmanager
    def progress(title: str, total: int, shown: bool) -> Iterator[Any]:
        totals.append(total)
        yield steps.append

    library = tmp_path / "libkvpack.so"
    for name, value in {"_decode": decode, "_baseline": baseline, "_prefill": prompt}.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run, "_flash", lambda *_: {"kind": "16 bits", "us": 2e3})
    monkeypatch.setattr(run, "_machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(run, "_open", lambda path: SimpleNamespace(path=path))
    monkeypatch.setattr(run.timing, "copy_bandwidth", lambda repeats: 4e12)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "progress", progress)
    out = tmp_path / "bench.json"
    sizes = ["--batch", "1,8", "--length", "1024,4096", "--prefill", "1024"]
    assert cli.main(["bench", *sizes, "--method", "int8", "int4", "--library", str(library), "--json", str(out)]) == 0
    assert totals == [len(steps)]
    report = json.loads(out.read_text(encoding="utf-8"))
    rows = [row for row in report["decode"] if (row["batch"], row["length"]) == (8, 4096)]
    assert len(report["decode"]) == 4 * len(rows) and len(rows) == len(run.baselines.BASELINES) + 3
    found = {row["name"]: row for row in rows}
    assert found["int4"]["faster"] == 1.0 and found["torch SDPA, cuDNN"]["faster"] == 0.25
    assert found["int8"]["why"] == "no kernels for int8" and list(report["configurations"]) == ["none", "int8", "int4"]
    assert [(row["name"], row["of_flash"]) for row in report["prefill"]][::3] == [
        ("torch SDPA, flash", 1.0),
        ("int4", 1.5),
    ]
    assert [row.get("encode_us") for row in report["prefill"]] == [None, None, 500.0, 500.0]
    printed = capsys.readouterr().out
    assert printed.count("Decode step of one layer") == 4 and printed.count("int8: no kernels for int8") == 4


def test_what_cannot_run_is_told_and_the_rest_goes_on() -> None:
    def missing() -> dict[str, Any]:
        raise ImportError("No module named 'flashinfer'")

    def unsupported() -> dict[str, Any]:
        raise UserError("no kernels for head_dim 80")

    assert run._attempt(missing, "x") == {"name": "x", "why": "not installed (No module named 'flashinfer')"}
    assert run._attempt(unsupported, "y") == {"name": "y", "why": "no kernels for head_dim 80"}
    assert run._attempt(lambda: {"us": 1.0}, "z") == {"name": "z", "us": 1.0}


def test_the_tables_show_every_row_and_why_some_are_empty(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"bytes": 134_000_000, "faster": 1.0, "of_roof": 0.87, "batch": 1, "length": 32768}
    report = {
        "machine": {"gpu": "a GPU"},
        "settings": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "bf16"},
        "copy_bytes_per_second": 4.25e12,
        "configurations": {"int4": "K 4 bits"},
        "decode": [
            {"name": "torch SDPA, cuDNN", "kind": "16 bits", "us": 36.84, **numbers},
            {"name": "int4", "kind": "kvpack", "us": 18.42, "encode_us": 2.5, **numbers, "faster": 2.0},
            {"name": "FlashInfer", "why": "not installed [at all]", "batch": 1, "length": 32768},
        ],
        "prefill": [
            {"name": "torch SDPA, flash", "kind": "16 bits", "us": 9000.0, "of_flash": 1.0, "length": 4096},
            {
                "name": "int4", "kind": "kvpack", "us": 9900.0, "of_flash": 1.1, "length": 4096, "encoded": 3936,
                "encode_us": 900.0,
                "workspace_bytes": 2**20, "finite": False,
            },
        ],
    }  # fmt: skip
    show.show(report)
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    decode, prefill = (row[1:] for row in rows if row[0] == "int4")
    assert decode == ["18.4", "134.0", "7.27", "2.00", "87%", "2.5"]
    assert prefill == ["9.90", "1.10", "0.90", "3,936", "1"]
    assert "FlashInfer: not installed [at all]" in printed and "int4: wrong, the output is not finite" in printed
