"""The integer methods' public definitions: presets, accounting, the Hadamard matrix, bad input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from plugins.errors import UserError
from plugins.intkv.config import Int3Config, Int4Config, Int8Config, IntKVConfig, KIVI2Config, hadamard
from plugins.intkv.onnx_body import plan
from plugins.layer import LayerSpec
from plugins.methods import DEFAULT_RATIOS, METHODS, config_class

PRESETS = (Int8Config, Int4Config, Int3Config, KIVI2Config)


@pytest.mark.parametrize(
    ("preset", "head_dim", "bits"),
    [
        (Int8Config, 64, 8 + 32 / 64),
        (Int4Config, 64, 4.5),
        (Int4Config, 128, 4.25),
        (Int3Config, 96, 3 + 32 / 96),
        (KIVI2Config, 64, 3),
        (KIVI2Config, 128, 3),
    ],
)
def test_the_ratio_counts_codes_scales_and_zeros(preset: type[IntKVConfig], head_dim: int, bits: float) -> None:
    assert preset(head_dim).ratio() == pytest.approx(bits / 16)


def test_layers_kept_full_and_uneven_sides_enter_the_ratio() -> None:
    config = IntKVConfig(64, k_bits=2, v_bits=8, k_axis="channel", block=64, group=16, full_layers=(0,))
    layer = (2 + 32 / 64 + 8 + 32 / 16) / 32
    assert config.ratio(4) == pytest.approx((1 + 3 * layer) / 4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("heads", [1, 3])
def test_an_encoded_token_takes_the_bytes_that_the_ratio_says(preset: type[IntKVConfig], heads: int) -> None:
    config, half = preset(64), ir.DataType.FLOAT16
    spec = LayerSpec(0, 3 * heads, heads, 64, 0.125, rope=0, rotary_dim=64)
    total = 0.0
    for dtype, shape in plan(spec, config, half).states.values():
        if shape[2] in ("code_rows", "ref_rows"):
            rows = 1 if shape[2] == "code_rows" else 1 / config.block
            total += shape[1] * rows * shape[3] * dtype.numpy().itemsize
    assert total == pytest.approx(config.ratio() * 2 * heads * 64 * 2)


def test_every_method_name_gives_a_configuration_of_that_name() -> None:
    assert [config_class(name).METHOD for name in METHODS] == list(METHODS)
    assert {preset.METHOD for preset in PRESETS} == set(METHODS) - set(DEFAULT_RATIOS)
    with pytest.raises(UserError, match="use one of deltakv, vqkv, int8, int4, int3, kivi2"):
        config_class("intkv")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_json_and_overrides(preset: type[IntKVConfig]) -> None:
    config = preset(64).override(["k_bits=3", "mean=true", "full_layers=0,5", "group=8"])
    assert type(config) is preset and config.METHOD == preset.METHOD
    assert (config.k_bits, config.mean, config.full_layers, config.group) == (3, True, (0, 5), 8)
    assert preset.from_json(config.to_json()) == config


def test_the_head_size_is_that_of_the_layers_that_are_compressed() -> None:
    sliding, full = (LayerSpec(n, 4, 2, dim, 0.1, window=window) for n, dim, window in ((0, 32, 16), (1, 64, 0)))
    assert Int4Config.for_layers([sliding, full]) == Int4Config(64)
    assert KIVI2Config.for_layers([sliding, full]) == KIVI2Config(64, group=32)
    assert KIVI2Config.for_layers([LayerSpec(0, 4, 2, 80, 0.1)]) == KIVI2Config(80, group=16)


@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 128, 256])
def test_the_hadamard_matrix_is_orthogonal_symmetric_and_flat(dim: int) -> None:
    matrix = hadamard(dim)
    size = dim & -dim
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    blocks = matrix.reshape(dim // size, size, dim // size, size).transpose(0, 2, 1, 3)
    parity = np.array([[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)])
    for row in range(dim // size):
        for column in range(dim // size):
            expected = (1 - 2 * parity) / size**0.5 if row == column else 0 * parity
            np.testing.assert_allclose(blocks[row, column], expected, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_dim": 0}, "head_dim=0 must be positive"),
        ({"k_bits": 5}, "k_bits=5 must be one of 2, 3, 4, 8"),
        ({"v_bits": 16}, "v_bits=16 must be one of"),
        ({"head_dim": 20, "v_bits": 3}, "v_bits=3 does not fill whole bytes with head_dim=20"),
        ({"k_axis": "head"}, "k_axis=head must be token or channel"),
        ({"group": 24}, "group=24 must be 0 or divide head_dim=64"),
        ({"group": -1}, "group=-1 must be 0 or divide"),
        ({"key_space": "rope"}, "key_space=rope must be pre_rope or post_rope"),
        ({"window": 0}, "window=0"),
        ({"k_axis": "channel", "block": 0}, "block=0"),
        ({"rotation": 1}, "rotation=1 is not of type bool"),
        ({"full_layers": (1, 1)}, "distinct layer numbers"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        IntKVConfig(**({"head_dim": 64} | fields))


def test_the_summary_tells_what_was_chosen() -> None:
    assert Int4Config(64).summary() == "K 4 bits per token, V 4 bits per token, mean and rotation, pre_rope"
    assert "K 2 bits per channel of 32 tokens, V 2 bits per token in groups of 32" in KIVI2Config(64).summary()
