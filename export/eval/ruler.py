"""Six tasks of RULER (arXiv 2404.06654, section 3) from their definitions, with wording of our own.

Retrieval: a number hidden in a text (niah_single), one of several with different keys (niah_multikey), all those of one
key (niah_multivalue). Multi-hop tracing: the variables that a value is handed on to (vt). Aggregation: the words that
occur often in a list of words (cwe), and the most frequent ones of a Zeta distribution (fwe).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING

from calib.recall import ADJECTIVES, ASIDE, NOUNS, Haystack, before, check_room, snap, token_ids
from plugins.errors import UserError

from .sample import Sample, any_order, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("niah_single", "niah_multikey", "niah_multivalue", "vt", "cwe", "fwe")
KEYS, VALUES = 4, 4  # of multikey and multivalue
HOPS = 4  # assignments of a variable to another
COMMON, COMMON_TIMES, RARE_TIMES = 10, 30, 3  # words asked for, and how often each word occurs
FREQUENT, EXPONENT, NOISE = 3, 2.0, "..."  # words asked for; the most frequent word is noise


def samples(
    kind: str, tokenizer: PreTrainedTokenizerBase, hay: Haystack, length: int, count: int, seed: int
) -> list[Sample]:
    """`count` samples of exactly `length` tokens. Raises UserError for an unknown kind and a length that is short."""
    if kind not in KINDS:
        raise UserError(f"RULER task {kind!r} is unknown: use one of {', '.join(KINDS)}")
    make: Callable[..., Sample] = {"vt": _tracking, "cwe": _common_words, "fwe": _frequent_words}.get(kind, _needles)
    if kind == "cwe":
        make = partial(make, _words(tokenizer, hay))
    return [make(kind, tokenizer, hay, length, random.Random(f"ruler {kind} {seed} {index}")) for index in range(count)]


def _needles(kind: str, tokenizer: PreTrainedTokenizerBase, hay: Haystack, length: int, draw: random.Random) -> Sample:
    keys = KEYS if kind == "niah_multikey" else 1
    each = VALUES if kind == "niah_multivalue" else 1
    pairs = draw.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], keys)
    numbers = [str(number) for number in draw.sample(range(1_000_000, 10_000_000), keys * each)]
    stated = [f"A magic number of {pairs[n // each]} is {number}." for n, number in enumerate(numbers)]
    asked = draw.randrange(keys)
    answer = numbers[asked * each : (asked + 1) * each]
    what = f"the magic number of {pairs[asked]} that the text states"
    if each > 1:
        what = f"all the magic numbers of {pairs[asked]} that the text states"
    verb = "are" if each > 1 else "is"
    question = f"\n\nQuestion: What {verb} {what}?\nAnswer: {what[0].upper()}{what[1:]} {verb}"
    order = list(range(len(stated)))
    draw.shuffle(order)
    wanted = [order.index(asked * each + n) for n in range(each)]
    return _hidden(kind, tokenizer, hay, length, draw, [stated[n] for n in order], wanted, question, answer)


def _tracking(kind: str, tokenizer: PreTrainedTokenizerBase, hay: Haystack, length: int, draw: random.Random) -> Sample:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(draw.choices(ascii_uppercase, k=5))
        names += [name] if name not in names else []
    value = str(draw.randrange(10_000, 100_000))
    sources = [value, *(f"VAR {name}" for name in names)]
    stated = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]
    question = (
        f"\n\nQuestion: Which variables are assigned the value {value} in the text, directly or through others?\n"
        f"Answer: The {len(names)} variables that are assigned the value {value} are"
    )
    return _hidden(kind, tokenizer, hay, length, draw, stated, range(len(stated)), question, names)


def _hidden(
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    hay: Haystack,
    length: int,
    draw: random.Random,
    stated: Sequence[str],
    wanted: Sequence[int],
    question: str,
    answer: Sequence[str],
) -> Sample:
    """`stated`, in this order, at random places of a stretch of text; then question and answer.

    wanted: which of `stated` the answer is read from; the depth is the first one's.
    """
    head, asked, spans = before(tokenizer), *listed(tokenizer, question, answer)
    pieces = [token_ids(tokenizer, f"\n{sentence}\n") for sentence in stated]
    room = length - len(head) - sum(map(len, pieces)) - len(asked)
    check_room(room, length, ASIDE + len(pieces))
    start = hay.place(draw, room)
    text = hay.ids[start : start + room]
    places = sorted(draw.sample(range(room - ASIDE), len(pieces)))
    cuts = [min(snap(hay.breaks, start + place, start + room) - start, room - ASIDE) for place in places]
    ids, done, depths = list(head), 0, []
    for cut, piece in zip(cuts, pieces, strict=True):
        ids += text[done:cut]
        depths.append(len(ids) / length)
        ids += piece
        done = cut
    ids += text[done:]
    depth = min(depths[n] for n in wanted)
    return _ending(kind, ids, asked, spans, depth if kind.startswith("niah") else None)


def _ending(
    kind: str, ids: list[int], asked: list[int], spans: Sequence[tuple[int, int]], depth: float | None = None
) -> Sample:
    """A context followed by question and answer, whose items may come in any order."""
    whole = ids + asked
    moved = [(len(ids) + start, len(ids) + stop) for start, stop in spans]
    return Sample(whole, (1,) * len(asked), {kind: any_order(whole, moved)}, depth)


def _words(tokenizer: PreTrainedTokenizerBase, hay: Haystack) -> list[str]:
    """The distinct words of a text, in alphabetical order."""
    return sorted(set(re.findall(r"(?<![\w.'-])[a-z]{4,10}(?![\w'-])", tokenizer.decode(hay.ids))))


def _common_words(
    words: Sequence[str],
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    hay: Haystack,
    length: int,
    draw: random.Random,
) -> Sample:
    order = draw.sample(words, len(words))
    common, rare = order[:COMMON], order[COMMON:]
    question = (
        f"\n\nQuestion: Which are the {COMMON} most common words in the list above?\n"
        f"Answer: The {COMMON} most common words in the list above are"
    )

    def text(times: int, others: int) -> str:
        entries = common * times + rare[:others] * RARE_TIMES
        random.Random(times + others).shuffle(entries)
        return "A list of words:\n" + " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))

    def size(times: int, others: int) -> int:
        return len(token_ids(tokenizer, text(times, others)))

    asked, spans = listed(tokenizer, question, common)
    head = before(tokenizer)
    room = length - len(head) - len(asked)
    # a short context has no room for words that occur this often beside words that do not
    times = _largest(lambda n: size(n, 0) <= room // 2, COMMON_TIMES)
    check_room(times, length, RARE_TIMES + 1)
    # an entry takes three tokens or more
    others = _largest(lambda n: size(times, n) <= room, min(len(rare), room // (3 * RARE_TIMES)))
    body = token_ids(tokenizer, text(times, others))
    return _ending(kind, _filled(head, hay, room - len(body), draw) + body, asked, spans)


def _frequent_words(
    kind: str, tokenizer: PreTrainedTokenizerBase, hay: Haystack, length: int, draw: random.Random
) -> Sample:
    coded: dict[str, None] = {}
    while len(coded) < 500:
        coded["".join(draw.choices(ascii_lowercase, k=6))] = None
    ranks = [NOISE, *coded]  # by falling frequency
    question = (
        f"\n\nQuestion: Which are the {FREQUENT} most frequent words, the dots left out, in the coded text above?\n"
        f"Answer: The {FREQUENT} most frequent words in the coded text above are"
    )
    mix = draw.random()

    def text(most: int) -> str:
        words = [word for rank, word in enumerate(ranks, 1) for _ in range(round(most / rank**EXPONENT))]
        random.Random(mix).shuffle(words)
        return "A coded text:\n" + " ".join(words)

    asked, spans = listed(tokenizer, question, ranks[1 : 1 + FREQUENT])
    head = before(tokenizer)
    room = length - len(head) - len(asked)
    most = _largest(lambda n: len(token_ids(tokenizer, text(n))) <= room, length)
    check_room(most, length, 4 * (FREQUENT + 2) ** 2)
    body = token_ids(tokenizer, text(most))
    return _ending(kind, _filled(head, hay, room - len(body), draw) + body, asked, spans)


def _filled(head: list[int], hay: Haystack, count: int, draw: random.Random) -> list[int]:
    """`head` and a stretch of text of `count` tokens."""
    start = hay.place(draw, count)
    return head + hay.ids[start : start + count]


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
