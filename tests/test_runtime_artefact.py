"""An engine folder is refused, in one sentence, whatever is wrong with it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import tiny_artefact as tiny

from plugins.contract import break_even, bytes_at, dense_bytes
from plugins.errors import UserError
from plugins.geometry import Geometry
from runtime.artefact import Artefact, digest_of, write_config
from runtime.engine import Engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make(tmp_path / "engine", geometry=tiny.SMALL)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the configuration and sign it again, as a broken exporter would."""
    config = read(folder)
    change(config)
    config["digest"] = digest_of(config)
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(UserError) as caught:
        Artefact.open(folder, **options)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and ". " not in sentence
    return sentence


def test_a_sound_folder_opens_and_its_contract_is_read(folder: Path) -> None:
    artefact = Artefact.open(folder)
    assert artefact.geometry == tiny.SMALL and artefact.vocab_size == tiny.VOCAB
    assert [spec.name for spec in artefact.states] == ["exact", "codes"]


def test_the_digest_is_that_of_the_canonical_json_without_itself() -> None:
    import hashlib

    config = {"b": [1, 2.5, None], "a": {"ä": True}, "digest": "x"}
    text = '{"a":{"\\u00e4":true},"b":[1,2.5,null]}'
    assert digest_of(config) == hashlib.sha256(text.encode()).hexdigest()


def test_write_config_lists_every_file_and_can_be_repeated(folder: Path) -> None:
    config = read(folder)
    (folder / "report.json").write_text("{}")
    written = write_config(folder, config)
    assert set(written["files"]) == {entry.name for entry in folder.iterdir()} - {"config.json"}
    assert "report.json" in written["files"]
    Artefact.open(folder)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _symlink(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_flip, "is damaged"),
        (_truncate, "bytes, not"),
        (Path.unlink, "is missing"),
        (_symlink, "is a symbolic link"),
        (lambda path: os.link(path, path.parent.parent / "second"), "hard links"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    ],
    ids=["flip", "truncate", "missing", "symlink", "hardlink", "folder", "fifo"],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: Callable[[Path], object], complaint: str) -> None:
    damage(folder / name)
    sentence = refusal(folder)
    assert complaint in sentence and str(folder / name) in sentence


def test_verify_false_skips_only_the_hashes(folder: Path) -> None:
    _flip(folder / "tokenizer.json")
    Artefact.open(folder, verify=False)
    _truncate(folder / "tokenizer.json")
    assert "bytes, not" in refusal(folder, verify=False)


