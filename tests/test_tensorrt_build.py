"""The build of plans: what TensorRT is told, by a stand-in for its package, and what is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
from families import save_tiny
from native import emulated
from test_export_cli import refusal
from trt_plugins import compiled

from export.cli import main
from export.inspect import describe
from export.show import show_description
from export.tensorrt import builder, layers, options, plan, process
from export.tensorrt.graph import write_graph
from export.tensorrt.options import PlanOptions, Profile
from export.tensorrt.packages import PACKAGES
from plugins.contract import state_sizes
from plugins.errors import UserError
from plugins.geometry import Geometry
from runtime.artefact import Artefact

DESCRIBED = """Layers:
Name: layer0.attention, LayerType: PluginV3, Inputs: [ { Name: q, Location: Device }, { Name: layer0.state_k, \
Dimensions: [-1,2] }, { Name: layer0.state_v, Dimensions: [-1,2] }], Outputs: [ { Name: out, Dimensions: [-1] }, \
{ Name: layer0.state_k_out, Dimensions: [-1,2] }, { Name: layer0.state_v_out, Dimensions: [-1,2] }], TacticName: a
Name: layer1.attention [profile 1], LayerType: PluginV3, Inputs: [ { Name: layer1.state_k [profile 1], D: [1] }], \
Outputs: [ { Name: layer1.state_k_out [profile 1], D: [1] }], StreamId: 0
Name: Reformatting CopyNode for Output Tensor 1, LayerType: Reformat, Inputs: [ { Name: x, D: [1] }], Outputs: [ \
{ Name: layer1.state_v_out, D: [1] }], StreamId: 0

I/O Tensors:
 Name: live, IOMode: Input, DataType: Int32, Dimensions: [], Location: Host, ProfileInfo: [ { MinShape: [], \
OptShape: [], MaxShape: [] }]
"""


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in is installed, on a machine with a GPU, and runs in this process."""
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(options, "own_capability", lambda: "9.0")
    monkeypatch.setattr(plan, "own_capability", lambda: "9.0")
    monkeypatch.setattr(plan, "ask", lambda task, request: getattr(builder, task)(json.loads(json.dumps(request))))
    fake_tensorrt.calls.clear()
    fake_tensorrt.said[:] = ["Total Activation Memory: 4096 bytes", DESCRIBED]
    return fake_tensorrt


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def kernels() -> Path:
    """A native library without TensorRT's plugins, for the emulator."""
    return emulated().path


@pytest.fixture(scope="session")
def library(kernels: Path) -> Path:
    """One with them."""
    return compiled(kernels)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_tiny(folder, "llama", num_hidden_layers=2, head_dim=64, max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="module")
def graph(model: Path) -> Path:
    """The folder of an engine for TensorRT before its plan is made."""
    from calib import models
    from export.build import BuildOptions, write_engine

    folder = model.with_name("graph")
    folder.mkdir()
    loaded = models.load(str(model), progress=False)
    write_engine(folder, loaded, None, BuildOptions(out=folder, backend="tensorrt"))
    return folder


