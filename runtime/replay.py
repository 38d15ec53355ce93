"""Decode steps as CUDA graphs: which steps are captured, under which number, and the fixed buffers that they read.

ONNX Runtime captures the kernels of a run under the number that the run option "gpu_graph_id" names, and replays them
whenever that number comes again: at the addresses and sizes of the captured run, so that every input has a place of its
own and whatever has another size has another number. A captured step runs more than once before it is captured, which
changes nothing: a step writes no row that it reads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from plugins.contract import HOST_INPUTS, ONNX_TYPES
from plugins.geometry import SELECT_STEP
from runtime.artefact import Artefact
from runtime.device import Memory

OPTION = "gpu_graph_id"
NOT_CAPTURED = -1  # the number of runs that are no part of a graph
CAPTURE_AFTER = 2  # steps of a kind that run as they are: short generations are not worth a capture
GRAPHS = 256  # captured in all by one engine, which never forgets one
ALIGNMENT = 256
ON_HOST = ("live", "select_width")  # scalars that ops read before they launch anything
# A capture fails when anything else in the process allocates or copies on the device meanwhile.
GPU = threading.RLock()

Kind = tuple[int, int]  # rows encoded per sequence, and the room for selected rows


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


def room(count: int, most: int) -> int:
    """Selected rows that a captured step has room for: few sizes, so that few graphs are captured as `count` grows."""
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

    Valid as long as the state, of `capacity` tokens, stays where it is and the engine keeps its InferenceSession.
    """

    def __init__(self, artefact: Artefact, batch: int, capacity: int, memory: Memory, numbers: Numbers) -> None:
        """Raises MemoryError."""
        self.artefact, self.batch, self.capacity = artefact, batch, capacity
        self.memory, self.numbers = memory, numbers
        self.uses: Counter[Kind] = Counter()
        self.recorded: dict[Kind, Recorded] = {}
        geometry = artefact.geometry
        sizes = {"batch": batch, "sequence": 1, "picks": 1, "encode": geometry.block if geometry else 0}
        self.names = {spec.role: spec.name for spec in artefact.inputs if spec.role != "state"}
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}  # role -> offset and largest shape
        end = 0
        for role in self.names:
            if role not in ON_HOST:
                dtype, symbols = HOST_INPUTS[role]
                shape = tuple(sizes[symbol] for symbol in symbols)
                self.places[role] = end, shape
                end += -(-prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.logits_shape = (batch, 1, artefact.vocab_size)
        self.host = memory.staging(end)
        self.host_logits = memory.staging(4 * prod(self.logits_shape))
        self.inputs = self._allocated(end)
        self.logits = self._allocated(self.host_logits.nbytes)

    def kind(self, feeds: Mapping[str, np.ndarray]) -> Kind:
        """What tells the sizes of a decode step."""
        encode = feeds["enc_src"].shape[1] if "enc_src" in feeds else 0
        count = int(feeds["select_len"].max()) if "select_len" in feeds else 0
        return encode, room(count, self.artefact.geometry.encoded(self.capacity)) if count else 0

    def step(self, kind: Kind, bind: Any) -> Recorded | None:
        """The step of a kind, to run now; None: run it as it is.

        bind() makes an IOBinding of the state. A step is captured once its kind was seen often enough, while there are
        numbers left.
        """
        found = self.recorded.get(kind)
        if found is None and self.uses[kind] >= CAPTURE_AFTER and (number := self.numbers.take()) is not None:
            found = self.recorded[kind] = Recorded(number, bind())
            self._bind(found, kind)
        self.uses[kind] += 1
        return found

    def feed(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Bring what the host gives a step to the device."""
        for role, (offset, _) in self.places.items():
            array = np.ascontiguousarray(feeds[role])
            self.host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.memory.upload(self.inputs, self.host)

    def answer(self) -> np.ndarray:
        """The logits of the step that ran, float32 [B, 1, V]."""
        self.memory.download(self.logits, self.host_logits)
        return self.host_logits.view(np.float32).reshape(self.logits_shape).copy()

    def _bind(self, step: Recorded, kind: Kind) -> None:
        from onnxruntime import OrtValue

        encode, width = kind
        numbers = {"live": self.capacity, "select_width": width}  # a step of one token reads its own lengths
        for role, (offset, shape) in self.places.items():
            if role in ("enc_src", "enc_dst"):
                shape = (self.batch, encode)
            dtype = ONNX_TYPES[HOST_INPUTS[role][0]]
            step.binding.bind_input(self.names[role], self.memory.provider, 0, dtype, shape, self.inputs + offset)
        for role in ON_HOST:
            if role in self.names:
                value = OrtValue.ortvalue_from_numpy(np.array(numbers[role], np.int32))
                step.binding.bind_ortvalue_input(self.names[role], value)
                step.keep.append(value)
        name = next(spec.name for spec in self.artefact.outputs if spec.role == "logits")
        place = (self.memory.provider, 0, ONNX_TYPES["float32"], self.logits_shape, self.logits)
        step.binding.bind_output(name, *place)

    def _allocated(self, nbytes: int) -> int:
        address = self.memory.allocate(nbytes)
        weakref.finalize(self, self.memory.free, address)
        self.memory.zero(address, nbytes)
        return address