@pytest.mark.parametrize("name", ["config.json", "model.onnx"])
def test_a_configuration_that_is_no_regular_file_is_not_read(folder: Path, name: str) -> None:
    _symlink(folder / name)
    assert "symbolic link" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("\xff\xfe", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "has format None"),
        ('{"format": true}', "has format True"),
        ('{"format": 1}', "reads format 2"),
        ('{"format": 2}', "digest does not match"),
    ],
)
def test_a_configuration_that_is_no_configuration_is_refused(folder: Path, text: str, complaint: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert complaint in refusal(folder)


def test_a_hand_edited_configuration_is_refused(folder: Path) -> None:
    config = read(folder)
    config["limits"]["max_length"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    assert "was changed after the build" in refusal(folder)


def test_missing_and_unknown_keys_are_named(folder: Path) -> None:
    before = read(folder)
    rewrite(folder, lambda config: config.pop("geometry"))
    assert "lacks the key 'geometry'" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(before))
    rewrite(folder, lambda config: config.update(surprise=1))
    assert "has the unknown key 'surprise'" in refusal(folder)


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/hostname", "a\\b", "..", "", "config.json"])
def test_listed_names_may_not_leave_the_folder(folder: Path, name: str) -> None:
    rewrite(folder, lambda config: config["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))
    assert "not a plain file name" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["other.onnx", "plugin.so", "weights.data", "x.SAFETENSORS", "special_tokens_map.json"]
)
def test_unlisted_files_that_a_loader_could_pick_up_are_refused(folder: Path, name: str) -> None:
    (folder / "README.md").write_text("harmless")
    Artefact.open(folder)
    (folder / name).write_text("x")
    assert f"{name} is not listed" in refusal(folder)


def _state(config: dict[str, Any], side: str = "inputs") -> dict[str, Any]:
    return next(spec for spec in config[side] if spec["role"] == "state")


def _role(config: dict[str, Any], role: str) -> dict[str, Any]:
    return next(spec for spec in config["inputs"] if spec["role"] == role)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: _state(c).update(alias=None), "has no output of its own to alias"),
        (lambda c: _state(c).update(alias="codes_out"), "has no output of its own|differ in dtype or shape"),
        (lambda c: _state(c).update(alias="elsewhere"), "has no output of its own"),
        (lambda c: c["inputs"].remove(_state(c)), "is the alias of no input"),
        (lambda c: _state(c, "outputs").update(dtype="float32"), "differ in dtype or shape"),
        (lambda c: _state(c, "outputs")["shape"].__setitem__(2, 8), "differ in dtype or shape"),
        (lambda c: _state(c).update(dtype="object"), "has the dtype 'object'"),
        (lambda c: _state(c)["shape"].__setitem__(2, "pages"), "which no session can allocate"),
        (lambda c: _state(c)["shape"].__setitem__(2, 0), "which no session can allocate"),
        (lambda c: _state(c)["shape"].__setitem__(2, -1), "which no session can allocate"),
        (lambda c: _state(c).update(shape="batch"), "malformed"),
        (lambda c: _state(c).update(colour="red"), "unknown key 'colour'"),
        (lambda c: _state(c).pop("name"), "'name' is missing"),
        (lambda c: _role(c, "tokens").update(dtype="int32"), "'tokens' must be int64"),
        (lambda c: _role(c, "past_len").update(shape=["sequence"]), "'past_len' must be int32"),
        (lambda c: _role(c, "logit_index").update(role="magic"), "role 'magic' is unknown"),
        (lambda c: _role(c, "new_len").update(role="past_len"), "same role|no input has the role"),
        (lambda c: c["inputs"].remove(_role(c, "new_len")), "no input has the role 'new_len'"),
        (lambda c: c["inputs"].remove(_role(c, "enc_dst")), "must come together"),
        (lambda c: c["inputs"].append(copy.deepcopy(_state(c))), "same name"),
        (lambda c: c.update(geometry=None), "must come together|can allocate"),
        (lambda c: c["geometry"].update(block=0), "malformed"),
        (lambda c: c["limits"].update(max_length=0), "malformed"),
        (lambda c: c["limits"].update(max_length="8192"), "malformed"),
        (lambda c: c["model"].pop("head_dim"), "'head_dim' is missing"),
        (lambda c: c["outputs"].pop(0), "one output 'logits'"),
        (lambda c: c["outputs"][0]["shape"].__setitem__(2, 7), "do not have the vocabulary"),
        (lambda c: c["outputs"].append({**_state(c), "name": "z", "role": "debug"}), "neither the logits nor a state"),
    ],
)
def test_a_contract_that_cannot_be_run_is_refused(folder: Path, change: Callable, complaint: str) -> None:
    rewrite(folder, change)
    sentence = refusal(folder)
    assert any(part in sentence for part in complaint.split("|")), sentence
    assert "config.json" in sentence and "python -m export" in sentence


def _output(config: dict[str, Any], role: str) -> dict[str, Any]:
    return next(spec for spec in config["outputs"] if spec["role"] == role)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c["inputs"].remove(_role(c, "select_len")), "must come together"),
        (lambda c: c["inputs"].remove(_role(c, "select_width")), "must come together"),
        (lambda c: _role(c, "select_width").update(shape=["batch"]), "'select_width' must be int32 []"),
        (lambda c: _output(c, "selected").update(dtype="int64"), "'layer0.selected' must be int32"),
        (lambda c: _output(c, "selected").update(shape=["batch", 8]), "'layer0.selected' must be int32"),
        (lambda c: _output(c, "selected").update(name="chosen"), "not named after its layer and role"),
    ],
)
def test_a_selection_that_cannot_be_run_is_refused(tmp_path: Path, change: Callable, complaint: str) -> None:
    folder = tiny.make(tmp_path / "selecting", geometry=tiny.SELECTING)
    assert Artefact.open(folder).selected == {0: "layer0.selected"}
    rewrite(folder, change)
    assert complaint in refusal(folder)


def open_refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Engine.open(folder, threads=1)
    return str(caught.value)


def test_an_engine_for_another_backend_is_refused(folder: Path) -> None:
    rewrite(folder, lambda config: config["target"].update(backend="openvino"))
    assert "is an engine for 'openvino'" in open_refusal(folder)


