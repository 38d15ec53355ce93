"""Text in and out: tokenizer, sandboxed chat template, streaming detokeniser that never shows half a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact

Message = dict[str, str]
REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet
UNFINISHED_LIMIT = 16  # tokens; a character has at most 4 bytes, so after this many the bytes are simply invalid
REPLY = "\x02kvpack reply\x03"  # stands for the assistant's text while the end of a turn is looked up


class Text:
    """The text side of one engine."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, special: dict[str, str], eos: frozenset[int]
    ) -> None:
        """special: bos_token, eos_token, ... as strings, for the template. eos: tokens that end a sequence."""
        self.tokenizer = tokenizer
        self.special = special
        self.eos = eos
        self._template = None if template is None else _compile(template)

    @classmethod
    def open(cls, artefact: Artefact) -> Text:
        """Read the artefact's (already checked) tokenizer files. Raises UserError."""
        if "tokenizer.json" not in artefact.config["files"]:
            raise UserError(f"{artefact.path} has no tokenizer.json: pass token numbers instead of text, or {REBUILD}.")
        try:
            tokenizer = Tokenizer.from_file(str(artefact.path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"{artefact.path / 'tokenizer.json'} cannot be read ({error}): {REBUILD}.") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = _json(artefact, "tokenizer_config.json")
        special = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[key] = value
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        if "chat_template.jinja" in artefact.config["files"]:
            template = (artefact.path / "chat_template.jinja").read_text(encoding="utf-8")
        ids = _json(artefact, "generation_config.json").get("eos_token_id")
        ids = {ids} if isinstance(ids, int) else set(ids or ())
        named = tokenizer.token_to_id(special.get("eos_token", ""))
        return cls(tokenizer, template, special, frozenset(ids | ({named} if named is not None else set())))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Tokens of plain text; start: whether to add what the tokenizer puts before a fresh text (often BOS)."""
        return self.tokenizer.encode(text, add_special_tokens=start).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The chat template's text for a conversation. Raises UserError when there is no template or it refuses."""
        import jinja2

        if self._template is None:
            raise UserError("this engine has no chat template: pass a plain string as the prompt (--raw).")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise UserError(f"a chat message must be a dict with a role and a content, not {message!r}.")
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the chat template refuses these messages ({error}): change them or use --raw.") from error

    def continuation(self, past: Sequence[Message], new: Sequence[Message]) -> str:
        """What the template puts after the assistant's text, to go on from `past` (which ends with it) with `new`."""
        marked = [*past[:-1], {**past[-1], "content": REPLY}, *new]
        parts = self.render(marked).split(REPLY)
        if len(parts) != 2:
            raise UserError(
                "this chat template cannot be continued turn by turn: open a new session with the whole conversation."
            )
        return parts[1]


class Detokenizer:
    """Turns tokens into text as they come; what is emitted is final, and always whole characters.

    context: the last prompt tokens, so that a tokenizer that strips a text's leading space does not strip the first.
    """

    def __init__(self, text: Text, context: Sequence[int] = ()) -> None:
        self._text = text
        self._ids = list(context[-6:])
        self._start = 0  # decoding starts here ...
        self._shown = len(self._ids)  # ... and the text of the tokens before this one is out

    def add(self, token: int) -> str:
        self._ids.append(token)
        fresh = self._fresh()
        if not fresh or (fresh.endswith(REPLACEMENT) and len(self._ids) - self._shown <= UNFINISHED_LIMIT):
            return ""
        self._ids = self._ids[self._start :]
        self._start, self._shown = self._shown - self._start, len(self._ids)
        return fresh

    def finish(self) -> str:
        """What is still held back, without an unfinished character."""
        fresh = self._fresh().rstrip(REPLACEMENT)
        self._shown = len(self._ids)
        return fresh

    def _fresh(self) -> str:
        ids = self._ids[self._start :]
        before = self._text.decode(ids[: self._shown - self._start])
        return self._text.decode(ids)[len(before) :]


class StopStrings:
    """Cuts a text stream at the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the stream that may be shown now; once `found` is set, nothing more will come."""
        if not self._stop or self.found:
            return "" if self.found else text
        held = self._held + text
        hits = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self.found, self._held = True, ""
            return held[: min(hits)]
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _json(artefact: Artefact, name: str) -> dict[str, Any]:
    if name not in artefact.config["files"]:
        return {}
    path: Path = artefact.path / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is not valid JSON: {REBUILD}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object: {REBUILD}.")
    return content


def _compile(source: str) -> Any:
    """A chat template as transformers runs it: sandboxed, trimmed blocks, the same helper functions."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid Jinja ({error}): {REBUILD} from a mended one.") from error
