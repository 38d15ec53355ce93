import dataclasses
import math

import numpy as np
import pytest

from plugins.deltakv.config import DeltaKVConfig
from plugins.errors import UserError

BASE = DeltaKVConfig(head_dim=64, kv_heads=3, latents="96x4")


def test_the_papers_configurations_have_the_papers_ratios():
    llama = DeltaKVConfig.paper_llama31_8b()
    assert llama.ratio(32) == pytest.approx(5 / 32 + 27 / 32 * (0.1 + 0.0625)) == pytest.approx(0.293, abs=5e-4)
    assert dataclasses.replace(llama, latents="512x16").ratio(32) == pytest.approx(0.452, abs=5e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1 / 10 + 96 / 384 / 4),
        ({"stride": 4, "latents": "96x8"}, 1 / 4 + 96 / 384 / 2),
        ({"reference_bits": 8}, 1 / 20 + 96 / 384 / 4),
        ({"latents": "384x2"}, 1 / 10 + 1 / 8),
        ({"latents": "16x8+64x4+128x2"}, 1 / 10 + (16 * 8 + 64 * 4 + 128 * 2) / 384 / 16),
    ],
)
def test_a_layers_ratio_counts_references_and_latents(changes, expected):
    assert dataclasses.replace(BASE, **changes).layer_ratio() == pytest.approx(expected)


def test_full_layers_count_as_whole():
    config = dataclasses.replace(BASE, full_layers=(0, 3))
    assert config.ratio(10) == pytest.approx(0.2 + 0.8 * config.layer_ratio())
    with pytest.raises(UserError, match="names layers of a model that has 3"):
        config.ratio(3)


def test_settings_override_fields_and_read_back_as_they_are_written():
    changed = BASE.override(
        ["stride=20", "full_layers=0,4,9", "select_fraction=0.17", "compressor=swiglu", "hidden=768"]
    )
    assert (changed.stride, changed.full_layers, changed.select_fraction) == (20, (0, 4, 9), 0.17)
    again = BASE.override([f"{k}={v}" for k, v in changed.describe().items() if k not in DeltaKVConfig.SHAPE])
    assert again == changed == DeltaKVConfig.from_json(changed.to_json())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("latents=96x3", "latents=96x3: 3 bits must be one of 2, 4, 8, 16"),
        ("latents=392x4", "latents=392x4 must be at most 384 values"),
        ("latents=200x4+200x2", "must be at most 384 values"),
        ("latents=60x4", "in segments of multiples of 8"),
        ("latents=0x8+96x4", "in segments of multiples of 8"),
        ("latents=8x16+96x4", "16 bits stand alone, like 104x16"),
        ("latents=many", "latents=many must be segments of values and bits, like 80x8"),
        ("stride=0", "stride=0 must be at least 1"),
        ("neighbors=9", "neighbors=9 must be from 1 to sinks=8"),
        ("reference_bits=4", "reference_bits=4 must be 8 or 16"),
        ("compressor=gelu", "compressor=gelu must be linear or swiglu"),
        ("hidden=64", "hidden=64 must be positive with compressor=swiglu and 0 with linear"),
        ("select_fraction=1", "the fraction must be below 1"),
        ("select_count=-1", "none may be negative"),
        ("full_layers=-1", "must be distinct layer numbers"),
        ("kv_heads=4", "expected key=value with one of the keys"),
        ("neighbors=many", "neighbors=many: cannot be read; write it like neighbors=2"),
        ("window=0", "window=0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(setting, message):
    with pytest.raises(UserError, match=message):
        BASE.override([setting])


def test_a_budget_is_a_fraction_or_a_count_but_not_both():
    with pytest.raises(UserError, match="two ways to set one budget"):
        BASE.override(["select_fraction=0.5", "select_count=100"])


def test_selected_rows_follow_the_budget_and_never_exceed_the_rows_there_are():
    past = np.array([0, 140, 168, 169, 1000, 5000], np.int32)
    rows = BASE.geometry().encoded(past)
    fraction = dataclasses.replace(BASE, select_fraction=0.17).geometry().selected(past)
    assert fraction.tolist() == [math.ceil(0.17 * row) for row in rows.tolist()]
    count = dataclasses.replace(BASE, select_count=100).geometry().selected(past)
    assert count.tolist() == [min(100, row) for row in rows.tolist()]
    assert BASE.geometry().selected(past).tolist() == rows.tolist()


def test_every_stride_th_code_row_is_a_reference():
    geometry = dataclasses.replace(BASE, stride=7).geometry()
    for stored in (0, 8, 136, 167, 168, 200, 231, 232, 1000):
        rows = geometry.encoded(stored)
        assert geometry.references(stored) == len([row for row in range(rows) if row % 7 == 0])
    assert geometry.references(np.array([168, 1000])).tolist() == [geometry.references(168), geometry.references(1000)]


def test_what_a_gpu_would_rather_read_is_told() -> None:
    mixed = DeltaKVConfig(128, 8, "640x8+576x4+640x2", full_layers=(0,))
    assert "latents=512x4" in mixed.faster_on_gpu()
    assert mixed.override(["latents=512x4"]).faster_on_gpu() == ""
    assert DeltaKVConfig(64, 3, "40x8+40x4", full_layers=(0,)).faster_on_gpu() == ""
