"""Decode steps as CUDA graphs: which steps are captured, under which number, and the fixed buffers that they read.

A captured step is replayed at the addresses and sizes that it was captured with, so that every input has a place of its
own and whatever has another size is another kind of step. ONNX Runtime keeps what it captured under the number that the
run option "gpu_graph_id" names, for ever. A captured step may run more than once before it is captured, which changes
nothing: a step writes no row that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from plugins.contract import HOST_INPUTS
from plugins.geometry import SELECT_STEP
from runtime.artefact import Artefact
from runtime.device import Block, Memory, side_by_side

if TYPE_CHECKING:
    from runtime.state import State

CAPTURE_AFTER = 2  # steps of a kind that run as they are: short generations are not worth a capture
GRAPHS = 256  # captured in all by one engine, which never forgets one
ON_HOST = ("live", "select_width")  # scalars that ops read before they launch anything


class Kind(NamedTuple):
    """What the sizes of a decode step follow from.

    encode: rows encoded per sequence. selected: the room for selected rows. live: the stored rows that it looks at.
    side: which of the state's buffers it reads, where there are two.
    """

    encode: int
    selected: int
    live: int
    side: int = 0


class Numbers:
    """The graph numbers of one engine."""

    def __init__(self, limit: int = GRAPHS) -> None:
        self.limit = limit
        self.used = 0

    def take(self) -> int | None:
        """A number that no graph has; None when there are enough graphs."""
        if self.used >= self.limit:
            return None
        self.used += 1
        return self.used

    def give_back(self) -> None:
        """One graph less is there; only for a backend that asks for how many, not which."""
        self.used -= 1


def is_decode(feeds: Mapping[str, np.ndarray]) -> bool:
    """Whether a step appends one token per sequence and gives one row of logits: no other is captured."""
    return feeds["tokens"].shape[1] == 1 and feeds["logit_index"].shape[1] == 1


def room(count: int, most: int) -> int:
    """Rows that a captured step has room for: few sizes, so that few graphs are captured as `count` grows."""
    step = max(SELECT_STEP, 1 << max(count - 1, 1).bit_length() >> 3)
    return min(-(-count // step) * step, most)


@dataclass
class Recorded:
    """A kind of step: its number, where everything is bound, and whether it was captured. keep: what is bound."""

    number: int
    binding: Any
    captured: bool = False
    keep: list[Any] = field(default_factory=list)


class Replays:
    """The captured decode steps of one session, and the buffers they share.

    Valid as long as the state, of `capacity` tokens, stays where it is and the backend keeps its model. follow: whether
    a step costs by `live`, so that it is captured for a room of its own that grows with the lengths; otherwise steps
    of one token read the lengths themselves.
    """

    def __init__(
        self, artefact: Artefact, batch: int, capacity: int, memory: Memory, numbers: Numbers, follow: bool = False
    ) -> None:
        """Raises MemoryError."""
        self.artefact, self.batch, self.capacity, self.numbers = artefact, batch, capacity, numbers
        self.uses: Counter[Kind] = Counter()
        self.recorded: dict[Kind, Recorded] = {}
        geometry = artefact.geometry
        sizes = {"batch": batch, "sequence": 1, "picks": 1, "encode": geometry.block if geometry else 0}
        roles = {spec.role for spec in artefact.inputs if spec.role != "state"}
        self.on_host = [role for role in ON_HOST if role in roles]
        self.follow = follow and "live" in roles
        self.shapes = {
            role: (np.dtype(HOST_INPUTS[role][0]), tuple(sizes[symbol] for symbol in HOST_INPUTS[role][1]))
            for role in HOST_INPUTS
            if role in roles and role not in ON_HOST
        }  # the largest
        self.places, end = side_by_side(self.shapes)
        self.logits_shape = (batch, 1, artefact.vocab_size)
        self.inputs = Block(memory, end)
        self.logits = Block(memory, 4 * prod(self.logits_shape))

    def kind(self, feeds: Mapping[str, np.ndarray], side: int = 0) -> Kind:
        """What tells the sizes of a decode step."""
        encode = feeds["enc_src"].shape[1] if "enc_src" in feeds else 0
        count = int(feeds["select_len"].max()) if "select_len" in feeds else 0
        live = room(int(feeds["live"]), self.capacity) if self.follow else self.capacity
        selected = 0
        if count:
            geometry = self.artefact.geometry
            longest = np.array([max(self.artefact.max_length, self.capacity)])
            width = int(geometry.selection(longest, int(longest[0]), single=True)[1])  # no step has more
            selected = room(count, min(geometry.encoded(live), width))
        return Kind(encode, selected, live, side)

    def step(self, kind: Kind, bind: Callable[[Kind, int], Recorded]) -> Recorded | None:
        """The step of a kind, to run now; None: run it as it is.

        bind(kind, number) makes one that is not captured yet. A step is captured once its kind was seen often enough,
        while there are numbers left.
        """
        found = self.recorded.get(kind)
        if found is None and self.uses[kind] >= CAPTURE_AFTER and (number := self.numbers.take()) is not None:
            try:
                found = self.recorded[kind] = bind(kind, number)
            except BaseException:
                self.numbers.give_back()
                raise
        self.uses[kind] += 1
        return found

    def inputs_of(self, kind: Kind) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Role -> address on the device, and shape, of what the host gives a step of this kind."""
        shapes = {role: shape for role, (_, shape) in self.shapes.items()}
        shapes |= {role: (self.batch, kind.encode) for role in ("enc_src", "enc_dst") if role in shapes}
        return {role: (self.inputs.address + self.places[role], shape) for role, shape in shapes.items()}

    def numbers_of(self, kind: Kind) -> dict[str, int]:
        """Role -> number that a step of this kind is captured with."""
        return {role: {"live": kind.live, "select_width": kind.selected}[role] for role in self.on_host}

    def feed(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Bring what the host gives a step to the device."""
        self.inputs.upload({offset: feeds[role] for role, offset in self.places.items()})

    def answer(self) -> np.ndarray:
        """The logits of the step that ran, float32 [B, 1, V]."""
        return self.logits.download().view(np.float32).reshape(self.logits_shape).copy()


class Capturing:
    """The part of a `runtime.backend.Steps` that finds the captured decode step."""

    backend: Any  # with artefact, memory, graphs (Numbers, or None: capture nothing) and follow
    state: State
    _replays: Replays | None = None  # none before a step asks for them, or after the state moved

    def _recorded(self, feeds: Mapping[str, np.ndarray], bind: Callable[[Kind, int], Recorded]) -> Recorded | None:
        """The captured step, or the one to capture now, that does what these feeds ask; None: there is none.

        bind: see `Replays.step`.
        """
        backend, state = self.backend, self.state
        if backend.graphs is None or not is_decode(feeds):
            return None
        try:
            if self._replays is None:
                self._replays = Replays(
                    backend.artefact, state.batch, state.capacity, backend.memory, backend.graphs, backend.follow
                )
            return self._replays.step(self._replays.kind(feeds, state.side), bind)
        except MemoryError:  # it goes without
            return None
