"""Fitting the integer baselines: means, errors, what the mean is for, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import save_tiny, tiny, tiny_tokenizer

from calib import codec as codecs
from calib import intkv
from calib.cli import main
from calib.fit import fit_codec
from calib.quality import measure
from calib.record import held_out, read
from calib.texts import Text, token_windows
from plugins.attention import rotate
from plugins.errors import UserError
from plugins.intkv.config import Int4Config, IntKVConfig, KIVI2Config

TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))
CONTEXT = 256


def fit(folder: Path, config: IntKVConfig, model=None, text: Text = TEXT) -> codecs.CodecInfo:
    model = model or tiny("llama", num_hidden_layers=2)
    return fit_codec(model, tiny_tokenizer(), config, [text], "quick", 0, CONTEXT, folder, progress=False)


@pytest.mark.parametrize("key_space", ["pre_rope", "post_rope"])
def test_the_means_are_those_of_the_windows_that_are_not_held_out(tmp_path: Path, key_space: str) -> None:
    config = Int4Config(32, key_space=key_space, sinks=7)
    model = tiny("qwen2", num_hidden_layers=2)
    info = fit(tmp_path / "codec", config, model)
    windows = token_windows(tiny_tokenizer(), [TEXT], CONTEXT, 5)
    kept = [window for window, held in zip(windows, held_out(len(windows)), strict=True) if not held]
    assert (len(windows), len(kept), info.vectors) == (5, 4, 4 * (CONTEXT - 7))
    sums = {}

    def see(call, number: int) -> None:
        keys = rotate(call.k, call.cos, call.sin) if key_space == "post_rope" else call.k
        for side, x in enumerate((keys, call.v)):
            sums[call.layer, side] = sums.get((call.layer, side), 0) + x[0, :, 7:].double().sum(1)

    with torch.no_grad():
        read(model, kept, see, lambda: None)
    for layer, tables in codecs.load(tmp_path / "codec").layers.items():
        for side in range(2):
            expected = (sums[layer, side] / info.vectors).float()
            torch.testing.assert_close(tables.center[side], expected, rtol=1e-4, atol=1e-4)


def test_fewer_bits_lose_more_and_everything_is_reported(tmp_path: Path) -> None:
    found = {}
    for bits in (2, 3, 4, 8):
        info = fit(tmp_path / str(bits), Int4Config(32, k_bits=bits, v_bits=bits))
        assert sorted(info.errors) == ["0", "1"] and (info.method, info.fit) == ("int4", "")
        found[bits] = [info.errors[layer][side] for layer in ("0", "1") for side in "kv"]
    for more, fewer in ((8, 4), (4, 3), (3, 2)):
        assert all(0 < a < b < 1 for a, b in zip(found[more], found[fewer], strict=True))
    # a uniform quantiser's error falls with the square of its steps, of which there are 2^bits - 1
    assert found[4][0] / found[8][0] == pytest.approx((255 / 15) ** 2, rel=0.2)


def test_kivi_stores_no_means_and_its_codec_is_found_all_the_same(tmp_path: Path) -> None:
    fit(tmp_path / "codec", KIVI2Config(32, full_layers=(1,)))
    codec = codecs.load(tmp_path / "codec")
    assert type(codec.config) is KIVI2Config and list(codec.layers) == [0]
    assert (codec.layers[0].center == 0).all()


def biased_qwen(factor: float) -> torch.nn.Module:
    """Qwen2.5's trait: a key bias that dwarfs what a token adds."""
    model = tiny("qwen2", num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(factor)
    return model


@pytest.mark.parametrize("rotation", [True, False])
def test_without_the_mean_keys_with_a_bias_lose_much_more(tmp_path: Path, rotation: bool) -> None:
    model, scores, errors = biased_qwen(6), {}, {}
    windows = token_windows(tiny_tokenizer(), [TEXT], CONTEXT, 2)
    for mean in (True, False):
        config = Int4Config(32, mean=mean, rotation=rotation, window=16)
        errors[mean] = fit(tmp_path / str(mean), config, model).errors["1"]["k"]
        scores[mean] = sum(measure(model, codecs.load(tmp_path / str(mean)), windows, decoded=64).kl)
    assert errors[True] < 0.05 and errors[False] > 4 * errors[True]
    assert scores[False] > 2 * scores[True] > 0


def test_a_layer_that_loses_everything_is_refused_by_name() -> None:
    offsets = 50 * torch.arange(32)  # a bias: the steps between its least and its most are wider than what tokens add
    x = offsets + torch.randn(2, 2, 100, 32, generator=torch.Generator().manual_seed(0))
    spread = torch.randn(2, 2, 100, 32, generator=torch.Generator().manual_seed(1))
    plan = intkv.Plan(Int4Config(32, mean=False, rotation=False), windows=[[0] * 100] * 2)
    with pytest.raises(UserError, match=r"layer 7: 4 bits lose \d.* of the k vectors .* --set full_layers=7 .*=true"):
        plan.fit_layer((x, spread), 7, 0)
    with pytest.raises(UserError, match="of the v vectors"):
        plan.fit_layer((spread, x), 7, 0)
    centred = intkv.Plan(Int4Config(32, rotation=False), windows=[[0] * 100] * 2)
    assert centred.fit_layer((x, spread), 7, 0)[1]["k"] < 0.05


def test_a_fit_that_is_of_no_use_leaves_no_codec(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a quick fit needs"):
        fit(tmp_path / "codec", Int4Config(32), text=Text.of("short", TEXT.content[:300]))
    with pytest.raises(UserError, match="layer 0: 4 bits lose .* of the k vectors"):
        fit(tmp_path / "codec", Int4Config(32, mean=False, rotation=False), biased_qwen(20))
    assert not (tmp_path / "codec").exists()


# -- the command line


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", "qwen2", num_hidden_layers=2)
    (tmp_path / "words.txt").write_text(TEXT.content)
    return tmp_path


def call(place: Path, *arguments: str) -> int:
    common = ["--model", str(place / "model"), "--text", str(place / "words.txt"), "--context", "128"]
    return main(["fit", *common, "--out", str(place / "codec"), *arguments])


def test_fit_reports_as_json_and_for_people(place: Path, capsys) -> None:
    assert call(place, "--method", "int3", "--effort", "quick", "--set", "v_bits=4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["config"]["k_bits"], report["config"]["v_bits"]) == ("int3", 3, 4)
    assert report["ratio"] == pytest.approx((3 + 1 + 4 + 1) / 32, abs=1e-4)
    assert call(place, "--method", "kivi2") == 0
    out = capsys.readouterr().out
    assert "ratio 0.1875" in out and "held-out squared error" in out and "    1  " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "int4", "--ratio", "0.3"], "--ratio has no meaning with --method int4"),
        (["--method", "kivi2", "--ratio", "0.19"], "--ratio has no meaning with --method kivi2"),
        (["--method", "int8", "--fit", "fast"], "--fit has no meaning with --method int8"),
        (["--method", "int8", "--select-count", "5"], "no meaning with --method int8"),
        (["--method", "int4", "--set", "k_bits=5"], "k_bits=5 must be one of"),
        (["--method", "int4", "--set", "head_dim=8"], "one of the keys k_bits"),
        (["--method", "int4", "--set", "full_layers=0,1"], "no layer is left to compress"),
        (["--method", "int5"], "use one of none, deltakv, vqkv, int8, int4, int3, kivi2"),
    ],
)
def test_bad_input_gives_one_sentence(place: Path, capsys, arguments: list[str], said: str) -> None:
    assert call(place, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error
    assert not (place / "codec").exists()
