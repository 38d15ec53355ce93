"""Exact recall: text to train on that repeats strings from far back, and samples that ask for one, scored as decoded.

What the two are made of differs: training text asks with other words, for strings drawn from other seeds.
"""

from __future__ import annotations

import json
import random
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plugins.errors import UserError

from .codec import Codec
from .quality import decode, prefill

KINDS = ("needle", "pairs", "uuid")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of what is asked for, as a part of the text before the question
NEEDLES = {"needle": 1, "pairs": 10}
ENTRIES = 400  # of a JSON object, at most; a longer context is filled with the haystack
ASIDE = 160  # tokens between what is asked for and the question, at least, so that it has left the window

PLACES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Prague", "Quito", "Vienna", "Athens", "Madrid", "Warsaw", "Helsinki",
    "Tunis", "Havana", "Nairobi", "Jakarta", "Bogota", "Riga", "Sofia", "Tirana", "Ankara", "Beirut", "Seoul", "Hanoi",
)  # fmt: skip
ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "eager", "faint", "gentle", "hollow", "icy", "jolly", "keen", "lunar", "mellow",
    "noble", "olive", "proud", "quiet", "rusty", "silver", "tidy", "urban", "vivid", "warm", "young", "zesty", "bitter",
)  # fmt: skip
NOUNS = (
    "anchor", "basket", "candle", "desert", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle",
    "lantern", "magnet", "needle", "orchid", "pencil", "quarry", "ribbon", "saddle", "tunnel", "umbrella", "violin",
    "walnut", "yarrow", "zipper", "bridge",
)  # fmt: skip


# -- text to train on


