"""An engine folder on disk: everything is checked here before anything in it is parsed or loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.contract import (
    HOST_INPUTS,
    OPTIONAL_OUTPUTS,
    ROW_SYMBOLS,
    STATE_DTYPES,
    TensorSpec,
    break_even,
    bytes_at,
    capacity_for,
    dense_bytes,
)
from plugins.errors import UserError
from plugins.files import write_whole
from plugins.geometry import Geometry

FORMAT = 2
REBUILD = "rebuild the engine with `python -m export build`"
REQUIRED = {
    "format", "kvpack", "model", "method", "dtype", "kv_dtype", "limits", "geometry", "inputs", "outputs",
    "fixed_bytes", "target", "files", "digest",
}  # fmt: skip
OPTIONAL = {"nodes"}
MODEL_KEYS = {"vocab_size", "num_layers", "num_kv_heads", "head_dim"}
# A stray file of one of these kinds could be picked up by a loader, so it must be listed.
LOADABLE = {".onnx", ".data", ".plan", ".safetensors", ".so", ".dll", ".jinja", ".json", ".model", ".bin"}
CONFIG_LIMIT = 16 << 20


@dataclass(frozen=True)
class Artefact:
    """A checked engine folder. `inputs` and `outputs` are the graph's tensor contract."""

    path: Path
    config: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    geometry: Geometry | None
    max_length: int
    vocab_size: int

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role == "state")

    @property
    def copies(self) -> int:
        """Buffers of every state tensor: 2 where a step writes to others than it reads."""
        return 1 if self.config["target"].get("in_place", True) else 2

    @property
    def buffers(self) -> tuple[TensorSpec, ...]:
        """Of every buffer that a session allocates its tensor."""
        return self.states * self.copies

    @property
    def selected(self) -> dict[int, str]:
        """Observing layer -> the output that says which code rows it chose for the layers after it."""
        names = (spec.name for spec in self.outputs if spec.role == "selected")
        return {int(name.removeprefix("layer").partition(".")[0]): name for name in names}

    @property
    def break_even(self) -> int | None:
        """Length from which fixed and per-sequence bytes together undercut an fp16 cache."""
        return break_even(self.buffers, self.geometry, self.config["model"], self.config["fixed_bytes"])

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Artefact:
        """Check the folder and return it. verify=False skips only the SHA-256 of the files. Raises UserError."""
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{folder} is not an engine folder: pass the folder that `python -m export build` wrote.")
        config = _read_config(folder)
        _check_files(folder, config["files"], verify)
        return _check_contract(folder, config)


def state_bytes(artefact: Artefact, tokens: int, batch: int = 1) -> int:
    """Bytes of the cache of a session that was given `tokens` tokens per sequence at once, all sequences together."""
    capacity = capacity_for(tokens, max(tokens, artefact.max_length))
    return bytes_at(artefact.buffers, capacity, artefact.geometry, batch)


def fp16_bytes(artefact: Artefact, tokens: int) -> int:
    """Bytes of a plain fp16 cache of `tokens` tokens, without padding or spare capacity."""
    return dense_bytes(artefact.config["model"], tokens)


def digest_of(config: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `config` without its "digest"."""
    body = {key: value for key, value in config.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_config(folder: str | Path, config: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Hash the engine's files, add "files" and "digest" to `config`, and write config.json in one move.

    names: files to list; by default every regular file of the folder but config.json. Returns what was written.
    """
    folder = Path(folder)
    if names is None:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name != "config.json"]
    paths = {name: folder / name for name in sorted(names)}
    files = {name: {"sha256": _sha256(path), "bytes": path.stat().st_size} for name, path in paths.items()}
    written = {**config, "files": files}
    written["digest"] = digest_of(written)
    write_whole(folder / "config.json", json.dumps(written, indent=1) + "\n")
    return written


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _regular_size(path: Path) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        raise UserError(f"{path} is missing: {REBUILD}.") from None
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise UserError(f"{path} is {kind}, which an engine may not contain: copy the real file there.")
    if status.st_nlink > 1:
        raise UserError(f"{path} is one of {status.st_nlink} hard links to the same file: copy it instead of linking.")
    return status.st_size


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if _regular_size(path) > CONFIG_LIMIT:
        raise UserError(f"{path} is larger than {CONFIG_LIMIT >> 20} MiB, so it is no engine configuration: {REBUILD}.")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON: {REBUILD}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object: {REBUILD}.")
    if config.get("format") != FORMAT or type(config["format"]) is not int:
        raise UserError(f"{path} has format {config.get('format')!r} and this kvpack reads format {FORMAT}: {REBUILD}.")
    if config.get("digest") != digest_of(config):
        raise UserError(f"{path} was changed after the build (its digest does not match): {REBUILD}.")
    if wrong := REQUIRED ^ (set(config) - OPTIONAL):
        key = min(wrong)
        raise UserError(f"{path} {'has the unknown' if key in config else 'lacks the'} key {key!r}: {REBUILD}.")
    return config


def _check_files(folder: Path, files: Any, verify: bool) -> None:
    if not isinstance(files, dict) or not files:
        raise UserError(f"{folder / 'config.json'} lists no files: {REBUILD}.")
    for name, entry in files.items():
        if not name or name in (".", "..") or {"/", "\\", "\0"} & set(name) or name == "config.json":
            raise UserError(f"{folder / 'config.json'} lists {name!r}, which is not a plain file name: {REBUILD}.")
        if not isinstance(entry, dict) or set(entry) != {"sha256", "bytes"}:
            raise UserError(f"{folder / 'config.json'} has no size and SHA-256 for {name!r}: {REBUILD}.")
    for entry in os.scandir(folder):
        stray = entry.name not in files and entry.name not in ("config.json", "report.json")
        if stray and Path(entry.name).suffix.lower() in LOADABLE:
            raise UserError(f"{entry.path} is not listed in config.json: delete it, or {REBUILD}.")
    for name, entry in files.items():
        size = _regular_size(folder / name)
        if size != entry["bytes"]:
            raise UserError(f"{folder / name} has {size} bytes, not {entry['bytes']}: copy it again or {REBUILD}.")
    if verify:
        for name, entry in files.items():
            if _sha256(folder / name) != entry["sha256"]:
                raise UserError(f"{folder / name} is damaged (its SHA-256 does not match): copy it again or {REBUILD}.")


