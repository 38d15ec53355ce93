import json

import numpy as np
import pytest
import torch
from families import tiny, tiny_tokenizer

from calib import codec as codecs
from calib import deltakv, fit, vqkv
from calib import train as training
from calib.adapter import layer_specs
from calib.record import LayerRecord, held_out
from calib.texts import Text
from plugins.deltakv.config import DeltaKVConfig
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


def interrupt(monkeypatch, owner, name: str, after: int) -> list:
    """Have `owner.name` count its calls in the list returned and raise KeyboardInterrupt once there were `after`."""
    original, done = getattr(owner, name), []

    def counted(*arguments):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return done


def test_an_interrupted_fit_goes_on_and_ends_with_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt(patch, vqkv, "fit_layer", 2)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "resumed")
    assert not (tmp_path / "resumed").exists()
    done = interrupt(monkeypatch, vqkv, "fit_layer", 9)
    run(tmp_path / "resumed")
    assert len(done) == 1
    whole, resumed = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    assert not (tmp_path / "resumed.partial").exists()


def test_layers_left_by_a_fit_with_other_arguments_are_not_used(tmp_path, efforts, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, vqkv, "fit_layer", 2)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "codec")
    run(tmp_path / "codec", seed=5)
    run(tmp_path / "fresh", seed=5)
    old, new = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("codec", "fresh"))
    assert old == new


# -- deltakv's quality fit


@pytest.fixture
def quality(monkeypatch):
    """`run` for a quality fit of two layers that takes four steps and writes a checkpoint after each."""
    monkeypatch.setitem(deltakv.EFFORTS, "quick", deltakv.Effort(tokens=8, least=2, queries=16))
    plan = training.TrainPlan(tokens=4 * 256, batch=256, micro=256, lr=0.02)
    monkeypatch.setitem(training.PLANS, "quick", plan)
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    made = DeltaKVConfig(32, 2, "24x4", stride=5, neighbors=2, full_layers=(0,), window=8, block=4)
    return lambda folder, **changes: run(folder, settings=made, context=128, **{"fit": "quality", **changes})


def test_an_interrupted_quality_fit_goes_on_and_ends_with_the_same_codec(tmp_path, quality, monkeypatch):
    whole = quality(tmp_path / "whole", choice={"error": 0.5})
    for owner, name, after in ((deltakv, "fit_layer", 1), (training._Trainer, "step", 2)):
        with monkeypatch.context() as patch:
            interrupt(patch, owner, name, after)
            with pytest.raises(KeyboardInterrupt):
                quality(tmp_path / "resumed")
        assert not (tmp_path / "resumed").exists()
    layers, steps = (
        interrupt(monkeypatch, deltakv, "fit_layer", 9),
        interrupt(monkeypatch, training._Trainer, "step", 9),
    )
    resumed = quality(tmp_path / "resumed", choice={"error": 0.5 + 1e-12})  # as another look at the model might say
    assert (len(layers), len(steps)) == (0, 2)
    a, b = ((tmp_path / name / codecs.TENSORS).read_bytes() for name in ("whole", "resumed"))
    assert a == b
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["resumed", "whole"]
    assert (whole.fit, resumed.fit, resumed.choice["error"]) == ("quality", "quality", 0.5 + 1e-12)
    assert codecs.load(tmp_path / "resumed").info == resumed
    assert resumed.errors == whole.errors and set(resumed.errors["1"]) >= {"output", "before", "after"}


def test_a_quality_fit_starts_from_what_the_fast_fit_gives(tmp_path, quality, monkeypatch):
    quality(tmp_path / "fast", fit="fast")
    seen = []
    monkeypatch.setattr(fit, "train", lambda model, tokenizer, codec, *rest: seen.append(codec) or codec)
    quality(tmp_path / "quality")
    assert seen[0].info.fit == "fast"
    for name, tensor in codecs.load(tmp_path / "fast").tensors().items():
        assert torch.equal(seen[0].tensors()[name], tensor), name


def test_only_deltakv_has_a_quality_fit_and_only_that_runs_in_several_processes(tmp_path, efforts):
    with pytest.raises(UserError, match="--fit quality trains deltakv's compressors and vqkv has none"):
        run(tmp_path / "codec", fit="quality")
    with pytest.raises(UserError, match="--fit best is unknown: use fast or quality"):
        run(tmp_path / "codec", fit="best")
    with pytest.raises(UserError, match="--fit fast runs in one process, not in 2"):
        fit.check_fit("deltakv", "fast", 2)
    assert not list(tmp_path.iterdir())


def test_layers_recorded_in_several_passes_give_the_same_codec(tmp_path, efforts, monkeypatch):
    run(tmp_path / "one")
    monkeypatch.setattr(fit, "RECORD_BYTES", 1)
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
