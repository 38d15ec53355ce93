"""The buffers of one session's cache: allocate, grow, copy. Each is a graph input and output at one address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.contract import TensorSpec, bytes_at, row_count, state_sizes
from plugins.errors import UserError
from plugins.geometry import Geometry
from runtime.tensors import DeviceTensor, HostTensor

if TYPE_CHECKING:
    from runtime.device import Memory

INDEX_DTYPES = ("int16", "int32")  # of states that hold reference ordinals
INDEX = ".index"  # how the name of such a state ends; as int8 it holds the bytes of int16
NOISE = 65521  # numbers that `fill` repeats; prime, so that the pattern differs between rows
CHUNK = 4096  # rows whose references `fill` draws at once


@dataclass(frozen=True)
class Snapshot:
    """A copy of a session's cache, in host memory; restore it into any session of the same engine and batch."""

    digest: str
    lengths: np.ndarray  # int32 [B]
    pending: tuple[int, ...]
    chat: tuple[dict[str, str], ...]
    arrays: dict[str, np.ndarray] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class State:
    """State tensors of `batch` sequences with room for `capacity` tokens each (0: nothing is allocated yet).

    memory: where they are; None for the host's. copies: 2 where a step writes to other buffers than it reads, which
    `swap` makes the content; 1: it writes in place.
    Unused rows are zero, never uninitialised: the graph masks them, and a masked NaN would still be a NaN.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        geometry: Geometry | None,
        batch: int,
        memory: Memory | None = None,
        copies: int = 1,
    ) -> None:
        self.specs = tuple(specs)
        self.geometry = geometry
        self.batch = batch
        self.memory = memory
        self.copies = copies
        self.capacity = 0
        self.side = 0  # changes with every swap
        self._tensors: dict[str, HostTensor | DeviceTensor] = {}
        self._others: dict[str, HostTensor | DeviceTensor] = {}

    @property
    def code_rows(self) -> int:
        """Rows of the code tensors, the trash row included; 0 without a geometry."""
        return state_sizes(self.capacity, self.geometry).get("code_rows", 0)

    @property
    def append_only(self) -> bool:
        """Whether a step never overwrites a stored row, so that a failed step leaves the cache valid."""
        return all(spec.row_symbol for spec in self.specs)

    def bind(self, binding: Any) -> None:
        """Make every tensor the input and the output of its names in an IOBinding."""
        for tensor in self._tensors.values():
            tensor.bind(binding)

    def places(self) -> Iterator[tuple[TensorSpec, tuple[int, ...], int, int]]:
        """Of every tensor on a device its spec, its sizes, and the addresses that a step reads and writes."""
        for name, tensor in self._tensors.items():
            yield tensor.spec, tensor.dims, tensor.address, self._others.get(name, tensor).address

    def swap(self) -> None:
        """A step has written the other buffers: they are the content now."""
        if self._others:
            self._tensors, self._others = self._others, self._tensors
            self.side ^= 1

    def array(self, name: str) -> np.ndarray:
        """The whole tensor: the live memory on the CPU, a copy elsewhere."""
        return self._tensors[name].array()

    def allocate(self, capacity: int, stored: int = 0) -> None:
        """Move to new buffers of `capacity` tokens, keeping the rows that `stored` tokens use.

        Raises UserError when there is no memory; then everything is as before, or, where a device had less memory than
        it said, nothing is left and the capacity 0.
        """
        fresh: dict[str, HostTensor | DeviceTensor] = {}
        try:
            if self.memory is None:  # zeroed pages are not resident until written, so this does not double the memory
                fresh = {spec.name: self._tensor(spec, capacity) for spec in self.specs}
            else:
                self._check_room(capacity)
            self._others = {}
        except MemoryError:
            raise self._no_room(capacity) from None
        try:
            for spec in self.specs:
                tensor = fresh.pop(spec.name) if fresh else self._tensor(spec, capacity)
                if self.capacity:
                    tensor.take(self._tensors[spec.name], self._rows(spec, stored))
                self._tensors[spec.name] = tensor  # frees the old one
            if self.copies > 1:
                self._others = {spec.name: self._tensor(spec, capacity) for spec in self.specs}
        except MemoryError:
            self.release()
            raise self._no_room(capacity) from None
        self.capacity = capacity

    def trimmed(self, stored: int) -> dict[str, np.ndarray]:
        """Host copies of the rows that `stored` tokens use."""
        return {spec.name: self._tensors[spec.name].trimmed(self._rows(spec, stored)) for spec in self.specs}

    def load(self, arrays: Mapping[str, np.ndarray], capacity: int, stored: int) -> None:
        """Move to new buffers of `capacity` tokens that hold what `trimmed(stored)` returned."""
        if self.memory is not None:  # nothing of the old content is kept
            self.release()
        self.allocate(capacity)
        for spec in self.specs:
            self._tensors[spec.name].load(arrays[spec.name], self._rows(spec, stored))

    def fill(self, seed: int = 0) -> None:
        """Write every row with plausible random content, for benches that need a long cache without a prompt."""
        rng = np.random.default_rng(seed)
        for spec in self.specs:
            tensor = self._tensors[spec.name]
            if spec.dtype in INDEX_DTYPES or spec.name.endswith(INDEX):
                array = tensor.array()
                self._fill_ordinals(spec, array.view("<i2") if spec.dtype == "int8" else array, rng)
                if self.memory is not None:  # there `array` is a copy
                    tensor.load(array, self._rows(spec, None))
            else:
                tensor.repeat(_noise(spec, rng))

    def _fill_ordinals(self, spec: TensorSpec, array: np.ndarray, rng: np.random.Generator) -> None:
        """Random references that each code row may name: of row j the sinks and those up to j."""
        geometry = self.geometry
        if geometry is None or not geometry.stride:
            array[...] = 0
            return
        by_row = np.moveaxis(array, spec.row_axis, 0)  # [rows, ...], a view
        for start in range(0, len(by_row), CHUNK):
            part = by_row[start : start + CHUNK]
            last = np.arange(start, start + len(part)) // geometry.stride + geometry.sinks
            last = np.minimum(last, np.iinfo(array.dtype).max).reshape(-1, *(1,) * (part.ndim - 1))
            part[...] = rng.integers(0, last, part.shape, array.dtype, endpoint=False)

    def release(self) -> None:
        self._tensors, self._others = {}, {}
        self.capacity = 0

    def _tensor(self, spec: TensorSpec, capacity: int) -> HostTensor | DeviceTensor:
        dims = spec.dims(state_sizes(capacity, self.geometry, self.batch))
        return HostTensor(spec, dims) if self.memory is None else DeviceTensor(spec, dims, self.memory)

    def _check_room(self, capacity: int) -> None:
        """Raises MemoryError when the memory cannot hold the new tensors, each of them beside the one it replaces."""
        sizes = state_sizes(capacity, self.geometry, self.batch)
        held = bytes_at(self.specs, self.capacity, self.geometry, self.batch) if self.capacity else 0
        wanted = bytes_at(self.specs, capacity, self.geometry, self.batch)
        largest = max((spec.nbytes(sizes) for spec in self.specs), default=0) if self.capacity else 0
        if self.copies * (wanted - held) + largest > self.memory.free_bytes():
            raise MemoryError

    def _no_room(self, capacity: int) -> UserError:
        return UserError(
            f"there is no memory for a cache of {capacity} tokens x {self.batch} sequences: "
            "close other sessions, or use fewer or shorter sequences."
        )

    def _rows(self, spec: TensorSpec, stored: int | None) -> int | None:
        """Rows of a tensor that `stored` tokens use (None: all of them); None where it has no row axis."""
        if spec.row_symbol is None:
            return None
        if stored is None:
            return state_sizes(self.capacity, self.geometry)[spec.row_symbol]
        return row_count(spec.row_symbol, stored, self.geometry)


def _noise(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    """NOISE numbers in the dtype that holds the tensor."""
    if spec.dtype == "int8":
        return rng.integers(-128, 128, NOISE).astype(spec.dtype)
    noise = rng.standard_normal(NOISE).clip(-3, 3).astype(np.float32)
    if spec.dtype == "bfloat16":
        return (noise.view(np.uint32) >> 16).astype(spec.carrier)  # the upper half of a float32
    return noise.astype(spec.dtype)