def training_window(tokenizer: PreTrainedTokenizerBase, length: int, seed: int, index: int) -> list[int]:
    """`length` token ids: records with random keys and values, then questions about them, again and again.

    The same for the same seed and index. Starts with what the tokenizer puts before a text.
    """
    draw = random.Random(f"recall training {seed} {index}")
    ids = before(tokenizer)
    while len(ids) < length:
        text = draw.choice((_register, _settings, _tickets))(draw, draw.randint(8, max(9, (length - len(ids)) // 50)))
        ids += token_ids(tokenizer, text + "\n\n")
    return ids[:length]


def _register(draw: random.Random, count: int) -> str:
    """Lines "name: number", then lookups in prose."""
    pairs = _names(draw, count, lambda: str(draw.randint(1000, 9_999_999)))
    lines = [f"{name}: {number}" for name, number in pairs]
    asked = [f"Look up {name}. It is {number}." for name, number in draw.sample(pairs, (count + 1) // 2)]
    return "\n".join(("Register of codes", *lines, "", *asked))


def _settings(draw: random.Random, count: int) -> str:
    """An indented JSON map of random strings, then lookups like a program's."""
    width = draw.choice((8, 12, 20))
    pairs = _names(draw, count, lambda: f"{draw.getrandbits(4 * width):0{width}x}")
    asked = [f'>>> settings["{name}"]\n"{value}"' for name, value in draw.sample(pairs, (count + 1) // 2)]
    return "\n".join(("settings = " + json.dumps(dict(pairs), indent=1), *asked))


def _tickets(draw: random.Random, count: int) -> str:
    """A table of UUIDs, then each one's partner."""
    pairs = [(_uuid(draw), _uuid(draw)) for _ in range(max(4, count // 3))]
    lines = [f"| {key} | {value} |" for key, value in pairs]
    asked = [f"ticket {key} belongs to order {value}" for key, value in draw.sample(pairs, (len(pairs) + 1) // 2)]
    return "\n".join(("| ticket | order |", *lines, "", *asked))


def _names(draw: random.Random, count: int, value: Callable[[], str]) -> list[tuple[str, str]]:
    names = {f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}-{draw.randint(1, 99)}": None for _ in range(count)}
    return [(name, value()) for name in names]


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


# -- samples to score


@dataclass(frozen=True)
class Sample:
    """ids: the context, the question and its answer, of the length asked for. answer: tokens of the answer, the last
    ones. decoded: tokens of question and answer. depth: where the answer first stands, as a part of the context."""

    ids: list[int]
    answer: int
    decoded: int
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text to hide something in: its tokens, and where its sentences and lines begin, ascending."""

    ids: list[int]
    breaks: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, text: str) -> Haystack:
        ids = token_ids(tokenizer, text)
        return cls(ids, breaks_of(tokenizer, ids))

    def place(self, draw: random.Random, count: int) -> int:
        """Where a random stretch of `count` tokens begins, with a sentence or a line where one does."""
        most = len(self.ids) - count
        return snap(self.breaks, draw.randrange(most + 1), most)


def samples(
    kind: str, tokenizer: PreTrainedTokenizerBase, haystack: str | Haystack, context: int, count: int, seed: int
) -> list[Sample]:
    """`count` samples of exactly `context` tokens, their depths in turn from DEPTHS.

    kind: "needle": a sentence with a 6-digit number somewhere in the haystack text; "pairs": ten of them together, one
    asked for; "uuid": a JSON object of UUIDs with UUIDs as values, as large as fits, one asked for.
    Raises UserError when the context or the haystack is short.
    """
    if kind not in KINDS:
        raise UserError(f"recall kind {kind!r} is unknown: use one of {', '.join(KINDS)}")
    hay = haystack if isinstance(haystack, Haystack) else Haystack.of(tokenizer, haystack)
    if len(hay.ids) < context:
        raise UserError(
            f"the haystack has {len(hay.ids)} tokens, fewer than the context of {context}; give a longer text"
        )
    result = []
    for index in range(count):
        depth, draw = DEPTHS[index % len(DEPTHS)], random.Random(f"{kind} {seed} {index}")
        if kind == "uuid":
            result.append(_json(tokenizer, hay, context, depth, draw))
        else:
            result.append(_needles(NEEDLES[kind], tokenizer, hay, context, depth, draw))
    return result


def _needles(
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    hay: Haystack,
    context: int,
    depth: float,
    draw: random.Random,
) -> Sample:
    places = draw.sample(PLACES, count)
    numbers = [str(number) for number in draw.sample(range(100_000, 1_000_000), count)]
    chosen = draw.randrange(count)
    lines = [f"The secret number of {place} is {number}." for place, number in zip(places, numbers, strict=True)]
    needle = token_ids(tokenizer, "\n\n" + "\n".join(lines) + "\n\n")
    asked = (
        f"Question: What is the secret number of {places[chosen]}?\nAnswer: The secret number of {places[chosen]} is"
    )
    question, answer = split(tokenizer, "\n\n" + asked, f" {numbers[chosen]}")
    head = before(tokenizer)
    room = context - len(head) - len(needle) - len(question) - len(answer)
    check_room(room, context, ASIDE)
    start = hay.place(draw, room)
    cut = min(snap(hay.breaks, start + round(depth * room), start + room) - start, room - ASIDE)
    text = hay.ids[start : start + room]
    ids = head + text[:cut] + needle + text[cut:] + question + answer
    return Sample(ids, len(answer), len(question) + len(answer), (len(head) + cut) / context)


def _json(
    tokenizer: PreTrainedTokenizerBase,
    hay: Haystack,
    context: int,
    depth: float,
    draw: random.Random,
) -> Sample:
    head, opening = before(tokenizer), token_ids(tokenizer, "\n\nHere is a JSON object.\n\n{")
    closing = token_ids(tokenizer, "}\n\n")
    pairs = [(_uuid(draw), _uuid(draw)) for _ in range(ENTRIES)]
    room = context - len(head) - len(opening) - len(closing)
    room -= max(len(token_ids(tokenizer, _asked(key) + value)) for key, value in pairs)
    entries: list[list[int]] = []
    for key, value in pairs:
        entry = token_ids(tokenizer, f'"{key}": "{value}",\n')
        if sum(map(len, entries)) + len(entry) > room:
            break
        entries.append(entry)
    check_room(len(entries), context, 2)
    chosen = round(depth * (len(entries) - 1))
    while chosen > 0 and sum(map(len, entries[chosen + 1 :])) < ASIDE:
        chosen -= 1
    question, answer = split(tokenizer, _asked(pairs[chosen][0]), pairs[chosen][1])
    body = [token for entry in entries for token in entry]
    fill = context - len(head) - len(opening) - len(body) - len(closing) - len(question) - len(answer)
    start = hay.place(draw, fill)
    ids = head + hay.ids[start : start + fill] + opening + body + closing + question + answer
    place = len(head) + fill + len(opening) + sum(map(len, entries[:chosen]))
    return Sample(ids, len(answer), len(question) + len(answer), place / context)


def _asked(key: str) -> str:
    return f'The value of "{key}" in the JSON object is "{key}": "'


def check_room(room: int, context: int, least: int) -> None:
    """Raises UserError when less than `least` of a context is left for what is not asked about."""
    if room < least:
        raise UserError(f"a context of {context} tokens is too short for a recall sample; give a longer one")


def before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: BOS, or nothing."""
    start = list(tokenizer("", add_special_tokens=True).input_ids)
    return start[:1] if start and start[0] == tokenizer.bos_token_id else []


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def split(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of question + answer, split where they first differ from the question's own."""
    alone, whole = token_ids(tokenizer, question), token_ids(tokenizer, question + answer)
    same = 0
    while same < len(alone) and alone[same] == whole[same]:
        same += 1
    return whole[:same], whole[same:]


def breaks_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Where sentences and lines of `ids` begin, ascending."""
    ends = {token for token in set(ids) if tokenizer.decode([token]).rstrip(" ").endswith((".", "\n"))}
    return [0, *(index + 1 for index, token in enumerate(ids) if token in ends)]


def snap(breaks: Sequence[int], place: int, most: int) -> int:
    """The first break at or after `place` that is at most `most`; else `place`."""
    index = bisect_left(breaks, place)
    return breaks[index] if index < len(breaks) and breaks[index] <= most else place


def score(
    model: PreTrainedModel,
    codec: Codec | None,
    asked: Sequence[Sample],
    batch: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, float | dict[str, float]]:
    """How often the model gives the answers, where the model is: the context prefilled, question and answer decoded.

    "recall": share of samples whose every answer token is the most likely one; "log_likelihood": mean of an answer
    token, in nats; "by_depth": recall per tenth of the context. With a codec these are of the compressed cache, and
    "exact_recall" and "exact_log_likelihood" of the same samples without one.
    """
    codec = codec.to(model.device) if codec else None
    decoded = max(sample.decoded for sample in asked)
    exact: list[tuple[bool, float]] = []
    coded: list[tuple[bool, float]] = []
    for index in range(0, len(asked), batch):
        part = asked[index : index + batch]
        start = prefill(model, torch.tensor([sample.ids for sample in part], device=model.device), decoded)
        exact += [_answered(sample, logits) for sample, logits in zip(part, start.logits, strict=True)]
        if codec:
            answers = decode(model, start, codec)
            coded += [_answered(sample, logits) for sample, logits in zip(part, answers, strict=True)]
        for _ in part:
            progress()
    shown = coded if codec else exact
    result: dict[str, float | dict[str, float]] = {"samples": len(asked), **_means(shown)}
    depths: dict[str, list[bool]] = {}
    for sample, (right, _) in sorted(zip(asked, shown, strict=True), key=lambda pair: pair[0].depth):
        depths.setdefault(f"{sample.depth:.1f}", []).append(right)
    result["by_depth"] = {depth: sum(right) / len(right) for depth, right in depths.items()}
    if codec:
        result |= {f"exact_{name}": value for name, value in _means(exact).items()}
    return result


def _answered(sample: Sample, logits: Tensor) -> tuple[bool, float]:
    """Whether every answer token is the most likely one, and their mean log-likelihood.

    logits: [decoded, vocabulary].
    """
    answer = torch.tensor(sample.ids[-sample.answer :], device=logits.device)
    rows = torch.log_softmax(logits[-sample.answer - 1 : -1], dim=-1)
    return bool((rows.argmax(-1) == answer).all()), float(rows.gather(1, answer[:, None]).mean())


def _means(answers: Sequence[tuple[bool, float]]) -> dict[str, float]:
    return {
        "recall": sum(right for right, _ in answers) / len(answers),
        "log_likelihood": sum(value for _, value in answers) / len(answers),
    }
