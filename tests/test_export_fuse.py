"""What is left of a traced model's nodes: one product per input, one op between products."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from families import FAMILIES, tiny

from calib.adapter import layer_specs
from export.fuse import fuse
from export.trace import OPAQUE, trace
from plugins.elementwise import ACTIVATIONS, add_norm, gated

APART = ("qwen3", "gemma3")  # queries and keys are normalised between the product and the attention
LAYERS = 4


@pytest.fixture(scope="module", params=list(FAMILIES))
def fused(request: pytest.FixtureRequest) -> tuple[str, ir.Model]:
    model = tiny(request.param)
    found = trace(model)
    opaque = [node for node in found.graph if node.op_type == OPAQUE]
    fuse(found, list(zip(opaque, layer_specs(model), strict=True)))
    return request.param, found


def test_a_layer_is_four_products_and_three_ops_between_them(fused: tuple[str, ir.Model]) -> None:
    name, model = fused
    counts = Counter(node.op_type for node in model.graph)
    assert counts["MatMul"] == 4 * LAYERS + 1
    assert counts["AddRMSNormalization"] == 2 * LAYERS
    assert counts["GatedActivation"] == LAYERS
    assert not counts["Sigmoid"] and not counts["Gelu"] and not counts["Slice"]
    assert counts["Transpose"] <= 1  # of an embedding that is also the last product's weight
    assert counts["Split"] == (LAYERS if name in APART else 0)
    assert counts["Reshape"] == (4 * LAYERS if name in APART else 0)


def test_an_attention_reads_one_product_where_nothing_is_in_between(fused: tuple[str, ir.Model]) -> None:
    name, model = fused
    for node in model.graph:
        if node.op_type == OPAQUE:
            assert (node.inputs[1] is None) == (node.inputs[2] is None) == (name not in APART)


def test_constants_that_were_joined_are_gone(fused: tuple[str, ir.Model]) -> None:
    _, model = fused
    assert all(value.uses() for value in model.graph.initializers.values())
    inputs = Counter(node.inputs[0] for node in model.graph if node.op_type == "MatMul")
    assert set(inputs.values()) == {1}


def run(function: ir.Function, feeds: list[np.ndarray]) -> list[np.ndarray]:
    kind = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=f"i{n}", type=kind, shape=ir.Shape(x.shape)) for n, x in enumerate(feeds)]
    node = ir.Node(function.domain, function.name, inputs, num_outputs=len(function.outputs))
    for n, value in enumerate(node.outputs):
        value.name, value.type, value.shape = f"o{n}", kind, ir.Shape([None] * 3)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 23, "kvpack": 1}, name="one")
    proto = ir.to_proto(ir.Model(graph, ir_version=10, functions=[function]))
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: x for value, x in zip(inputs, feeds, strict=True)})


def test_add_norm_is_the_sum_and_its_norm() -> None:
    x, y, weight = (torch.randn(shape) for shape in ((2, 3, 48), (2, 3, 48), (48,)))
    total, out = run(add_norm(1e-5, ""), [x.numpy(), y.numpy(), weight.numpy()])
    assert np.array_equal(total, (x + y).numpy())
    wanted = torch.nn.functional.rms_norm(x + y, (48,), weight, 1e-5)
    assert np.abs(out - wanted.numpy()).max() < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_opens_the_second_half_by_the_first(activation: str) -> None:
    x = torch.randn(2, 3, 96)
    gate, up = x.chunk(2, -1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    opened = (
        torch.nn.functional.silu(gate)
        if activation == "silu"
        else torch.nn.functional.gelu(gate, approximate=approximate)
    )
    (out,) = run(gated(activation, ""), [x.numpy()])
    assert np.abs(out - (opened * up).numpy()).max() < 1e-5
