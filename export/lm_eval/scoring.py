"""Log-likelihoods of continuations, read through an engine's compressed cache. Needs no lm-eval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from plugins.errors import UserError

if TYPE_CHECKING:
    from runtime import Engine, Session

READS = ("decode", "prefill")
LOGITS_LIMIT = 1 << 30  # bytes of logits that one step of read="prefill" may return, unless one sequence needs more

Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context, tokens of its continuation


@dataclass(frozen=True)
class Score:
    """Of pair number `index`: natural log of the continuation's probability, and whether greedy decoding gives it."""

    index: int
    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class Scorer:
    """How continuations are scored.

    batch: sequences per step. max_length: tokens in the cache at most; longer contexts lose their first tokens.
    read: "decode" prefills a context but for its last `tail` tokens, which is exact, then appends those and the
        continuation in steps of `chunk` tokens, so that every scored token is predicted from the compressed cache.
        "prefill" appends context and continuation at once: exact, what the uncompressed model says.
    tail: at least 1, else the first token of a continuation would be predicted by the exact prefill.
    chunk: 1 is decoding as in generation. Tokens of one chunk see each other exactly, and methods that select what
        to read select nothing for a chunk above 1; it is faster on long continuations.
    Raises UserError for values out of range.
    """

    engine: Engine
    batch: int = 1
    max_length: int | None = None
    read: str = "decode"
    tail: int = 1
    chunk: int = 1

    def __post_init__(self) -> None:
        if self.read not in READS:
            raise UserError(f"read={self.read!r} is unknown: use {' or '.join(READS)}.")
        for name in ("batch", "tail", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}: it must be a whole number of at least 1.")
        limit = self.engine.artefact.max_length
        if self.max_length is not None and not 2 <= self.max_length <= limit:
            raise UserError(f"max_length is {self.max_length}: this engine allows 2 to {limit} tokens.")

    @property
    def limit(self) -> int:
        return self.max_length or self.engine.artefact.max_length

    def scores(self, pairs: Sequence[Pair]) -> Iterator[Score]:
        """A Score for each pair, longest contexts first. Contexts that occur several times are read once."""
        contexts = [self._fitted(number, *pair) for number, pair in enumerate(pairs)]
        yield from (Score(number, 0.0, True) for number, pair in enumerate(pairs) if not len(pair[1]))
        jobs = [number for number, pair in enumerate(pairs) if len(pair[1])]
        if self.read == "prefill":
            yield from self._at_once([(number, contexts[number], pairs[number][1]) for number in jobs])
            return
        by_context: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = {}
        for number in jobs:
            by_context.setdefault(tuple(contexts[number]), []).append((number, pairs[number][1]))
        ordered = sorted(by_context, key=len, reverse=True)
        for group in _batches(ordered, self.batch):
            yield from self._step_by_step(group, [by_context[context] for context in group])

    def _fitted(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """The end of the context that fits before the continuation, whose last token needs no place."""
        if not len(context):
            raise UserError(f"pair {number} has no context: its continuation needs a token before it.")
        room = self.limit - max(len(continuation) - 1, 0)
        if room < 1:
            raise UserError(
                f"a continuation of {len(continuation)} tokens exceeds the limit of {self.limit}: "
                "export with a larger --max-length."
            )
        return list(context[-room:])

    def _step_by_step(
        self, contexts: Sequence[tuple[int, ...]], jobs: Sequence[list[tuple[int, Sequence[int]]]]
    ) -> Iterator[Score]:
        """Score every continuation of each context (of sequence b: jobs[b], pairs of number and tokens)."""
        jobs = [sorted(own, key=lambda job: len(job[1]), reverse=True) for own in jobs]
        rounds = max(len(own) for own in jobs)
        with self.engine.session(batch=len(contexts)) as session:
            if max(len(context) for context in contexts) > self.tail:
                session.step([context[: -self.tail] for context in contexts])
            after = {b: row for b, _, row in self._read(session, [context[-self.tail :] for context in contexts])}
            snapshot = session.snapshot() if rounds > 1 else None
            for turn in range(rounds):
                live = {b: own[turn] for b, own in enumerate(jobs) if turn < len(own)}
                rows = [live[b][1][:-1] if b in live else [] for b in range(len(jobs))]
                totals = {b: _logprob(after[b], tokens[0]) for b, (_, tokens) in live.items()}
                if any(len(row) for row in rows):
                    if turn and snapshot is not None:
                        session.restore(snapshot)
                    for b, place, row in self._read(session, rows):
                        totals[b] = totals[b] + _logprob(row, live[b][1][place + 1])
                for b, (number, _) in live.items():
                    yield Score(number, float(totals[b][0]), not totals[b][1])

    def _read(self, session: Session, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Append the rows chunk by chunk; yields sequence, position in its row, and the logits after it [V]."""
        for start in range(0, max(len(row) for row in rows), self.chunk):
            parts = [row[start : start + self.chunk] for row in rows]
            logits = session.step(parts, "all")
            for b, part in enumerate(parts):
                for offset in range(len(part)):
                    yield b, start + offset, logits[b, offset]

    def _at_once(self, jobs: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> Iterator[Score]:
        ordered = sorted(jobs, key=lambda job: len(job[1]) + len(job[2]), reverse=True)
        widest = max((len(continuation) for _, _, continuation in ordered), default=1)
        fitting = LOGITS_LIMIT // (4 * widest * self.engine.artefact.vocab_size)
        for group in _batches(ordered, max(1, min(self.batch, fitting))):
            rows = [[*context, *continuation[:-1]] for _, context, continuation in group]
            picks = np.zeros((len(group), max(len(continuation) for _, _, continuation in group)), np.int64)
            for b, (_, context, continuation) in enumerate(group):
                picks[b, : len(continuation)] = len(context) - 1 + np.arange(len(continuation))
            with self.engine.session(batch=len(group)) as session:
                logits = session.step(rows, picks)  # [B, P, V]
            for b, (number, _, continuation) in enumerate(group):
                total = sum(_logprob(logits[b, place], token) for place, token in enumerate(continuation))
                yield Score(number, float(total[0]), not total[1])


def windows(tokens: Sequence[int], prefix: int, length: int) -> list[Pair]:
    """Pairs that predict each of `tokens` once, with as much context as a cache of `length` tokens allows.

    `prefix` comes before the first token. All windows but the last predict `length` tokens from one before them; the
    last predicts the rest from the `length` tokens that end before its last.
    """
    end = min(length, len(tokens))
    pairs: list[Pair] = [([prefix], tokens[:end])] if end else []
    while end < len(tokens):
        size = min(length, len(tokens) - end)
        end += size
        pairs.append((tokens[end - length - 1 : end - size], tokens[end - size : end]))
    return pairs


def _batches(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _logprob(logits: np.ndarray, token: int) -> np.ndarray:
    """float64 [2]: the token's log-probability, and 1 when another token is more likely (a tie: a lower one)."""
    row = logits.astype(np.float64)
    row -= row.max()
    return np.array([row[token] - np.log(np.exp(row).sum()), row.argmax() != token])
