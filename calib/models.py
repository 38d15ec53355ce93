"""Read a model: the built-in one, a Hugging Face folder, a .gguf file or a hub id, always as a float32 eager model.

Only safetensors and JSON are read, never pickle, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.gguf import convert, first_line, quiet, sha256_file, working
from plugins.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

BUILTIN = "smollm2"
SUPPORTED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
)
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.bin")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
HUB_EXTRAS = ("*/*", "consolidated*")  # other copies of the same weights


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be recorded or exported.

    model: float32, eval, eager attention, no gradients, on the CPU. folder: the Hugging Face folder it was read from.
    sha256: what `sha256sum config.json *.safetensors | sha256sum` prints there (of the files that are read).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    name: str
    folder: Path
    sha256: str


def load(spec: str | None = None, progress: bool = True) -> LoadedModel:
    """Read `spec`: None or "smollm2" (built in), a Hugging Face folder, a .gguf file, or a hub id "org/name".

    progress: show downloads and conversions on stderr. Raises UserError for whatever cannot be read or exported.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError("reading a model needs torch and transformers: pip install 'kvpack[cpu,build]'") from error
    folder, name = locate(spec, progress)
    config = read_config(folder)
    check_config(config, str(folder))
    files = weight_files(folder)
    check_tokenizer(folder)
    with working(f"Reading {name}", progress):
        model, tokenizer = _read(folder)
        return LoadedModel(model, tokenizer, name, folder, _hash([folder / "config.json", *files]))


def locate(spec: str | None, progress: bool) -> tuple[Path, str]:
    """The Hugging Face folder of `spec` and the model's name; downloads or converts it first where needed."""
    if spec is None or spec == BUILTIN:
        from calib import builtin

        return builtin.folder(progress), builtin.NAME
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"--model {spec}: there is no such file")
        path = path.resolve()
        return convert(path, path.stem, sha256_file(path), progress), path.stem
    if path.exists():
        raise UserError(f"--model {spec} is neither a Hugging Face folder nor a .gguf file")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", spec):
        return _from_hub(spec, progress), spec
    raise UserError(
        f"--model {spec}: there is no such folder; give a Hugging Face folder, a .gguf file, a hub id such as "
        f"org/name, or {BUILTIN}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no Hugging Face model folder: it has no config.json")
    return _read_json(folder / "config.json")


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse, by name, a model that cannot be exported. config: its config.json; where: how to call the model."""
    if "auto_map" in config:
        raise UserError(f"{where} brings its own code (auto_map in config.json), which is never run")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else f"a {config.get('model_type')} without architectures"
    if name not in SUPPORTED:
        raise UserError(f"{where}: {name} cannot be exported; these can: {', '.join(SUPPORTED)}")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(f"{where} is quantised ({method}), which cannot be exported; use the unquantised model")
    if "transformers_weights" in config:
        raise UserError(f"{where}: transformers_weights in config.json points to other weights and is not supported")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files the model consists of, sorted. Raises UserError where one is missing or damaged."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter (adapter_config.json); merge it into its base model first")
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif (folder / INDEX).is_file():
        files = _sharded(folder)
    elif any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has neither model.safetensors nor {INDEX}; download it again")
    elif pickles := sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)}):
        raise UserError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code and are never read; "
            "use a safetensors version of the model"
        )
    else:
        raise UserError(f"{folder} has no weights: model.safetensors is missing")
    for file in files:
        _check_safetensors(file)
    return files


def check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} has no tokenizer.json; write one with transformers' "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    path = folder / "tokenizer_config.json"
    if path.is_file() and "auto_map" in _read_json(path):
        raise UserError(f"{folder} brings its own code (auto_map in tokenizer_config.json), which is never run")


def _sharded(folder: Path) -> list[Path]:
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{folder / INDEX} is damaged: it has no weight_map; download it again")
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise UserError(f"{folder / INDEX} points outside its folder ({name})")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; download it again")
    return sorted(folder / name for name in set(shards.values()))


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or damaged ({first_line(error)}); download it again") from error


def _read(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    safely: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            # tokenizer.json as it stands, as the runtime reads it: the model's own class may rebuild parts of it
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **safely)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                use_safetensors=True,
                output_loading_info=True,
                **safely,
            )
    except Exception as error:  # a wrong value in a config surfaces as almost anything
        raise UserError(f"transformers cannot read {folder}: {first_line(error)}") from error
    if type(model).__name__ not in SUPPORTED:
        raise UserError(f"{folder}: its model_type makes it a {type(model).__name__}, which cannot be exported")
    for problem in ("missing", "unexpected", "mismatched"):
        if keys := info[f"{problem}_keys"]:
            key = sorted(str(key) for key in keys)[0]
            raise UserError(f"the weights in {folder} do not fit its config.json: {len(keys)} {problem}, such as {key}")
    return model.eval().requires_grad_(False), tokenizer


def _from_hub(name: str, progress: bool) -> Path:
    """Download a hub model into huggingface_hub's own cache, its config first; HF_HUB_OFFLINE is respected."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        with contextlib.nullcontext() if progress else quiet():
            config = Path(hf_hub_download(name, "config.json"))
            check_config(_read_json(config), name)
            return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_EXTRAS)))
    except UserError:
        raise
    except Exception as error:  # offline, unknown, gated, full disk: each its own exception, and not one base
        reason = f"{type(error).__name__}: {first_line(error).split('. ')[0]}"
        raise UserError(
            f"--model {name}: there is no such folder, and the Hugging Face hub did not give it ({reason}); "
            "check the name and the network, or give a folder"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not valid JSON ({first_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return content


def _hash(files: list[Path]) -> str:
    lines = "".join(f"{sha256_file(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
