import json
from dataclasses import fields

import pytest

from plugins.errors import UserError
from plugins.vqkv import VQKVConfig
from plugins.vqkv.config import stages_from_text, stages_to_text


def small(**changes) -> VQKVConfig:
    values = {"head_dim": 64, "k_groups": 16, "v_groups": 16, "k_stages": (16, 12), "v_stages": (16,)}
    return VQKVConfig(**{**values, **changes})


def test_the_papers_llama_configuration_keeps_the_published_fraction():
    paper = VQKVConfig.paper_llama31_8b()
    assert paper.bits() == 560 + 144
    assert paper.ratio() == 0.171875
    assert (paper.k_groups, paper.key_space, paper.projection) == (1, "post_rope", True)


def test_bits_count_every_lookup_by_its_own_codebook_size():
    config = small(k_entries=1024, v_entries=512)
    assert config.bits() == 28 * 10 + 16 * 9
    assert config.ratio() == (28 * 10 + 16 * 9) / (2 * 64 * 16)


def test_full_layers_enter_the_ratio_as_whole():
    config = small(full_layers=(0, 29))
    assert config.ratio(30) == pytest.approx((2 + 28 * 0.171875) / 30)
    with pytest.raises(UserError, match="names layers of a model that has 20"):
        config.ratio(20)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [0.0625, 0.1, 0.125, 0.15, 0.172, 0.2, 0.25, 0.3])
def test_from_ratio_stays_within_its_slack_and_is_exportable(head_dim, ratio):
    config = VQKVConfig.from_ratio(ratio, head_dim)
    assert ratio - 0.04 <= config.ratio() <= ratio + 0.005
    assert max(config.k_entries, config.v_entries) <= 256


def test_a_larger_ratio_never_gives_fewer_bits():
    bits = [VQKVConfig.from_ratio(0.06 + 0.002 * step, 64).bits() for step in range(126)]
    assert bits == sorted(bits)


@pytest.mark.parametrize("ratio", [-1.0, 0.0, 0.05, 0.4, 1.0, float("nan")])
def test_a_ratio_out_of_reach_names_the_range(ratio):
    with pytest.raises(UserError, match=r"--ratio takes 0\.0625 to 0\.3125"):
        VQKVConfig.from_ratio(ratio, 64)


def test_overrides_of_from_ratio_replace_fields():
    assert VQKVConfig.from_ratio(0.172, 64, key_space="post_rope").key_space == "post_rope"


def test_override_reads_back_everything_describe_writes():
    config = VQKVConfig.paper_llama31_8b()
    described = config.describe()
    assert set(described) == {field.name for field in fields(config)}
    settings = [f"{key}={text}" for key, text in described.items() if key != "head_dim"]
    assert VQKVConfig.from_ratio(0.172, 128).override(settings) == config


def test_override_applies_all_settings_before_it_checks():
    changed = small().override(["k_groups=1", "k_stages=28x1", "full_layers=0, 3", "mean=no"])
    assert (changed.k_groups, changed.k_stages, changed.full_layers, changed.mean) == (1, (1,) * 28, (0, 3), False)


@pytest.mark.parametrize("setting", ["nonsense=1", "head_dim=32", "mean"])
def test_an_unknown_setting_lists_the_keys(setting):
    with pytest.raises(UserError, match=r"one of the keys k_groups, v_groups, .* block"):
        small().override([setting])


@pytest.mark.parametrize("setting", ["k_stages=16-12", "mean=perhaps", "window=many", "full_layers=a"])
def test_an_unreadable_value_shows_how_to_write_it(setting):
    with pytest.raises(UserError, match="write it like"):
        small().override([setting])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k_groups": 5}, "k_groups=5 must divide head_dim=64"),
        ({"k_stages": (12, 16)}, "k_stages=12\\+16 must be non-increasing"),
        ({"v_stages": (17,)}, "from 1 to v_groups=16"),
        ({"v_stages": ()}, r"v_stages=\(none\)"),
        ({"v_entries": 1}, "v_entries=1"),
        ({"key_space": "rope"}, "pre_rope or post_rope"),
        ({"tables": "model"}, "head or layer"),
        ({"full_layers": (1, 1)}, "distinct"),
        ({"window": 0}, "window=0"),
        ({"mean": 1}, "mean=1 is not of type bool"),
        ({"k_stages": [16]}, "not of type"),
    ],
)
def test_a_field_out_of_range_is_named(changes, said):
    with pytest.raises(UserError, match=said):
        small(**changes)


def test_json_round_trip_and_its_errors():
    config = small(full_layers=(2,))
    data = json.loads(json.dumps(config.to_json()))
    assert VQKVConfig.from_json(data) == config
    assert VQKVConfig.from_json(json.dumps(data)) == config
    with pytest.raises(UserError, match="unknown vqkv configuration keys: colour"):
        VQKVConfig.from_json({**data, "colour": 1})
    with pytest.raises(UserError, match="missing vqkv configuration keys: k_groups"):
        VQKVConfig.from_json({key: value for key, value in data.items() if key != "k_groups"})


@pytest.mark.parametrize(
    ("stages", "text"),
    [((16, 12), "16+12"), ((1,) * 56, "56x1"), ((8, 8, 8, 3), "3x8+3"), ((4,), "4"), ((4, 4), "4+4")],
)
def test_stages_have_a_compact_text(stages, text):
    assert stages_to_text(stages) == text
    assert stages_from_text(text) == stages


def test_layout_tiles_brings_what_it_takes_along():
    config = VQKVConfig.from_ratio(0.172, 128).override(["layout=tiles"])
    assert (config.key_space, config.k_stages, config.v_stages) == ("post_rope", (32, 24), (32,))
    assert config.ratio() == 0.171875
    assert VQKVConfig.from_ratio(0.125, 128).override(["layout=tiles", "window=64"]).k_stages == (32,)
    assert config.override(["window=64"]).layout == "tiles"


@pytest.mark.parametrize("setting", ["key_space=pre_rope", "v_stages=32+8", "block=24", "v_groups=64", "v_entries=128"])
def test_layout_tiles_refuses_what_its_kernel_cannot_read(setting):
    with pytest.raises(UserError, match="layout=tiles takes key_space=post_rope, 32 groups of both sides, v_stages=32"):
        VQKVConfig.from_ratio(0.172, 128).override(["layout=tiles", setting])


def test_layout_tiles_needs_a_code_for_every_four_values():
    with pytest.raises(UserError, match="layout=tiles reads at least 64 codes"):
        VQKVConfig.from_ratio(0.0625, 128).override(["layout=tiles"])


def test_what_a_gpu_would_rather_read_is_told() -> None:
    config = VQKVConfig.from_ratio(0.172, 128)
    assert "layout=tiles" in config.faster_on_gpu()
    assert config.override(["layout=tiles"]).faster_on_gpu() == ""
    assert VQKVConfig.from_ratio(0.172, 64).faster_on_gpu() == ""
