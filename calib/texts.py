"""Plain text in, windows of token ids out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plugins.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_CONTEXT, LEAST_CONTEXT = 4096, 64  # tokens per window
CHARACTERS_PER_TOKEN = 8  # generous: prose has 4 to 5


@dataclass(frozen=True)
class Text:
    """A text, its name in reports, and the SHA-256 of its UTF-8 bytes."""

    name: str
    content: str
    sha256: str

    @classmethod
    def of(cls, name: str, content: str) -> Text:
        return cls(name, content, hashlib.sha256(content.encode()).hexdigest())

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "sha256": self.sha256}


def read_texts(paths: Sequence[str | Path] = ()) -> list[Text]:
    """The files as texts; without files the interpreter's own documentation. Raises UserError for an unreadable one."""
    return [_read(Path(path)) for path in paths] or [default_text()]


def default_text() -> Text:
    """The topics of Python's help(): half a megabyte of English that is on every machine that runs this."""
    from pydoc_data.topics import topics

    return Text.of("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))


def _read(path: Path) -> Text:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--text {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path} is not UTF-8 text (byte {error.start})") from error
    return Text.of(path.name, content)


def pick_context(asked: int | None, config: PreTrainedConfig) -> int:
    """Tokens per window: what was asked for, or the default, within the limit of the model with `config`."""
    limit = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_CONTEXT)
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not LEAST_CONTEXT <= asked <= limit:
        raise UserError(f"--context {asked} must be from {LEAST_CONTEXT} to the model's limit of {limit}")
    return asked


def token_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], context: int, count: int
) -> list[list[int]]:
    """At most `count` windows of exactly `context` token ids, spread evenly over the texts in proportion to size.

    Every window starts with what the tokenizer puts before a text (BOS, where the model has one). Fewer windows come
    back when the texts are too short.
    """
    total = sum(len(text.content) for text in texts)
    windows: list[list[int]] = []
    for text in texts:
        share = -(-count * len(text.content) // max(total, 1))
        windows += _windows(tokenizer, text.content, context, share)
    keep = min(count, len(windows))
    return [windows[index * len(windows) // keep] for index in range(keep)]


def _windows(tokenizer: PreTrainedTokenizerBase, content: str, context: int, count: int) -> list[list[int]]:
    start = tokenizer("", add_special_tokens=True).input_ids
    start = start[:1] if start and start[0] == tokenizer.bos_token_id else []
    body = context - len(start)
    span = context * CHARACTERS_PER_TOKEN
    stride = len(content) // max(count, 1)
    if stride > span:  # a long text: one window from each of `count` places
        pieces, each = [content[index * stride : index * stride + span] for index in range(count)], 1
    else:
        pieces, each = [content], count
    windows: list[list[int]] = []
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        whole = min(each, len(ids) // body)
        windows += [start + ids[index * body : (index + 1) * body] for index in range(whole)]
    return windows
