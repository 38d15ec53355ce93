"""The ops' bodies without tiles and branches, which TensorRT for RTX compiles, by the tests of those with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import inliner
from ops import Op
from test_deltakv_op import (  # noqa: F401
    test_a_sequence_does_not_depend_on_the_others_of_its_batch,
    test_attention_and_stored_rows_equal_the_reference,
    test_the_observer_selects_the_rows_that_get_most_attention,
)
from test_intkv_op import test_the_op_equals_the_reference, test_zeroed_and_trash_rows_never_show  # noqa: F401
from test_ops import (  # noqa: F401
    small_tiles,
    test_dense_attention_equals_the_reference,
    test_vqkv_attention_and_its_codes_equal_the_reference,
    test_vqkv_codes_in_tiles_are_the_same_codes,
)

from plugins.dense import onnx_body as dense
from plugins.graph import FLOAT, Body
from plugins.layer import LayerSpec


class Watched(ort.InferenceSession):
    """Of every product, no more than one operand may be spread over the other's leading dimensions: where both are and
    the numbers of their matrices are equal, ONNX Runtime's CUDA provider multiplies them pair by pair instead."""

    def __init__(self, model: bytes, **rest: Any) -> None:
        proto = inliner.inline_local_functions(onnx.load_from_string(model))
        self.results = [output.name for output in proto.graph.output]
        self.pairs = [tuple(node.input) for node in proto.graph.node if node.op_type == "MatMul"]
        given = {value.name for value in (*proto.graph.output, *proto.graph.input, *proto.graph.initializer)}
        for name in sorted({name for pair in self.pairs for name in pair} - given):
            proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        super().__init__(proto.SerializeToString(), **rest)

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        names = [output.name for output in self.get_outputs()]
        found = feeds | dict(zip(names, super().run(names, feeds), strict=True))
        for pair in self.pairs:
            if all(name in found for name in pair):
                left, right = (found[name].shape[:-2] for name in pair)
                both = np.broadcast_shapes(left, right)
                assert left == both or right == both or not right, pair
        return [found[name] for name in self.results]


@pytest.fixture(autouse=True)
def untiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "tiled", False)
    monkeypatch.setattr(ort, "InferenceSession", Watched)


def test_a_body_without_tiles_has_neither_loops_nor_branches() -> None:
    plan = dense.plan(LayerSpec(0, 4, 2, 16, 0.25), FLOAT)
    kinds = {tiled: {node.op_type for node in plan.function(Body(tiled=tiled), "").graph} for tiled in (True, False)}
    assert {"Scan", "If"} <= kinds[True] and not {"Scan", "If"} & kinds[False]