def test_a_graph_that_disagrees_with_the_contract_is_refused(folder: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        _state(config).update(alias="exact_new")
        _state(config, "outputs").update(name="exact_new")

    before = read(folder)
    rewrite(folder, rename)
    assert "disagree about the tensor 'exact_" in open_refusal(folder)
    (folder / "config.json").write_text(json.dumps(before))

    def widen(config: dict[str, Any]) -> None:
        _state(config)["shape"][2] = _state(config, "outputs")["shape"][2] = 99

    rewrite(folder, widen)
    assert "'exact'" in open_refusal(folder)


def edit_model(folder: Path, change: Callable[[onnx.TensorProto], object]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(next(tensor for tensor in model.graph.initializer if tensor.name == "E"))
    onnx.save(model, folder / "model.onnx")
    write_config(folder, read(folder))


def set_entry(tensor: onnx.TensorProto, key: str, value: str) -> None:
    kept = [(entry.key, entry.value) for entry in tensor.external_data if entry.key != key]
    del tensor.external_data[:]
    for name, text in [*kept, (key, value)]:
        tensor.external_data.add(key=name, value=text)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("location", "../secret.bin", "'../secret.bin', which is no file of the engine"),
        ("location", "/etc/passwd", "'/etc/passwd', which is no file of the engine"),
        ("offset", "999999999", "beyond the end of 'model.onnx.data'"),
        ("length", "999999999", "beyond the end of 'model.onnx.data'"),
        ("offset", "-8", "beyond the end of 'model.onnx.data'"),
        ("offset", "x", "is not an ONNX model"),
    ],
)
def test_weights_may_only_come_from_inside_the_engine(folder: Path, key: str, value: str, complaint: str) -> None:
    (folder.parent / "secret.bin").write_bytes(bytes(1 << 16))
    edit_model(folder, lambda tensor: set_entry(tensor, key, value))
    assert complaint in open_refusal(folder)


def test_weights_hidden_in_a_node_attribute_are_checked_too(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    hidden = onnx.TensorProto(name="h", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    hidden.external_data.add(key="location", value="/etc/passwd")
    node = onnx.helper.make_node("Constant", [], ["unused"], value=hidden)
    branch = onnx.helper.make_graph([node], "g", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    onnx.save(model, folder / "model.onnx")
    write_config(folder, read(folder))
    assert "'/etc/passwd', which is no file" in open_refusal(folder)


def test_a_model_that_is_no_model_is_refused(folder: Path) -> None:
    for content in (b"\x3a\xff\xff\xff\xff\x0f", b"not onnx at all", b"\xff" * 20):
        (folder / "model.onnx").write_bytes(content)
        write_config(folder, read(folder))
        assert "model.onnx" in open_refusal(folder)


@pytest.mark.parametrize(("block", "stride"), [(3, 0), (3, 4), (1, 5), (4, 6), (4, 2)])
def test_the_break_even_length_is_where_fixed_and_code_bytes_undercut_fp16(
    tmp_path: Path, block: int, stride: int
) -> None:
    geometry = Geometry(sinks=2, window=5, block=block, stride=stride)
    artefact = Artefact.open(tiny.make(tmp_path / "engine", geometry=geometry))
    model = {"num_layers": 1, "num_kv_heads": 1, "head_dim": tiny.WIDTH}

    def total(tokens: int, fixed: int) -> int:
        return fixed + bytes_at(artefact.states, tokens, geometry)

    for fixed in (0, 1000, 5000):
        length = break_even(artefact.states, geometry, model, fixed)
        assert length is not None
        boundaries = range(7, 2000, block)  # sinks + window + a multiple of the block
        bad = [tokens for tokens in boundaries if total(tokens, fixed) > dense_bytes(model, tokens)]
        assert length == (bad[-1] + block if bad else 7) and length < 1900
    dense = Artefact.open(tiny.make(tmp_path / "dense"))
    assert dense.break_even is None


def test_states_that_never_undercut_fp16_have_no_break_even_length(tmp_path: Path) -> None:
    geometry = Geometry(sinks=2, window=5, block=1, stride=1)  # every row is kept twice
    artefact = Artefact.open(tiny.make(tmp_path / "engine", geometry=geometry))
    assert break_even(artefact.states, geometry, {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}, 0) is None
