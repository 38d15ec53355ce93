import dataclasses
import json

import pytest
import torch
from families import tiny
from safetensors.torch import load_file, save_file

from calib import codec as codecs
from calib.adapter import layer_specs
from calib.codec import Codec, CodecInfo
from plugins.errors import UserError
from plugins.vqkv import VQKVConfig
from plugins.vqkv.reference import LayerCodec, Quantiser

CONFIG = VQKVConfig(
    head_dim=32, k_groups=8, v_groups=8, k_stages=(8, 4), v_stages=(8,), k_entries=16, v_entries=16, full_layers=(2,)
)
MODEL = {"name": "tiny", "sha256": "ab" * 32, "architecture": "LlamaForCausalLM", "num_layers": 4}
MODEL |= {"num_kv_heads": 2, "head_dim": 32}


def make(layers=(0, 1, 3), model=MODEL, config=CONFIG) -> Codec:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def side(stages: tuple[int, ...]) -> Quantiser:
        return Quantiser(random(2, sum(stages), 16, 4), random(2, 32, 32), random(2, 32, 32), random(2, 32), stages)

    info = CodecInfo("vqkv", config, model, [{"name": "t", "sha256": "cd"}], "quick", 3, 256, 1000)
    return Codec(info, {layer: LayerCodec(config, side((8, 4)), side((8,))) for layer in layers})


def test_a_codec_folder_reads_back_as_it_was(tmp_path):
    codec = make()
    codecs.save(codec, tmp_path / "codec")
    back = codecs.load(tmp_path / "codec")
    assert back.info == codec.info
    for name, tensor in codec.tensors().items():
        assert torch.equal(back.tensors()[name], tensor)
    assert back.layers[0].k.stages == (8, 4)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["codec", "codec.json", "codec.safetensors"]


def test_a_write_that_fails_leaves_no_codec_and_keeps_the_old_one(tmp_path, monkeypatch):
    codecs.save(make(), tmp_path / "codec")
    before = (tmp_path / "codec" / codecs.TENSORS).read_bytes()

    def full(*arguments, **keywords):
        raise OSError("no space left")

    monkeypatch.setattr(codecs, "save_file", full)
    for name in ("codec", "other"):
        with pytest.raises(OSError):
            codecs.save(make((0,)), tmp_path / name)
    assert (tmp_path / "codec" / codecs.TENSORS).read_bytes() == before
    assert not (tmp_path / "other").exists()


def test_a_missing_or_unreadable_codec_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a codec folder .codec.json is missing"):
        codecs.load(tmp_path / "nowhere")
    codecs.save(make(), tmp_path / "codec")
    (tmp_path / "codec" / codecs.TENSORS).write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="holds no readable codec"):
        codecs.load(tmp_path / "codec")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, "format 99"),
        ({"method": "other"}, "method 'other'"),
        ({"surprise": 1}, "holds no readable codec"),
        ({"config": {"head_dim": 32}}, "missing vqkv configuration keys"),
        ({"model": {}}, "holds no readable codec"),
    ],
)
def test_a_description_of_another_kind_is_refused(tmp_path, change, said):
    codecs.save(make(), tmp_path / "codec")
    file = tmp_path / "codec" / codecs.DESCRIPTION
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=said):
        codecs.load(tmp_path / "codec")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layers.1.v.books", torch.zeros(2, 8, 16, 5), r"layers.1.v.books is float32 \[2, 8, 16, 5\], not float32"),
        ("layers.1.k.mean", torch.zeros(2, 32, dtype=torch.float16), "layers.1.k.mean is float16"),
        ("layers.3.k.encode", None, "layers.3.k.encode is missing"),
        ("layers.0.k.decode", torch.full((2, 32, 32), float("nan")), "k.decode has values that are not finite"),
        ("colour", torch.zeros(1), "holds colour, which is no part of a codec"),
    ],
)
def test_a_tensor_of_the_wrong_kind_is_named(tmp_path, name, value, said):
    codecs.save(make(), tmp_path / "codec")
    file = str(tmp_path / "codec" / codecs.TENSORS)
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file({**tensors, **({} if value is None else {name: value})}, file)
    with pytest.raises(UserError, match=said):
        codecs.load(tmp_path / "codec")


def test_the_codec_must_be_the_models():
    specs = layer_specs(tiny("llama"))
    make().check_model(specs, "ab" * 32)
    make().check_model(specs)
    with pytest.raises(UserError, match="fitted for tiny .abababababab., the model given has hash cdcdcdcdcdcd"):
        make().check_model(specs, "cd" * 32)
    with pytest.raises(UserError, match=r"tables for layers \[0, 1\], the model needs \[0, 1, 3\]"):
        make((0, 1)).check_model(specs)
    with pytest.raises(UserError, match="layer 0: the codec is for 2 KV heads, the model has 4"):
        make().check_model([dataclasses.replace(spec, num_kv_heads=4) for spec in specs])
    with pytest.raises(UserError, match="head_dim 64"):
        make().check_model([dataclasses.replace(spec, head_dim=64) for spec in specs])
