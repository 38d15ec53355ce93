import json

import numpy as np
import pytest
from families import tiny, tiny_tokenizer

from calib import codec as codecs
from calib import fit, vqkv
from calib.adapter import layer_specs
from calib.record import LayerRecord, held_out
from calib.texts import Text
from plugins.errors import UserError
from plugins.vqkv import VQKVConfig

PLAN = vqkv.Effort(vectors=20, least=4, share=1.0, queries=16, warm=4, sweeps=3)
TEXT = Text.of("words", " ".join(f"{a} and the {b} in {a * b}" for a in range(20) for b in range(40)))


def config(**changes) -> VQKVConfig:
    values = {"head_dim": 32, "k_groups": 8, "v_groups": 4, "k_stages": (8, 4), "v_stages": (4,)}
    return VQKVConfig(**{**values, "k_entries": 16, "v_entries": 8, **changes})


@pytest.fixture
def efforts(monkeypatch):
    monkeypatch.setitem(vqkv.EFFORTS, "quick", PLAN)


def run(folder, model=None, settings=None, **changes):
    arguments = {"effort": "quick", "seed": 0, "context": 256, "out_dir": folder, "progress": False, **changes}
    texts = arguments.pop("texts", [TEXT])
    return fit.fit_codec(
        model or tiny("llama", num_hidden_layers=3), tiny_tokenizer(), settings or config(), texts, **arguments
    )


# -- a whole codec


def test_the_same_seed_gives_the_same_codec_and_another_seed_another(tmp_path, efforts):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in "abc")
    assert a == b and a != c


def test_a_codec_has_the_tensors_the_contract_names(tmp_path, efforts):
    info = run(tmp_path / "codec", model_name="tiny", model_sha256="ab" * 32)
    tensors = codecs.load(tmp_path / "codec").tensors()
    assert {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("layers.2.")} == {
        "layers.2.k.books": (2, 12, 16, 4),
        "layers.2.k.encode": (2, 32, 32),
        "layers.2.k.decode": (2, 32, 32),
        "layers.2.k.mean": (2, 32),
        "layers.2.v.books": (2, 4, 8, 8),
        "layers.2.v.encode": (2, 32, 32),
        "layers.2.v.decode": (2, 32, 32),
        "layers.2.v.mean": (2, 32),
    }
    description = json.loads((tmp_path / "codec" / codecs.DESCRIPTION).read_text())
    assert description["texts"] == [{"name": "words", "sha256": TEXT.sha256}]
    assert (description["model"]["name"], description["effort"], description["seed"]) == ("tiny", "quick", 0)
    assert len(info.errors["0"]["k"]["stages"]) == 2 and info.errors["0"]["k"]["stages"][-1] < 0.5


def test_full_and_sliding_window_layers_get_no_codes(tmp_path, efforts):
    run(tmp_path / "codec", tiny("gemma2"), config(full_layers=(3,)))
    assert sorted(codecs.load(tmp_path / "codec").layers) == [1]


def test_an_interrupted_fit_goes_on_and_ends_with_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "whole")
    original, done = vqkv.fit_layer, []

    def failing(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(vqkv, "fit_layer", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed")
    assert not (tmp_path / "resumed").exists()
    done.clear()
    monkeypatch.setattr(vqkv, "fit_layer", lambda *arguments: done.append(1) or original(*arguments))
    run(tmp_path / "resumed")
    assert len(done) == 1
    whole, resumed = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    assert not (tmp_path / "resumed.partial").exists()


def test_layers_left_by_a_fit_with_other_arguments_are_not_used(tmp_path, efforts, monkeypatch):
    stop = fit.Partial.remove
    monkeypatch.setattr(fit.Partial, "remove", lambda self: None)
    run(tmp_path / "codec")
    monkeypatch.setattr(fit.Partial, "remove", stop)
    run(tmp_path / "codec", seed=5)
    run(tmp_path / "fresh", seed=5)
    old, new = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("codec", "fresh"))
    assert old == new


def test_layers_recorded_in_several_passes_give_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "one")
    monkeypatch.setitem(fit.RECORD_BYTES, "cpu", 1)
    run(tmp_path / "many")
    one, many = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("one", "many"))
    assert one == many


def test_a_short_text_is_refused_with_the_tokens_there_and_needed(tmp_path, efforts):
    tokens = len(tiny_tokenizer()(TEXT.content).input_ids)
    short = Text.of("short", TEXT.content[: len(TEXT.content) * 300 // tokens])
    with pytest.raises(UserError, match="the texts give 256 tokens in windows of 256, a quick fit needs 512"):
        run(tmp_path / "codec", texts=[short], settings=config(k_entries=32))
    assert not list(tmp_path.iterdir())


def test_a_layer_whose_codes_lose_everything_is_named(tmp_path, efforts, monkeypatch):
    def useless(seen: LayerRecord, *arguments):
        sides, errors = original(seen, *arguments)
        errors["v"]["stages"][-1] = float("nan")
        return sides, errors

    original = vqkv.fit_layer
    monkeypatch.setattr(vqkv, "fit_layer", useless)
    with pytest.raises(UserError, match="layer 0: the v codes lose nan .* --set full_layers=0"):
        run(tmp_path / "codec")


def test_a_folder_that_is_no_codec_is_not_overwritten(tmp_path, efforts):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists and is not a codec folder"):
        run(tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_the_head_size_must_be_the_models(tmp_path, efforts):
    with pytest.raises(UserError, match="layer 0 has head_dim 32, the configuration is for 64"):
        run(tmp_path / "codec", settings=VQKVConfig.from_ratio(0.172, 64))


def test_every_eighth_window_is_held_out_and_at_least_one():
    assert np.flatnonzero(held_out(20)).tolist() == [7, 15]
    assert held_out(3) == [False, False, True]


def test_specs_name_the_layers_that_get_codes():
    specs = layer_specs(tiny("gemma3"))
    assert codecs.compressed_layers(config(), specs) == [2, 3]
    with pytest.raises(UserError, match=r"full_layers=\[9\] are no layers"):
        codecs.compressed_layers(config(full_layers=(9,)), specs)
    with pytest.raises(UserError, match="no layer is left"):
        codecs.compressed_layers(config(full_layers=(2, 3)), specs)