def _check_contract(folder: Path, config: dict[str, Any]) -> Artefact:
    """Roles, dtypes, shapes and the alias table, so that the session may bind without looking."""

    def refuse(what: str) -> UserError:
        return UserError(f"{folder / 'config.json'}: {what}; {REBUILD}.")

    try:
        inputs = tuple(TensorSpec.from_json(entry) for entry in config["inputs"])
        outputs = tuple(TensorSpec.from_json(entry) for entry in config["outputs"])
        geometry = None if config["geometry"] is None else Geometry(**config["geometry"])
        max_length = config["limits"]["max_length"]
        sizes = [max_length, config["fixed_bytes"], *(config["model"][key] for key in sorted(MODEL_KEYS))]
        if any(type(size) is not int or size < 0 for size in sizes) or max_length < 1:
            raise ValueError("limits, fixed_bytes and model sizes must be non-negative integers")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise refuse(f"the tensor contract is malformed ({reason})") from None

    names = [spec.name for spec in inputs]
    if len(set(names)) < len(names) or len({spec.name for spec in outputs}) < len(outputs):
        raise refuse("two tensors of the contract have the same name")
    roles = [spec.role for spec in inputs if spec.role != "state"]
    if unknown := set(roles) - set(HOST_INPUTS):
        raise refuse(f"the input role {min(unknown)!r} is unknown to this kvpack")
    if len(set(roles)) < len(roles):
        raise refuse("two inputs have the same role")
    if missing := {"tokens", "past_len", "new_len"} - set(roles):
        raise refuse(f"no input has the role {min(missing)!r}")
    if ("enc_src" in roles) != ("enc_dst" in roles) or ("enc_src" in roles) > (geometry is not None):
        raise refuse("enc_src, enc_dst and a geometry must come together")
    for spec in inputs:
        if spec.role != "state" and (spec.dtype, spec.shape) != HOST_INPUTS[spec.role]:
            raise refuse(f"{spec.name!r} must be {HOST_INPUTS[spec.role][0]} {list(HOST_INPUTS[spec.role][1])}")
    nodes = config.get("nodes", [])
    if not isinstance(nodes, list) or not all(_is_node(node) for node in nodes):
        raise refuse("an attention of the list of nodes has no op and attributes")
    logits = [spec for spec in outputs if spec.role == "logits"]
    if len(logits) != 1 or (logits[0].dtype, logits[0].shape[:2]) != ("float32", ("batch", "picks")):
        raise refuse("there must be one output 'logits', float32 [batch, picks, vocab]")
    if logits[0].shape[2:] not in ((config["model"]["vocab_size"],), ("vocab",)):
        raise refuse(f"the logits do not have the vocabulary of {config['model']['vocab_size']} tokens")

    written = {spec.name: spec for spec in outputs if spec.role == "state"}
    optional = [spec for spec in outputs if spec.role in OPTIONAL_OUTPUTS]
    if len(written) + len(optional) + 1 != len(outputs):
        raise refuse("an output is neither the logits nor a state")
    for spec in optional:
        if (spec.dtype, spec.shape) != OPTIONAL_OUTPUTS[spec.role]:
            dtype, shape = OPTIONAL_OUTPUTS[spec.role]
            raise refuse(f"{spec.name!r} must be {dtype} {list(shape)}")
        if not re.fullmatch(rf"layer\d+\.{spec.role}", spec.name):
            raise refuse(f"the output {spec.name!r} is not named after its layer and role")
    if len({"select_len", "select_width"} & set(roles)) == 1 or ("select_len" in roles) > (geometry is not None):
        raise refuse("select_len, select_width and a geometry must come together")
    symbols = {"batch", "rows"} | (set(ROW_SYMBOLS) if geometry is not None else set())
    for spec in inputs:
        if spec.role != "state":
            continue
        if spec.dtype not in STATE_DTYPES:
            raise refuse(f"the state {spec.name!r} has the dtype {spec.dtype!r}, not one of {', '.join(STATE_DTYPES)}")
        if spec.shape[:1] != ("batch",) or any(
            dim not in symbols if isinstance(dim, str) else dim < 1 for dim in spec.shape
        ):
            raise refuse(f"the state {spec.name!r} has the shape {list(spec.shape)}, which no session can allocate")
        target = written.pop(spec.alias or "", None)
        if target is None:
            raise refuse(f"the state {spec.name!r} has no output of its own to alias (alias {spec.alias!r})")
        if (target.dtype, target.shape) != (spec.dtype, spec.shape):
            raise refuse(f"the state {spec.name!r} and its alias {target.name!r} differ in dtype or shape")
    if written:
        raise refuse(f"the state output {min(written)!r} is the alias of no input")
    return Artefact(folder, config, inputs, outputs, geometry, max_length, config["model"]["vocab_size"])


def _is_node(entry: Any) -> bool:
    """Whether an entry of "nodes" is one attention's op and attributes, in the order of the layers."""
    return (
        isinstance(entry, dict)
        and set(entry) == {"op", "attributes"}
        and isinstance(entry["op"], str)
        and isinstance(entry["attributes"], dict)
    )
