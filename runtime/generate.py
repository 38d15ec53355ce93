"""Generation: one streamed sequence on a session, or a batch of completions."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from plugins.errors import UserError
from runtime.sampling import Sampler, SamplingParams, logprob
from runtime.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.session import Session

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Token:
    """One generated token.

    text: what it adds to the text; may be empty while a character or a stop string is incomplete. logprob: natural log,
    under the model itself. finish_reason: None until the last token, then "stop", "length" or "cancelled".
    """

    id: int
    text: str
    logprob: float
    finish_reason: str | None = None


@dataclass
class Completion:
    """One finished sequence of a batch.

    tokens: generated ones, a closing end-of-sequence token included. cache_bytes: its share of the batch's cache.
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cache_bytes: int = 0

    def add(self, token: Token) -> None:
        self.tokens.append(token.id)
        self.text += token.text
        self.finish_reason = token.finish_reason


class Decoding:
    """Sampling, text and stopping of one sequence."""

    def __init__(
        self, engine: Engine, params: SamplingParams, prompt: Sequence[int], *, index: int = 0, room: int
    ) -> None:
        """room: tokens that still fit into the engine's limit after the prompt."""
        has_text = "tokenizer.json" in engine.artefact.config["files"]
        if params.stop and not has_text:
            raise UserError(f"stop strings need a tokenizer and {engine.artefact.path} has none: use stop_tokens.")
        eos = engine.text.eos if has_text and not params.ignore_eos else frozenset()
        self.endings = eos | frozenset(params.stop_tokens)
        self._sampler = Sampler(params, index)
        self._detokenizer = Detokenizer(engine.text, prompt) if has_text else None
        self._stop = StopStrings(params.stop)
        # The last token needs no place in the cache, hence one more than fits.
        self._left = room + 1 if params.max_tokens is None else min(params.max_tokens, room + 1)

    def next(self, logits: np.ndarray, cancelled: bool) -> Token:
        """logits: float32 [V]."""
        token = self._sampler(logits)
        self._left -= 1
        ended = token in self.endings
        text = self._detokenizer.add(token) if self._detokenizer and not ended else ""
        text = self._stop.add(text)
        reason = None
        if ended or self._stop.found:
            reason = "stop"
        elif cancelled:
            reason = "cancelled"
        elif self._left == 0:
            reason = "length"
        if reason and not self._stop.found:
            text += self._stop.add(self._detokenizer.finish() if self._detokenizer else "") + self._stop.finish()
        return Token(token, text, logprob(logits, token), reason)


def stream(
    session: Session, prompt: Prompt, params: SamplingParams | None = None, cancel: threading.Event | None = None
) -> Generator[Token, None, None]:
    """Append `prompt` to the session (batch 1) and yield its continuation token by token.

    prompt: plain text, tokens, or chat messages; on a session that was given messages before, only the new ones.
    The last token yielded is not in the cache yet: the next call stores it first, unless it is a stop token.
    Setting `cancel` ends the stream after the current step, closing the iterator does too; the session stays usable.
    Bad arguments raise here, before the first token is asked for.
    """
    params = params or SamplingParams()
    if session.batch != 1:
        raise UserError(f"generate streams one sequence and this session has {session.batch}: use engine.generate().")
    tokens, chat = encode(session.engine, prompt, session)
    tokens = session.pending + tokens
    session.check([tokens])
    room = session.engine.artefact.max_length - int(session.lengths[0]) - len(tokens)
    decoding = Decoding(session.engine, params, tokens, room=room)
    session.turn += 1
    return _stream(session, tokens, chat, decoding, cancel)


def _stream(
    session: Session, tokens: list[int], chat: list[dict[str, str]], decoding: Decoding, cancel: threading.Event | None
) -> Generator[Token, None, None]:
    turn = session.turn
    reply = {"role": "assistant", "content": ""}
    logits = session.prefill(tokens)[0, 0]
    session.chat = [*chat, reply] if chat else []
    while True:
        token = decoding.next(logits, cancel is not None and cancel.is_set())
        session.pending = [] if token.id in decoding.endings else [token.id]
        reply["content"] += token.text
        yield token
        if token.finish_reason:
            return
        if session.turn != turn:
            raise UserError("this stream was overtaken by a later call on its session: read the newer one.")
        logits = session.decode([token.id])[0]


def complete(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    cancel: threading.Event | None = None,
) -> list[Completion]:
    """Complete several prompts as one batch; a finished sequence costs no further cache. One `params` or one each.

    With a seed, sequence i draws from (seed, i), whatever its neighbours do.
    """
    if not prompts or isinstance(prompts, str):
        raise UserError("generate needs a list of at least one prompt.")
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
    if len(each) != len(prompts):
        raise UserError(f"{len(each)} SamplingParams were given for {len(prompts)} prompts: give one, or one each.")
    feeds = [encode(engine, prompt, None)[0] for prompt in prompts]
    for number, tokens in enumerate(feeds):
        if not tokens:
            raise UserError(f"prompt {number} is empty.")
    with engine.session(batch=len(prompts)) as session:
        session.check(feeds)
        results = [Completion(prompt_tokens=len(tokens)) for tokens in feeds]
        decodings = [
            Decoding(engine, one, tokens, index=index, room=engine.artefact.max_length - len(tokens))
            for index, (one, tokens) in enumerate(zip(each, feeds, strict=True))
        ]
        while any(feeds):
            logits = session.step(feeds)  # [B, 1, V]
            cancelled = cancel is not None and cancel.is_set()
            for index, result in enumerate(results):
                if feeds[index]:
                    result.add(decodings[index].next(logits[index, 0], cancelled))
                    result.cache_bytes = session.nbytes // session.batch
                    feeds[index] = [] if result.finish_reason else [result.tokens[-1]]
    return results


def encode(engine: Engine, prompt: Prompt, session: Session | None) -> tuple[list[int], list[dict[str, str]]]:
    """Tokens to append, and the conversation so far when the prompt is one of messages."""
    used = session is not None and (bool(session.lengths.any()) or bool(session.pending))
    if isinstance(prompt, str):
        return engine.text.encode(prompt, start=not used), []
    prompt = list(prompt)
    if not prompt or not isinstance(prompt[0], dict):
        return prompt, []
    if not used:
        return engine.text.encode(engine.text.render(prompt), start=False), prompt
    if not session.chat:
        raise UserError("this session was not started with messages: pass text or tokens, or open a new session.")
    text = engine.text.continuation(session.chat, prompt)
    return engine.text.encode(text, start=False), [*session.chat, *prompt]
