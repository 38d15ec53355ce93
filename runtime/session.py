"""One cache and its lengths: prefill, decode, fork, snapshot. Every check comes before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plugins.contract import LIVE_STEP, capacity_for
from plugins.errors import UserError
from runtime.backend import Feeds, RunError
from runtime.device import GPU
from runtime.parts import joined, split
from runtime.state import Snapshot, State

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.generate import Token
    from runtime.sampling import SamplingParams

Picks = Literal["last", "all"] | Sequence[int] | np.ndarray


class ContextOverflow(UserError):
    """A sequence would become longer than the engine's limit; the session is as it was before the call."""


class StepFailed(UserError):
    """The backend failed inside a step, most often for want of memory."""


class Interrupted(StepFailed):
    """Another thread called `Session.interrupt`."""


class Session:
    """A cache for `batch` sequences. Made by `Engine.session`; one thread at a time may use it.

    lengths: tokens stored per sequence, int32 [B]. nbytes: bytes of the cache as allocated.
    watch_selected: whether the next steps keep in `selected` which code rows each observing layer chose, int32
        [B, M] by layer; of sequence b the first `Geometry.selected` of its stored tokens count, in a step of one token.
    pending: tokens that `generate` produced and has not stored yet; its next call stores them first.
    chat: the messages so far, when the session was given messages.
    """

    def __init__(self, engine: Engine, batch: int) -> None:
        artefact = engine.artefact
        self.engine = engine
        self.batch = batch
        self.lengths = np.zeros(batch, np.int32)
        self.nbytes = 0
        self.watch_selected = False
        self.selected: dict[int, np.ndarray] = {}
        self.pending: list[int] = []
        self.chat: list[dict[str, str]] = []
        self.closed = False
        self.broken = False
        self.turn = 0  # counts generate() calls, so that an abandoned generator cannot touch a later turn
        self._state = State(artefact.states, artefact.geometry, batch, engine.memory, artefact.copies)
        self._names = {spec.role: spec.name for spec in artefact.inputs if spec.role != "state"}
        self._steps = engine.backend.steps(self._state)
        self._busy = threading.Lock()
        engine.reserve(self, 0)

    @property
    def capacity(self) -> int:
        """Tokens per sequence for which memory is allocated."""
        return self._state.capacity

    @property
    def most(self) -> tuple[int, int] | None:
        """Tokens and logits per sequence that the backend takes at once, over the cache as it is; None: any number.

        A step of more is split: what comes later attends to the compressed cache of what came before.
        """
        return self._steps.most()

    def prefill(self, tokens: Sequence[int] | Sequence[Sequence[int]], logits: Picks = "last") -> np.ndarray:
        """Append tokens, any number per sequence, and return logits, float32 [B, P, V].

        tokens: one list per sequence, or one plain list for batch 1. logits: "last" (P = 1), "all" (P = longest list;
        rows past a sequence's own tokens mean nothing), or indices into the new tokens, [P] or [B, P].
        """
        flat = len(tokens) == 0 or np.ndim(tokens[0]) == 0
        return self.step([tokens] if flat else tokens, logits)

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Append one token to every sequence, [B], and return the next logits, float32 [B, V]."""
        return self.step([[token] for token in tokens])[:, 0]

    def step(self, token_lists: Sequence[Sequence[int]], logits: Picks = "last") -> np.ndarray:
        """Append `token_lists[b]` (possibly empty) to sequence b; returns logits, float32 [B, P, V].

        Raises ContextOverflow or UserError before anything is written, StepFailed when the graph itself fails.
        """
        with self._exclusive():
            tokens, new = self._checked(token_lists)
            picks = _logit_index(logits, new, tokens.shape[1])
            needed = int((self.lengths + new).max())
            if needed > self.capacity:
                self._allocate(capacity_for(needed, self.engine.artefact.max_length, self.capacity))
            return self._run(tokens, new, picks)

    def check(self, token_lists: Sequence[Sequence[int]]) -> None:
        """Raise what `step` would raise about these tokens, and do nothing else."""
        with self._exclusive():
            self._checked(token_lists)

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
        """The tokens that `generate` would store for this prompt, pending ones first; stores nothing."""
        from runtime.generate import encode

        return self.pending + encode(self.engine, prompt, self)[0]

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        cancel: threading.Event | None = None,
    ) -> Generator[Token, None, None]:
        """Append the prompt and stream a continuation; see `runtime.generate.stream`."""
        from runtime.generate import stream

        return stream(self, prompt, params, cancel)

    def allocate(self, capacity: int) -> None:
        """Make room for `capacity` tokens per sequence now. Benches may go beyond the engine's limit."""
        with self._exclusive():
            if capacity < int(self.lengths.max()):
                raise UserError(f"capacity {capacity} is below the {int(self.lengths.max())} tokens already stored.")
            self._allocate(capacity)

    def fork(self) -> Session:
        """A second session with a copy of this one's content."""
        other = Session(self.engine, self.batch)
        try:
            other.restore(self.snapshot())
        except BaseException:
            other.close()
            raise
        return other

    def snapshot(self) -> Snapshot:
        with self._exclusive(), self._alone():
            stored = int(self.lengths.max())
            arrays = self._state.trimmed(stored) if self.capacity else {}
            digest = self.engine.artefact.config["digest"]
            chat = tuple(dict(message) for message in self.chat)
            return Snapshot(digest, self.lengths.copy(), tuple(self.pending), chat, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the content by a snapshot's, whatever state the session is in (but closed)."""
        with self._exclusive(broken_too=True):
            if snapshot.digest != self.engine.artefact.config["digest"]:
                raise UserError("this snapshot was taken with another engine: restore it there.")
            if len(snapshot.lengths) != self.batch:
                raise UserError(
                    f"this snapshot holds {len(snapshot.lengths)} sequences and the session {self.batch}: "
                    f"open a session with batch={len(snapshot.lengths)}."
                )
            stored = int(snapshot.lengths.max())
            if snapshot.arrays:
                capacity = max(self.capacity, capacity_for(stored, self.engine.artefact.max_length))
                capacity = self._steps.fitting(capacity)
                with self._moving(capacity):
                    self._state.load(snapshot.arrays, capacity, stored)
            self.lengths = snapshot.lengths.copy()
            self.pending, self.chat = list(snapshot.pending), [dict(message) for message in snapshot.chat]
            self.turn += 1
            self.broken = False

    def reset(self) -> None:
        """Forget every token, keep the memory."""
        with self._exclusive(broken_too=True):
            self.lengths = np.zeros(self.batch, np.int32)
            self.pending, self.chat = [], []
            self.turn += 1
            self.broken = False

    def interrupt(self) -> None:
        """From another thread: stop the step in progress, if there is one, as soon as the backend can.

        ONNX Runtime stops at the graph's next node, TensorRT between the parts of a long prompt.
        """
        self._steps.interrupt()

    def close(self) -> None:
        """Free the cache. Waits for a running step; closing twice is allowed."""
        with self._busy, self._alone():
            self.closed = True
            self._steps.close()
            self._state.release()
            self.nbytes = 0

    def state(self, name: str) -> np.ndarray:
        """A state tensor by its input name, padding rows included (read only); bfloat16 as its bits, uint16."""
        view = self._state.array(name).view()
        view.flags.writeable = False
        return view

    def fill(self, length: int, seed: int = 0) -> None:
        """For benches: pretend that `length` tokens are stored, with random content in every allocated row."""
        with self._exclusive(), self._alone():
            if length > self.capacity:
                raise UserError(f"length {length} exceeds the allocated capacity {self.capacity}.")
            self._state.fill(seed)
            self.lengths = np.full(self.batch, length, np.int32)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _exclusive(self, broken_too: bool = False) -> Iterator[None]:
        """Hold the session for one call; refuse a second thread, a closed session and a broken one."""
        if not self._busy.acquire(blocking=False):
            raise UserError("this session is in use by another thread: give each thread its own session.")
        try:
            if self.closed:
                raise UserError("this session is closed: open another with engine.session().")
            if self.broken and not broken_too:
                raise UserError("this session lost its cache in a failed step: restore a snapshot or reset it.")
            yield
        finally:
            self._busy.release()

    def _checked(self, token_lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Right-padded tokens, int64 [B, S], and their counts, int32 [B]."""
        artefact = self.engine.artefact
        if len(token_lists) != self.batch:
            raise UserError(f"{len(token_lists)} token lists were given to a session of batch {self.batch}.")
        rows = [np.asarray(row) for row in token_lists]
        for number, row in enumerate(rows):
            if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
                raise UserError(f"the tokens of sequence {number} are not a list of integers.")
            if row.size and not 0 <= int(row.min()) <= int(row.max()) < artefact.vocab_size:
                bad = int(row[(row < 0) | (row >= artefact.vocab_size)][0])
                raise UserError(f"token {bad} of sequence {number} is outside the vocabulary of {artefact.vocab_size}.")
            if self.lengths[number] + row.size > artefact.max_length:
                raise ContextOverflow(
                    f"sequence {number} holds {self.lengths[number]} tokens and {row.size} more exceed the engine's "
                    f"limit of {artefact.max_length}: shorten the prompt or export with a larger --max-length."
                )
        new = np.array([row.size for row in rows], np.int32)
        if not new.any():
            raise UserError("there are no tokens to append: the prompt is empty.")
        tokens = np.zeros((self.batch, int(new.max())), np.int64)
        for number, row in enumerate(rows):
            tokens[number, : row.size] = row
        return tokens, new

    def _allocate(self, capacity: int) -> None:
        capacity = self._steps.fitting(capacity)
        with self._moving(capacity):
            self._state.allocate(capacity, int(self.lengths.max()))

    @contextmanager
    def _moving(self, capacity: int) -> Iterator[None]:
        """While the state moves to buffers of `capacity` tokens."""
        before = self.capacity
        self.engine.reserve(self, capacity)
        with self._alone():
            self._steps.close()
            try:
                yield
            except BaseException:
                self.broken |= self.capacity != before  # a device had less memory than it said
                self.engine.reserve(self, self.capacity)
                raise
            finally:
                if self.capacity:
                    self._steps.moved()

    def _alone(self) -> Any:
        """Nothing else in the process may touch a GPU while a graph is captured."""
        return GPU if self.engine.memory is not None else nullcontext()

    def _run(self, tokens: np.ndarray, new: np.ndarray, picks: np.ndarray) -> np.ndarray:
        past = self.lengths
        parts = split(tokens, new, picks, self._steps.most())
        lengths, feeds = past, []
        for part in parts:
            feeds.append(self._feeds(lengths, part.tokens, part.new, part.picks))
            lengths = lengths + part.new
        with self._alone():
            try:
                answers = self._steps.run(feeds, self.watch_selected)
            except RunError as error:
                raise self._failure(error, int(new.max())) from error
        self.lengths, self.selected = lengths, answers[-1][1]
        return joined(parts, [logits for logits, _ in answers], picks)

    def _failure(self, error: RunError, new: int) -> StepFailed:
        """What a failed run means for this session."""
        past = int(self.lengths.max())
        self.broken = error.begun and past > 0 and not self._state.append_only
        mend = "restore a snapshot or reset the session" if self.broken else "the session is as before"
        step = f"appending {new} tokens to {past}"
        if error.interrupted:
            return Interrupted(f"{step} was interrupted: {mend}.")
        return StepFailed(f"{step} failed inside {self.engine.backend.name} ({error}): {mend}.")

    def _feeds(self, past: np.ndarray, tokens: np.ndarray, new: np.ndarray, picks: np.ndarray) -> Feeds:
        """What the host gives a step that appends to `past` tokens, by role."""
        artefact = self.engine.artefact
        live = min(-(-int(past.max()) // LIVE_STEP) * LIVE_STEP, self.capacity)
        feeds = {
            "tokens": tokens,
            "past_len": past.copy(),
            "new_len": new,
            "live": np.array(live, np.int32),
            "logit_index": picks,
        }
        if "enc_src" in self._names:
            feeds["enc_src"], feeds["enc_dst"] = artefact.geometry.schedule(past, new, self._state.code_rows - 1)
        if "select_len" in self._names:
            single = tokens.shape[1] == 1
            feeds["select_len"], feeds["select_width"] = artefact.geometry.selection(past, live, single)
        return feeds


def _logit_index(logits: Picks, new: np.ndarray, width: int) -> np.ndarray:
    """int64 [B, P]: which of the new positions' logits are wanted."""
    if isinstance(logits, str):
        if logits == "last":
            return np.maximum(new - 1, 0).astype(np.int64)[:, None]
        if logits == "all":
            return np.tile(np.arange(width, dtype=np.int64), (len(new), 1))
        raise UserError(f"logits={logits!r}: use 'last', 'all' or indices.")
    index = np.asarray(logits)
    if index.ndim not in (1, 2) or index.dtype.kind not in "iu" or index.shape[:-1] not in ((), (len(new),)):
        raise UserError("logits must be 'last', 'all', or integers of shape [P] or [batch, P].")
    if index.size == 0 or int(index.min()) < 0 or int(index.max()) >= width:
        raise UserError(f"the logit indices must be between 0 and {width - 1}, the positions of the new tokens.")
    return np.broadcast_to(index, (len(new), index.shape[-1])).astype(np.int64)
