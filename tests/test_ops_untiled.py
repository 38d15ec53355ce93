"""The ops' bodies without tiles and branches, which TensorRT for RTX compiles, by the tests of those with."""

from __future__ import annotations

import pytest
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


@pytest.fixture(autouse=True)
def untiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "tiled", False)


def test_a_body_without_tiles_has_neither_loops_nor_branches() -> None:
    plan = dense.plan(LayerSpec(0, 4, 2, 16, 0.25), FLOAT)
    kinds = {tiled: {node.op_type for node in plan.function(Body(tiled=tiled), "").graph} for tiled in (True, False)}
    assert {"Scan", "If"} <= kinds[True] and not {"Scan", "If"} & kinds[False]
