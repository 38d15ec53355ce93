"""Plans of TensorRT for RTX, built on a CPU; and what its parser makes of the graphs that are for TensorRT."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engines import follow, make_engine
from native import emulated
from trt_plugins import compiled

from export.inspect import describe
from export.show import show_description
from export.tensorrt import plan
from export.tensorrt.graph import write_graph
from export.tensorrt.options import PlanOptions, Profile, shapes
from export.tensorrt.process import ask
from plugins.deltakv.config import DeltaKVConfig
from plugins.errors import UserError
from plugins.graph import DOMAIN
from plugins.intkv.config import Int4Config
from plugins.vqkv.config import VQKVConfig
from runtime import Engine
from runtime.artefact import Artefact, write_config

installed = any(importlib.util.find_spec(name) for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"))
pytestmark = pytest.mark.skipif(not installed, reason="needs kvpack[tensorrt-rtx]")

SM = PlanOptions(targets=("sm_89",), prefill_tokens=(64,), batch=2)
EXACT = {"sinks": 2, "window": 16, "block": 16}
METHODS: dict[str, Any] = {
    "none": lambda dim: None,
    "int4": lambda dim: Int4Config(dim, **EXACT),
    "vqkv": lambda dim: VQKVConfig.from_ratio(0.172, dim, **EXACT),
    "deltakv": lambda dim: DeltaKVConfig(dim, 2, "24x8+16x4", stride=3, **EXACT),
    "selecting": lambda dim: DeltaKVConfig(dim, 2, "24x8+16x4", stride=3, select_fraction=0.4, **EXACT),
}
OBSERVERS = {"gemma2": (1,), "gemma3": (2,)}  # the first layer that does not slide
CASES = [("llama", method) for method in METHODS] + [("qwen2", method) for method in METHODS if method != "selecting"]
TRT = {"INT64": "int64", "INT32": "int32", "INT8": "int8", "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


def engine(folder: Path, family: str, method: str, backend: str = "tensorrt-rtx", dim: int = 32, **changes: Any) -> Any:
    """The graph of an engine whose plan is to be made; returns what `make_engine` does."""
    options = {"backend": backend, "dtype": "fp16", "kv_dtype": "fp16"} | changes.pop("options", {})
    settings = {"num_hidden_layers": 2, "head_dim": dim, "max_position_embeddings": 1024} | changes
    config = METHODS[method](dim)
    if method == "selecting" and family in OBSERVERS:
        config = replace(config, full_layers=OBSERVERS[family])
    return make_engine(folder, family, config, options, **settings)


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in ("files", "digest")}


def made(folder: Path, options: PlanOptions = SM) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the plan and finish the engine; returns what is told of it and the tensors the plan itself has."""
    config, tensors = config_of(folder), []

    def listening(task: str, request: dict[str, Any]) -> dict[str, Any]:
        result = ask(task, request)
        tensors.extend(result["tensors"])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "ask", listening)
        told = plan.make(folder, config, "tensorrt-rtx", options)
    (folder / "report.json").write_text(json.dumps({"plan": told}), encoding="utf-8")
    write_config(folder, config)
    return told, tensors


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_plan_is_built_of_the_graph_that_was_checked(
    tmp_path: Path, family: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "engine"
    model, codec = engine(folder, family, method)
    assert_no_branches(folder)
    if codec is not None:  # the graph itself, in ONNX Runtime, is right
        tokens = np.random.default_rng(0).integers(3, 250, (2, 90))
        with Engine.open(folder) as opened:
            found = follow(opened, model, codec, [tokens[0], tokens[1, :61]], [70, 41])
        assert found.difference < 0.1 and found.codes[1] + found.selections[1] <= 1e-2 * found.codes[0], str(found)
    told, tensors = made(folder)
    artefact = Artefact.open(folder)  # hashes, contract, aliases
    target = artefact.config["target"]
    assert target["backend"] == "tensorrt-rtx" and target["sm"] == ["8.9"] and target["plan"] == "engine.plan"
    assert target["plugins"] is None and target["in_place"] is False
    assert [profile["name"] for profile in target["profiles"]] == ["decode", "prefill-64"]
    assert (folder / "engine.plan").stat().st_size == told["bytes"] > 1 << 20
    assert not list(folder.glob("*.onnx*"))
    check_tensors(tensors, artefact, target["profiles"])
    assert told["layers"]["gemm"] > 0 and told["memory"]["weights"] > 0
    assert {state["input"]: state["output"] for state in told["states"]} == {s.name: s.alias for s in artefact.states}
    described = describe(artefact)
    assert described["plan"]["layers"] == told["layers"] and "no NVIDIA GPU" in described["plan"]["unopened"]
    capsys.readouterr()
    show_description(described)
    assert "second buffer" in capsys.readouterr().out


def assert_no_branches(folder: Path) -> None:
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    kinds = {node.op_type for function in graph.functions for node in function.node}
    assert "MatMul" in kinds and not kinds & {"If", "Loop", "Scan"}


def check_tensors(tensors: list[dict[str, Any]], artefact: Artefact, profiles: list[dict[str, Any]]) -> None:
    """Names, dtypes, shapes and profiles, as the plan has them, are the contract's."""
    specs = {spec.name: spec for spec in (*artefact.inputs, *artefact.outputs)}
    assert {tensor["name"] for tensor in tensors} == set(specs)
    assert len(tensors) == len(specs)
    for tensor in tensors:
        spec = specs[tensor["name"]]
        is_input = spec in artefact.inputs
        assert tensor["mode"] == ("input" if is_input else "output")
        assert TRT[tensor["dtype"].upper()] == spec.dtype
        assert len(tensor["shape"]) == len(spec.shape)
        for found, wanted in zip(tensor["shape"], spec.shape, strict=True):
            assert found in (wanted, -1) if isinstance(wanted, int) else found == -1 or spec.name == "logits", spec
        if is_input and spec.shape:
            for profile, three in zip(profiles, tensor["profiles"], strict=True):
                ranges = Profile(profile["name"], profile["tokens"], profile["batch"])
                assert three == shapes(spec, ranges.sizes(artefact.geometry, artefact.max_length))


def test_a_plan_for_several_gpus_keeps_its_graph_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    engine(folder, "llama", "none", num_hidden_layers=1)
    made(folder, PlanOptions(targets=("sm_80", "sm_120"), keep_onnx=True))
    target = Artefact.open(folder).config["target"]
    assert target["sm"] == ["8.0", "12.0"]
    assert {path.name for path in folder.glob("*.onnx*")} == {"model.onnx", "model.onnx.data"}


def test_a_node_that_the_parser_does_not_take_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    engine(folder, "llama", "none", num_hidden_layers=1)
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    graph.graph.node[-1].op_type = "NoSuchOp"
    graph.graph.node[-1].name = "the last one"
    onnx.save(graph, folder / "model.onnx")
    with pytest.raises(UserError, match=r"the node the last one \(NoSuchOp\)"):
        made(folder)


def test_a_process_that_ends_without_a_result_is_told() -> None:
    with pytest.raises(UserError, match="ended with 1 and no result"):
        ask("build", {"backend": "none of these"})


# -- graphs for TensorRT, as far as NVIDIA's parser for RTX goes, which knows plugins and cannot add them

OPS = {
    "none": {"DenseAttention", "AddRMSNormalization", "GatedActivation"},
    "int4": {"IntKVAttention"},
    "vqkv": {"VQKVAttention"},
    "selecting": {"DenseObservedAttention", "DeltaKVAttention"},
}
PARSE = """
import sys
from export.tensorrt.packages import PACKAGES
trt = PACKAGES["tensorrt-rtx"].load()
class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
    def log(self, severity, message):
        print(message, flush=True)
builder = trt.Builder(Logger())
if sys.argv[2:]:
    builder.get_plugin_registry().load_library(sys.argv[2])
network = builder.create_network(1)
parser = trt.OnnxParser(network, Logger())
parser.parse_from_file(sys.argv[1])
for number in range(parser.num_errors):
    print("refused:", parser.get_error(number).node_operator(), flush=True)
"""


def parse(*arguments: Path) -> str:
    """What the parser says of a graph, to the end of its process."""
    command = [sys.executable, "-c", PARSE, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


@pytest.mark.parametrize("method", OPS)
def test_the_real_parser_makes_the_real_plugins_of_a_graph_for_tensorrt(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "engine"
    graph, ours = all_but_plugins_parse(folder, "llama", method)
    assert OPS[method] <= set(ours)
    for op in OPS[method]:
        alone = folder / "alone.onnx"
        onnx.save(one_node(graph, op), alone)
        told = parse(alone, compiled(emulated().path))
        assert f"Searching for plugin: {op}, plugin_version: 1, plugin_namespace: {DOMAIN}" in told
        assert f"Successfully created plugin: {op}" in told, told[-600:]


def all_but_plugins_parse(folder: Path, family: str, method: str, **changes: Any) -> tuple[onnx.ModelProto, list[str]]:
    """The graph for tensorrt of a model, of which the parser refuses, without the library, the plugins alone; and those
    plugins' ops."""
    engine(folder, family, method, backend="tensorrt", dim=64, **changes)
    write_graph(folder / "model.onnx", folder / "plan.onnx", plugins=True)
    graph = onnx.load(folder / "plan.onnx", load_external_data=False)
    ours = [node.op_type for node in graph.graph.node if node.domain == DOMAIN]
    assert sum(op.endswith("Attention") for op in ours) == changes.get("num_hidden_layers", 2) and not graph.functions
    refused = re.findall(r"^refused: (\w+)$", parse(folder / "plan.onnx"), re.MULTILINE)
    assert refused == ours
    return graph, ours


def one_node(graph: onnx.ModelProto, op: str) -> onnx.ModelProto:
    """The first node of an op by itself: whatever it reads is an input of the graph."""
    node = next(node for node in graph.graph.node if node.op_type == op)
    inferred = {value.name: value for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info)}
    for tensor in graph.graph.initializer:
        inferred[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    read = list(dict.fromkeys(name for name in node.input if name))
    written = [onnx.helper.make_tensor_value_info(name, 10, None) for name in node.output]
    alone = onnx.helper.make_graph([node], "alone", [inferred[name] for name in read], written)
    return onnx.helper.make_model(alone, opset_imports=graph.opset_import, ir_version=graph.ir_version)


# -- every family, and the built-in model whole


FAMILIES: dict[str, dict[str, Any]] = {
    name: {"num_hidden_layers": 4}
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "smollm3")
}
FAMILIES["mistral"] |= {"sliding_window": None}  # otherwise all its layers slide


@pytest.mark.slow
@pytest.mark.parametrize("method", OPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_real_parser_takes_all_but_the_plugins_of_every_family(tmp_path: Path, family: str, method: str) -> None:
    all_but_plugins_parse(tmp_path / "engine", family, method, **FAMILIES[family])


@pytest.mark.slow
@pytest.mark.parametrize("sm", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_method_becomes_a_plan(tmp_path: Path, family: str, method: str, sm: str) -> None:
    folder = tmp_path / "engine"
    engine(folder, family, method, **FAMILIES[family])
    told, _ = made(folder, PlanOptions(targets=(sm,)))
    assert told["bytes"] > 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "int4", "vqkv", "deltakv"])
def test_the_built_in_model_becomes_a_plan_whole(home: Path, method: str) -> None:
    from export.cli import main

    out = home / f"plan-{method}"
    arguments = ["build", "--method", method, "--backend", "tensorrt-rtx", "--target", "sm_89", "--out", str(out)]
    assert main(arguments) == 0
    assert Artefact.open(out).config["target"]["backend"] == "tensorrt-rtx"
    shutil.rmtree(out)
