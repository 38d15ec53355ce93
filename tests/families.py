"""Small random models of every supported family, and Hugging Face folders of them, for tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o n", "in g", "Ġ t", "Ġ a", "o r")
VOCAB = len(SPECIAL) + 256 + len(MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": ROPE}),
    "qwen2": ("Qwen2", {"rope_parameters": ROPE}),
    "qwen3": ("Qwen3", {"rope_parameters": ROPE}),
    "mistral": ("Mistral", {"rope_parameters": ROPE, "sliding_window": 16}),
    "gemma2": (
        "Gemma2",
        {
            "rope_parameters": ROPE,
            "sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 32,
        },  # sliding and full layers alternate
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "smollm3": ("SmolLM3", {"rope_parameters": ROPE, "no_rope_layer_interval": 2}),  # layers 1 and 3 without RoPE
}


def tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of family `name` (see FAMILIES), eval, eager; `changes` are fields of its config.

    Unlike a freshly initialised model, its attention is far from uniform and its biases and norms are not trivial.
    GQA groups of n: tiny(name, num_attention_heads=2 * n, num_key_value_heads=2); hidden_size follows the heads.
    """
    stem, fields = FAMILIES[name]
    text = "Text" if name == "gemma3" else ""
    settings = COMMON | fields | changes
    settings.setdefault("hidden_size", settings["num_attention_heads"] * settings["head_dim"])
    config = getattr(transformers, f"{stem}{text}Config")(**settings)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif weight.dim() == 1:
                weight.add_(0.1 * noise)
            elif "embed_tokens" in key and not config.tie_word_embeddings:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5)
    return model.float().eval().requires_grad_(False)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over VOCAB tokens: PAD, BOS and EOS, every byte, and a few merges; a chat template of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], bos_token=SPECIAL[BOS], eos_token=SPECIAL[EOS]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny(folder: Path, name: str, shard_size: str = "1GB", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save tiny(name, seed, **changes) with the tiny tokenizer as a Hugging Face folder, and return the model.

    shard_size: such as "200KB", for a folder of several safetensors files with an index.
    """
    model = tiny(name, seed, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    with silence():
        model.save_pretrained(folder, max_shard_size=shard_size)
        tiny_tokenizer().save_pretrained(folder)
    return model


@contextlib.contextmanager
def silence():
    """transformers without progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