def copied(graph: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of an engine's folder, and its configuration."""
    shutil.copytree(graph, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return folder, {key: value for key, value in config.items() if key not in ("files", "digest")}


def test_a_build_for_tensorrt(
    tensorrt: Any,
    model: Path,
    library: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, steps = tmp_path / "engine", []
    monkeypatch.setattr(
        builder, "_monitor", lambda trt, step, make=builder._monitor: make(trt, lambda *s: steps.append(s))
    )
    arguments = ["build", "--model", model, "--method", "none", "--backend", "tensorrt", "--library", library]
    arguments += ["--batch", "3", "--prefill-tokens", "32,128", "--version-compatible", "--hardware-compatible"]
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    artefact = Artefact.open(out)  # hashes and contract
    target = artefact.config["target"]
    assert (target["backend"], target["sm"], target["plan"]) == ("tensorrt", ["9.0"], "engine.plan")
    assert target["versions"]["tensorrt"] == "11.4.0.1" and target["in_place"] is True and target["weights"] is None
    assert (out / "engine.plan").read_bytes() == tensorrt.PLAN
    assert (out / target["plugins"]).read_bytes() == library.read_bytes()
    assert not list(out.glob("*.onnx*"))
    assert steps == [("Building engine", 0, 2), ("Building engine", 1, 2), ("Building engine", 2, 0)]

    calls = tensorrt.calls
    assert calls[:3] == [("load_library", target["plugins"], True), ("network", 1), ("parse", "plan.onnx")]
    assert ("preview", tensorrt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True) in calls
    assert ("flag", tensorrt.BuilderFlag.VERSION_COMPATIBLE) in calls
    assert ("hardware_compatibility_level", tensorrt.HardwareCompatibilityLevel.AMPERE_PLUS) in calls
    assert ("profiling_verbosity", tensorrt.ProfilingVerbosity.DETAILED) in calls
    assert ("timing cache", b"") in calls and calls[-1][0] == "build"
    (cached,) = (tmp_path / "cache" / "tensorrt").iterdir()
    assert cached.read_bytes() == b"timings"

    profiles = calls[-1][1]
    assert [(p["name"], p["tokens"]) for p in target["profiles"]] == [
        ("decode", [1, 1, 1]), ("prefill-32", [2, 32, 32]), ("prefill-128", [2, 128, 128]),
    ]  # fmt: skip
    assert all(profile.keys() == {spec.name for spec in artefact.inputs} for profile in profiles)
    assert profiles[0]["input_ids"] == ([1, 1], [1, 1], [3, 1])
    assert profiles[2]["input_ids"] == ([1, 2], [1, 128], [3, 128])
    assert profiles[2]["logit_index"] == ([1, 1], [1, 1], [3, 128])
    assert profiles[0]["layer1.state_v"] == ([1, 2, 257, 64], [1, 2, 1025, 64], [3, 2, 1025, 64])
    assert profiles[0]["live"] == ([0], [1024], [1024])

    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["verified"] and "not run where it was built" in report["plan"]["unverified"]
    assert report["plan"]["layers"] == {"PluginV3": 2, "Reformat": 1}
    described = describe(artefact)["plan"]
    assert described["unopened"] is None
    assert {state["input"]: state["in_place"] for state in described["states"]} == {
        "layer0.state_k": True, "layer0.state_v": True, "layer1.state_k": True, "layer1.state_v": False,
    }  # fmt: skip
    capsys.readouterr()
    show_description(describe(artefact))
    shown = " ".join(capsys.readouterr().out.split())
    assert "Plan of tensorrt for sm_90" in shown and "second buffer" not in shown
    assert "such as Reformatting CopyNode" in shown


def test_nodes_become_plugins_with_shape_inputs(tensorrt: Any, tmp_path: Path) -> None:
    from engines import make_engine

    from plugins.deltakv.config import DeltaKVConfig

    config = DeltaKVConfig(64, 2, "24x8", select_count=40, sinks=2, window=16, block=16)
    folder = tmp_path / "engine"
    built = {"backend": "tensorrt", "dtype": "fp16", "kv_dtype": "fp16"}
    make_engine(folder, "llama", config, built, num_hidden_layers=2, head_dim=64)
    write_graph(folder / "model.onnx", folder / "plan.onnx", plugins=True)
    contract = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {"dtype": "int8", "shape": ["batch", 1, "code_rows", 4]}.items() <= next(
        entry for entry in contract["inputs"] if entry["name"] == "layer1.index"
    ).items()
    import onnx

    nodes = onnx.load(folder / "plan.onnx", load_external_data=False).graph.node
    ours = {node.op_type: node for node in nodes if node.domain == "kvpack"}
    assert {"DenseObservedAttention", "DeltaKVAttention", "AddRMSNormalization", "GatedActivation"} == set(ours)
    for op, node in ours.items():
        found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert (found["plugin_namespace"], found["plugin_version"]) == (b"kvpack", b"1")
        places = [place for place, name in enumerate(node.input) if name in ("live.vector", "select_width.vector")]
        assert found.get("tensorrt_plugin_shape_input_indices", []) == places
        assert len(places) == {"DenseObservedAttention": 2, "DeltaKVAttention": 1}.get(op, 0)
        assert not {"live", "select_width"} & set(node.input)


def test_a_plan_without_weights_keeps_the_graph_that_has_them(
    tensorrt: Any, graph: Path, library: Path, tmp_path: Path
) -> None:
    folder, config = copied(graph, tmp_path / "engine")
    plan.make(folder, config, "tensorrt", PlanOptions(strip_weights=True, library=library))
    assert ("flag", tensorrt.BuilderFlag.STRIP_PLAN) in tensorrt.calls
    assert config["target"]["weights"] == "plan.onnx"
    assert {path.name for path in folder.glob("*.onnx*")} == {"plan.onnx", "model.onnx.data"}


def test_a_build_that_fails_says_what_tensorrt_said(tensorrt: Any, graph: Path, library: Path, tmp_path: Path) -> None:
    folder, config = copied(graph, tmp_path / "engine")
    tensorrt.said[:] = ["Error Code 2: out of\n memory"]
    with pytest.raises(builder.PlanError, match="tensorrt 11.4.0.1 made no plan: Error Code 2: out of memory"):
        plan.make(folder, config, "tensorrt", PlanOptions(library=library))
    config["outputs"] = config["outputs"][:-1]
    with pytest.raises(builder.PlanError, match="differ by .*layer1.state_v_out"):
        plan.make(folder, config, "tensorrt", PlanOptions(library=library))


# -- profiles


@pytest.mark.parametrize("limit", [120, 700, 9000])
def test_profiles_hold_every_step_that_a_session_makes(limit: int) -> None:
    geometry = Geometry(sinks=2, window=16, block=16, stride=3, select_fraction=0.3)
    decode, prefill = PlanOptions(batch=2, prefill_tokens=(24,)).profiles("tensorrt", limit)
    rng, seen = np.random.default_rng(0), set()
    for past in {0, 1, 17, 34, limit - 24, *map(int, rng.integers(0, limit - 24, 40))}:
        for profile, new in ((decode, 1), (prefill, 2), (prefill, 24)):
            live = min(-(-past // 32) * 32, limit)
            source, _ = geometry.schedule(np.array([past]), np.array([new]), 0)
            counts, width = geometry.selection(np.array([past]), live, new == 1)
            step = {"sequence": new, "encode": source.shape[1], "live": live, "select_width": int(width), "batch": 2}
            step |= state_sizes(max(past + new, min(256, limit)), geometry, 2)
            for name, size in step.items():
                least, usual, most = profile.sizes(geometry, limit)[name]
                assert least <= size <= most and least <= usual <= most, (name, size, past, new)
            seen |= {("encodes", source.shape[1] > 0), ("selects", int(width) > 0)}
    assert len(seen) == 4


def test_a_profile_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(UserError, match="--prefill-tokens 512 is longer than --max-length 300"):
        PlanOptions(prefill_tokens=(64, 512)).profiles("tensorrt", 300)
    for backend, limit, most in (("tensorrt", 300, [1, 300]), ("tensorrt-rtx", 9000, [1, 512])):
        assert [profile.tokens[2] for profile in PlanOptions().profiles(backend, limit)] == most
    assert [profile.tokens for profile in PlanOptions().profiles("tensorrt", 9000)] == [
        (1, 1, 1), (2, 512, 512), (2, 8192, 8192),
    ]  # fmt: skip
    assert Profile("decode", (1, 1, 1), (1, 1, 8)).to_json() == {
        "name": "decode", "tokens": [1, 1, 1], "batch": [1, 1, 8],
    }  # fmt: skip


def test_a_selection_larger_than_what_is_sorted_is_refused() -> None:
    geometry = Geometry(select_fraction=0.17)
    options.check_selection("tensorrt-rtx", geometry, 16384)
    options.check_selection("tensorrt", geometry, 32768)  # its plugin chooses without sorting
    with pytest.raises(UserError, match=r"at most 3,840 tokens .* takes 5,5.. when 32,768 .*--select-count 3840"):
        options.check_selection("tensorrt-rtx", geometry, 32768)


# -- descriptions


def test_what_a_description_says_of_layers_and_tensors() -> None:
    found = layers.parse(DESCRIBED)
    assert [layer.name for layer in found][::2] == ["layer0.attention", "Reformatting CopyNode for Output Tensor 1"]
    assert found[1].inputs == ("layer1.state_k",) and found[1].outputs == ("layer1.state_k_out",)
    assert layers.tensors(DESCRIBED) == [
        {"name": "live", "mode": "input", "dtype": "Int32", "shape": [], "profiles": [[[], [], []]]}
    ]
    assert layers.parse("") == [] and layers.states([], {"a": "b"})[0]["in_place"] is False


# -- what is refused


def test_what_a_backend_cannot_do_is_refused_before_anything_is_made(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rtx = SimpleNamespace(
        __version__="1.7.1", ComputeCapability=SimpleNamespace(__members__=["CURRENT", "SM89", "SM120"])
    )
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", rtx)
    monkeypatch.setattr(options, "own_capability", lambda: None)
    trt, for_rtx = ["--backend", "tensorrt"], ["--backend", "tensorrt-rtx"]
    cases = {
        "--backend openvino is unknown": ["--backend", "openvino"],
        "--target is about plans": ["--target", "sm_89"],
        "--batch is about plans": ["--batch", "4"],
        "--batch 0 must be": [*for_rtx, "--batch", "0"],
        "--prefill-tokens 1 must be": [*for_rtx, "--prefill-tokens", "64,1"],
        "--target sm_89 needs --backend tensorrt-rtx": [*trt, "--target", "sm_89"],
        "--target 8.9 is no compute capability": [*for_rtx, "--target", "8.9"],
        "--target sm_90 is none that": [*for_rtx, "--target", "sm_89,sm_90"],
        "names one twice": [*for_rtx, "--target", "sm_89,sm_89"],
        "as in --target sm_89": for_rtx,
        "build on the machine that is to run it": trt,
        "--strip-weights needs --backend tensorrt": [*for_rtx, "--target", "sm_89", "--strip-weights"],
        "--version-compatible needs": [*for_rtx, "--target", "sm_89", "--version-compatible"],
        "fp16 or bf16 throughout, not in fp32": [*trt, "--dtype", "fp32"],
        "in fp16 with a cache in fp32": [*trt, "--kv-dtype", "fp32"],
        "--provider cuda is where": [*for_rtx, "--target", "sm_89", "--provider", "cuda"],
        "longer than --max-length 128": [
            *for_rtx,
            "--target",
            "sm_89",
            "--prefill-tokens",
            "256",
            "--max-length",
            "128",
        ],
    }
    for expected, arguments in cases.items():
        out = tmp_path / "out" / "engine"
        said = refusal(capsys, "build", "--model", model, "--method", "none", *arguments, "--out", out)
        assert expected in said
        assert not list(tmp_path.glob("out/*")) and not list(tmp_path.glob("out/.*"))


def test_a_missing_or_unfit_plugin_library_is_refused(
    tensorrt: Any,
    model: Path,
    kernels: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVPACK_LIBRARY", raising=False)
    build = ["build", "--model", model, "--method", "none", "--backend", "tensorrt", "--out", tmp_path / "engine"]
    assert "run `python -m plugins build`" in refusal(capsys, *build)
    said = refusal(capsys, *build, "--library", kernels)
    assert "without TensorRT's headers: run `python -m plugins build --tensorrt-include`" in said


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "TensorRT is not installed: "),
        ("10.3.0", "from 10.14 on, before 12, and 10.3.0"),
        ("12.0", "and 12.0 is"),
    ],
)
def test_a_missing_or_unfit_package_is_refused_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", version and SimpleNamespace(__version__=version))
    with pytest.raises(UserError) as refused:
        PACKAGES["tensorrt"].load()
    assert reason in str(refused.value) and "pip install 'kvpack[tensorrt]'" in str(refused.value)


def test_a_library_that_ends_its_process_is_an_error_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ABRT $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match="ended its process .SIGABRT. instead of giving a reason"):
        process.ask("build", {})


def test_options_of_plans_import_nothing_heavy() -> None:
    script = (
        "import sys; from export.tensorrt.options import PlanOptions; PlanOptions()\n"
        "assert not {'torch', 'onnx', 'onnx_ir', 'onnxruntime', 'tensorrt', 'tensorrt_rtx_bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
