"""What is fed to a model and what is expected back: one sample of a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from calib.recall import token_ids


@dataclass(frozen=True)
class Item:
    """One thing an answer consists of: ids[start:stop] of its sample.

    allowed: for each of its tokens, those that count as right when they are the most likely one.
    """

    start: int
    stop: int
    allowed: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sample:
    """ids: everything that is fed, of the length asked for. feeds: tokens of each step after the prefill.

    answers: variant of the task -> the items expected; without any, every token fed after the prefill is scored against
    its successor. depth: where the first thing asked for stands, as a part of the whole, if that means something.
    """

    ids: list[int]
    feeds: tuple[int, ...]
    answers: Mapping[str, tuple[Item, ...]] = field(default_factory=dict)
    depth: float | None = None

    @property
    def first(self) -> int:
        """Tokens of the prefill."""
        return len(self.ids) - sum(self.feeds)

    @cached_property
    def picks(self) -> list[int]:
        """Positions whose logits are scored, ascending."""
        if not self.answers:
            return list(range(self.first, len(self.ids)))
        items = [item for listed in self.answers.values() for item in listed]
        return sorted({position - 1 for item in items for position in range(item.start, item.stop)})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything a score depends on."""
        answers = {name: [(i.start, i.stop, i.allowed) for i in listed] for name, listed in self.answers.items()}
        content = json.dumps([self.ids, self.feeds, answers], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def single(ids: Sequence[int], start: int, stop: int) -> tuple[Item, ...]:
    """An answer of one item, right in one way only."""
    return (Item(start, stop, tuple((token,) for token in ids[start:stop])),)


def any_order(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[Item, ...]:
    """An answer whose items may come in any order: a token is right where an item not yet listed goes on like that."""
    words = [tuple(ids[start:stop]) for start, stop in spans]
    items = []
    for number, (start, stop) in enumerate(spans):
        allowed = []
        for place in range(stop - start):
            same = [w for w in words[number:] if len(w) > place and w[:place] == words[number][:place]]
            allowed.append(tuple(sorted({word[place] for word in same})))
        items.append(Item(start, stop, tuple(allowed)))
    return tuple(items)


def listed(
    tokenizer: PreTrainedTokenizerBase, question: str, items: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of question and answer, the items with commas between them, and where each item's tokens are."""
    text, spans = question, []
    for item in items:
        text += "," if spans else ""
        spans.append((len(text), len(text) + len(item) + 1))
        text += f" {item}"
    whole = token_ids(tokenizer, text)
    return whole, [(_shared(tokenizer, text[:a], whole), _shared(tokenizer, text[:b], whole)) for a, b in spans]


def _shared(tokenizer: PreTrainedTokenizerBase, text: str, whole: Sequence[int]) -> int:
    """How many tokens of `text` are those that `whole` begins with."""
    alone, same = token_ids(tokenizer, text), 0
    while same < len(alone) and alone[same] == whole[same]:
        same += 1
    return same
