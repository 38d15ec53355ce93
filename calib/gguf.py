"""Turn a GGUF file into a plain float16 Hugging Face folder, once, in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.cache import cache_folder
from plugins.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")  # as GGUF spells them
FORMAT = 1  # raise it when the converted folders change
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
# The share of query_pre_attn_scalar that no GGUF key tells: as in llama.cpp, known by the number of layers.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder beside the cached ones, so that a finished one can be renamed into place; removed afterwards."""
    cache = cache_folder()
    try:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".making-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise UserError(f"writing to the cache {cache} failed ({error.strerror or error}); set KVPACK_CACHE") from error


def publish(made: Path, folder: Path) -> Path:
    """Rename `made` to `folder`; where another process was first, its folder stays."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def require_space(needed: int) -> None:
    """needed: bytes. Raises UserError where the cache's disk has less."""
    free = shutil.disk_usage(cache_folder()).free
    if free < needed:
        raise UserError(
            f"the cache {cache_folder()} needs {needed / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
            "set KVPACK_CACHE to a folder on another disk"
        )


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


@contextmanager
def working(text: str, progress: bool) -> Iterator[None]:
    """A spinner on stderr, if wanted."""
    if not progress:
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(text):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and huggingface_hub: their logs, their bars, and the bars that they do not own."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, bars, hub_level = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity(logging.CRITICAL + 1)
    logging.disable_progress_bar()
    hub.set_verbosity(hub.CRITICAL + 1)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()


def convert(file: Path, name: str, sha256: str, progress: bool) -> Path:
    """The Hugging Face folder of the GGUF `file` with that hash, made now unless the cache has it.

    Weights are dequantised to float16. Raises UserError for what transformers would not carry over faithfully.
    """
    folder = converted_folder(name, sha256)
    if folder.is_dir():
        return folder
    with scratch() as temporary:
        made = temporary / "model"
        made.mkdir()
        try:
            with working(f"Converting {file.name}, once", progress):
                _convert(file, made)
        except (UserError, OSError):
            raise
        except Exception as error:  # a damaged file surfaces as almost anything
            raise UserError(f"{file} cannot be converted: {first_line(error)}") from error
        return publish(made, folder)


def converted_folder(name: str, sha256: str) -> Path:
    return cache_folder() / f"{name}-{sha256[:16]}-{FORMAT}"


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _convert(file: Path, out: Path) -> None:
    import torch
    import transformers
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file")
    reader = GGUFReader(file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = [tensor.name for tensor in reader.tensors]
    _refuse(file, meta, tensors)
    require_space(sum(int(tensor.n_elements) for tensor in reader.tensors) * 2 + (50 << 20))

    alone = out.parent / "alone"  # so that other files beside the GGUF, a tokenizer or code, have no say
    alone.mkdir()
    (alone / "model.gguf").symlink_to(file)
    with quiet(), _parsed_once(reader):
        where: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(alone, **where)
        _complete(config, meta)
        packed = getattr(transformers, "GgufConfig", None)  # transformers that can keep the weights packed: do not
        plain = {"quantization_config": packed(dequantize=True)} if packed else {}
        model, info = AutoModelForCausalLM.from_pretrained(
            alone, config=config, dtype=torch.float16, output_loading_info=True, **where, **plain
        )
        tokenizer = AutoTokenizer.from_pretrained(alone, **where)
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [type(model).__name__]

        weights = {key: value.contiguous() for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        odd = [key for key, value in weights.items() if value.dtype != torch.float16]
        lost = sorted(info["missing_keys"]) + odd
        if lost or len(weights) != len(tensors):
            raise UserError(
                f"{file}: transformers {transformers.__version__} reads {len(weights) - len(lost)} of its "
                f"{len(tensors)} tensors; use --model FOLDER with the model's safetensors instead"
            )

        _mend_tokenizer(tokenizer, meta)
        config.save_pretrained(out)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=_stops(meta, tokenizer),
            pad_token_id=config.pad_token_id,
        ).save_pretrained(out)
        tokenizer.save_pretrained(out)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _drop(out / "tokenizer_config.json", "is_local", "local_files_only", "gguf_file")
    _drop(out / "config.json", "_name_or_path", "_model_name_or_path")


@contextmanager
def _parsed_once(reader: GGUFReader) -> Iterator[None]:
    """Hand transformers this reader each time it would parse the file's vocabulary anew, at seconds a time."""
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = lambda *args, **kwargs: reader
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _refuse(file: Path, meta: dict[str, Any], tensors: list[str]) -> None:
    """What transformers would read without complaint, and wrongly."""
    mend = "use --model FOLDER with the model's safetensors instead"
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{file}: a GGUF file of architecture {arch} cannot be converted; these can: {', '.join(ARCHITECTURES)}"
        )
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" and meta.get(f"{arch}.rope.scaling.factor", 1.0) != 1.0:
        raise UserError(f"{file}: its RoPE scaling ({scaling}) is lost when a GGUF is converted; {mend}")
    for tensor in tensors:
        if tensor.startswith("rope_"):
            raise UserError(f"{file}: its RoPE scaling ({tensor}) is lost when a GGUF is converted; {mend}")
    if meta.get(f"{arch}.expert_count"):
        raise UserError(f"{file}: mixtures of experts cannot be exported")


def _complete(config: PreTrainedConfig, meta: dict[str, Any]) -> None:
    """Set what the file states and transformers leaves at the architecture's default."""
    arch = meta["general.architecture"]
    hidden, heads = meta[f"{arch}.embedding_length"], meta[f"{arch}.attention.head_count"]
    head_dim = meta.get(f"{arch}.attention.key_length", hidden // heads)
    if arch in ("qwen3", "gemma2", "gemma3"):
        config.head_dim = head_dim
    if arch == "phi3":
        config.sliding_window = meta.get("phi3.attention.sliding_window") or None
        rotary = meta.get("phi3.rope.dimension_count", head_dim)
        config.rope_parameters["partial_rotary_factor"] = rotary / head_dim
    if arch in GEMMA_27B:
        config.query_pre_attn_scalar = hidden // heads if config.num_hidden_layers == GEMMA_27B[arch] else head_dim
    if arch == "gemma2":
        config.attn_logit_softcapping = meta.get("gemma2.attn_logit_softcapping", 50.0)
        config.final_logit_softcapping = meta.get("gemma2.final_logit_softcapping", 30.0)
    prefix = "tokenizer.ggml."
    config.bos_token_id = meta.get(f"{prefix}bos_token_id")
    config.eos_token_id = meta.get(f"{prefix}eos_token_id")
    config.pad_token_id = meta.get(f"{prefix}padding_token_id")


def _stops(meta: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[int] | int | None:
    """The ids that end generation: the file's end tokens and the one its chat template ends a turn with."""
    template, vocab = meta.get("tokenizer.chat_template") or "", tokenizer.get_vocab()
    stops = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    stops += [vocab.get(token) for token in TURN_ENDS if token in template]
    found = list(dict.fromkeys(stop for stop in stops if stop is not None))
    return found[0] if len(found) == 1 else found or None


def _mend_tokenizer(tokenizer: PreTrainedTokenizerFast, meta: dict[str, Any]) -> None:
    """SmolLM splits digits before the byte-level BPE, as its own tokenizer.json and llama.cpp do."""
    if meta.get("tokenizer.ggml.pre") == "smollm":
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )


def _drop(path: Path, *keys: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in keys:
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
