"""The tasks by name, and what their samples are made of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calib.quality import DECODED
from calib.recall import Haystack, samples
from calib.recall import Sample as Asked
from calib.texts import Text, token_windows
from plugins.errors import UserError

from . import ruler
from .sample import Sample, single

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("ppl", "kld", "niah", "kvrecall", "multiturn", "ruler")
DEFAULT_TASKS = ("ppl", "kld", "niah", "kvrecall")
WINDOWS = "windows"  # what ppl and kld are both read from
RECALL = {"niah": {"single": "needle"}, "kvrecall": {"pairs": "pairs", "uuid": "uuid"}}  # variant: calib's kind
HAYSTACK = 1_000_000  # characters of it that are read, at least


@dataclass(frozen=True)
class Case:
    """One sample, and the cell of the results that it counts towards."""

    task: str
    variant: str
    text: str
    length: int
    index: int
    sample: Sample


def cases(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    tasks: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
) -> list[Case]:
    """Every sample of an evaluation: `count` of each text (ppl, kld) or variant, each of exactly `length` tokens.

    Text to hide something in is taken from the first of `texts`. Raises UserError where a text or a length is short.
    """
    made: list[Case] = []
    reach = max(HAYSTACK, 16 * max(lengths))
    hay = Haystack.of(tokenizer, texts[0].content[:reach]) if set(tasks) - {"ppl", "kld"} else None
    name = texts[0].name
    for length in lengths:
        if {"ppl", "kld"} & set(tasks):
            for text in texts:
                found = windows(tokenizer, text, length, count)
                made += [Case(WINDOWS, "", text.name, length, i, sample) for i, sample in enumerate(found)]
        if hay is not None and len(hay.ids) < length:
            raise UserError(
                f"--text {name} has {len(hay.ids)} tokens, fewer than the {length} of --lengths; give a longer one"
            )
        for task in ("niah", "kvrecall"):
            for variant, kind in RECALL[task].items() if task in tasks else ():
                found = [_asked(a, variant) for a in samples(kind, tokenizer, hay, length, count, seed)]
                made += [Case(task, variant, name, length, i, sample) for i, sample in enumerate(found)]
        if "multiturn" in tasks:
            found = multiturn(tokenizer, hay, length, count, seed)
            made += [Case("multiturn", "", name, length, i, sample) for i, sample in enumerate(found)]
        for variant in ruler.KINDS if "ruler" in tasks else ():
            found = ruler.samples(variant, tokenizer, hay, length, count, seed)
            made += [Case("ruler", variant, name, length, i, sample) for i, sample in enumerate(found)]
    return made


def decoded_of(length: int) -> int:
    """Tokens of a window that are fed one by one."""
    return DECODED if length >= 4 * DECODED else length // 4


def windows(tokenizer: PreTrainedTokenizerBase, text: Text, length: int, count: int) -> list[Sample]:
    """At most `count` windows of `text`, the last `decoded_of(length)` tokens of each scored."""
    found = token_windows(tokenizer, [text], length, count)
    if not found:
        raise UserError(f"--text {text.name} has fewer than the {length} tokens of --lengths; give a longer one")
    return [Sample(ids, (1,) * decoded_of(length)) for ids in found]


def _asked(asked: Asked, variant: str) -> Sample:
    """A recall sample of calib: question and answer fed token by token."""
    end = len(asked.ids)
    answers = {variant: single(asked.ids, end - asked.answer, end)}
    return Sample(asked.ids, (1,) * asked.decoded, answers, asked.depth)


def multiturn(tokenizer: PreTrainedTokenizerBase, hay: Haystack, length: int, count: int, seed: int) -> list[Sample]:
    """Two turns: text that hides a number, the question for it and its answer; then more text and the question again.

    The second turn's text, about an eighth of `length`, is fed in one step to what the first one left in the cache; the
    questions and answers are fed token by token. Answers: "first" and "again".
    """
    turn = length - length // 8
    made = []
    for index, asked in enumerate(samples("needle", tokenizer, hay, turn, count, seed)):
        draw = random.Random(f"multiturn {seed} {index}")
        chunk = length - turn - asked.decoded
        if chunk < 2:
            raise UserError(f"a length of {length} tokens is too short for two turns; give a longer one")
        start = hay.place(draw, chunk)
        ids = asked.ids + hay.ids[start : start + chunk] + asked.ids[-asked.decoded :]
        spans = {"first": (turn - asked.answer, turn), "again": (length - asked.answer, length)}
        answers = {name: single(ids, *span) for name, span in spans.items()}
        ones = (1,) * asked.decoded
        made.append(Sample(ids, (*ones, chunk, *ones), answers, asked.depth * turn / length))
    return made
