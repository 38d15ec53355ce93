"""Engines in bf16: what a build on a machine without a GPU writes, says and leaves to be checked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from families import save_tiny

from export.build import BuildOptions
from export.cli import main
from export.verify import stored_rows
from plugins.contract import ONNX_TYPES, TensorSpec
from plugins.geometry import Geometry
from runtime.artefact import Artefact, state_bytes
from runtime.canary import BF16_KL, BF16_TOP1, closeness, coarsest

CODEC = ["--method", "int4", "--set", "sinks=2", "--set", "window=8", "--set", "block=8", "--set", "mean=false"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("bf16")
    save_tiny(home / "model", "llama", num_hidden_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPACK_CACHE", str(home / "cache"))
        command = ["build", "--model", str(home / "model"), *CODEC, "--dtype", "bf16", "--out", str(home / "engine")]
        assert main(command) == 0
    return home / "engine"


def test_a_build_in_bf16_without_a_gpu_succeeds_and_says_that_it_is_not_verified(built: Path) -> None:
    report = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert report["verified"] is False and report["checks"] == []
    assert "bf16 runs on a GPU only" in report["unverified"] and "--provider cuda" in report["unverified"]
    artefact = Artefact.open(built)
    assert artefact.config["dtype"] == artefact.config["kv_dtype"] == "bf16"
    assert {spec.dtype for spec in artefact.states} == {"bfloat16", "int8"}
    assert state_bytes(artefact, 100) > 0


def test_weights_and_exact_rows_are_bf16_and_logits_are_not(built: Path) -> None:
    model = onnx.load(built / "model.onnx", load_external_data=False)
    weights = [tensor.data_type for tensor in model.graph.initializer if "weight" in tensor.name]
    assert weights and set(weights) == {ONNX_TYPES["bfloat16"]}
    assert model.graph.output[0].type.tensor_type.elem_type == ONNX_TYPES["float32"]
    states = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    assert all(states[spec.name] == ONNX_TYPES[spec.dtype] for spec in Artefact.open(built).states)


def test_the_configuration_tells_every_attention_as_the_graph_has_it(built: Path) -> None:
    model = onnx.load(built / "model.onnx", load_external_data=False)
    found = [node for node in model.graph.node if node.op_type == "IntKVAttention"]
    told = Artefact.open(built).config["nodes"]
    assert [node["op"] for node in told] == ["IntKVAttention"] * len(found) == ["IntKVAttention"] * 2
    for one, node in zip(told, found, strict=True):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert one["attributes"].keys() == attributes.keys()
        for name, wanted in attributes.items():
            got = one["attributes"][name]
            assert (got.encode() if isinstance(got, str) else got) == pytest.approx(wanted)


def test_checking_it_without_a_gpu_is_refused_in_one_sentence(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(built), "--model", "x"]) == 2
    assert "computes in bf16, which ONNX Runtime cannot do on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "kv"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp16")])
def test_the_cache_is_as_wide_as_the_weights_need(dtype: str, kv: str) -> None:
    assert BuildOptions(Path("x"), dtype=dtype).kv_dtype == kv
    assert BuildOptions(Path("x"), dtype=dtype, kv_dtype="fp32").kv_dtype == "fp32"


def test_bf16_is_held_to_bounds_of_its_own() -> None:
    assert coarsest({"dtype": "bf16", "kv_dtype": "fp16"}) == "bf16"
    logits = [np.zeros((4, 8), np.float32)]
    divergence, top1 = closeness("x", logits, logits, "bf16", 1.0)
    assert divergence.limit == BF16_KL and top1.limit == pytest.approx(1 - BF16_TOP1)


def test_bf16_rows_are_read_as_numbers() -> None:
    numbers = np.linspace(-2, 2, 2 * 6 * 3, dtype=np.float32).reshape(2, 1, 6, 3)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    spec = TensorSpec("layer3.scales", "state", "bfloat16", ("batch", 1, "code_rows", 3), "layer3.scales_out")
    artefact = SimpleNamespace(states=(spec,), geometry=Geometry(sinks=0, window=1, block=1))
    session = SimpleNamespace(
        engine=SimpleNamespace(artefact=artefact), lengths=np.array([6, 3]), state=lambda name: bits
    )
    rows = stored_rows(session)
    assert rows["0.3.scales"].dtype == np.float32
    np.testing.assert_allclose(rows["0.3.scales"], numbers[0, :, :5], rtol=2**-7)
    np.testing.assert_allclose(rows["1.3.scales"], numbers[1, :, :2], rtol=2**-7)
