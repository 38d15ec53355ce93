"""The buffers of one session's cache: allocate, grow, copy. Each is a graph input and output at one address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plugins.contract import TensorSpec, row_count, state_sizes
from plugins.errors import UserError
from plugins.geometry import Geometry

INDEX_DTYPES = ("int16", "int32")  # of states that hold reference ordinals
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

    device: "cpu", where numpy owns the memory and untouched rows cost none, or "cuda".
    Unused rows are zero, never uninitialised: the graph masks them, and a masked NaN would still be a NaN.
    """

    def __init__(self, specs: Sequence[TensorSpec], geometry: Geometry | None, batch: int, device: str = "cpu") -> None:
        self.specs = tuple(specs)
        self.geometry = geometry
        self.batch = batch
        self.device = device
        self.capacity = 0
        self._values: dict[str, object] = {}  # name -> OrtValue
        self._arrays: dict[str, np.ndarray] = {}  # on the CPU: the memory that the OrtValue of that name points to

    @property
    def code_rows(self) -> int:
        """Rows of the code tensors, the trash row included; 0 without a geometry."""
        return state_sizes(self.capacity, self.geometry).get("code_rows", 0)

    @property
    def append_only(self) -> bool:
        """Whether a step never overwrites a stored row, so that a failed step leaves the cache valid."""
        return all(spec.row_symbol for spec in self.specs)

    def values(self) -> Iterator[tuple[TensorSpec, object]]:
        return ((spec, self._values[spec.name]) for spec in self.specs)

    def array(self, name: str) -> np.ndarray:
        """The whole tensor: the live memory on the CPU, a copy elsewhere."""
        return self._arrays[name] if name in self._arrays else self._values[name].numpy()

    def allocate(self, capacity: int, stored: int = 0) -> None:
        """Move to new buffers of `capacity` tokens, keeping the rows that `stored` tokens use. All or nothing."""
        try:
            # On the CPU zeroed pages are not resident until written, so this does not double the memory.
            fresh = {spec.name: self._zeros(spec, capacity) for spec in self.specs}
        except MemoryError:
            raise UserError(
                f"there is no memory for a cache of {capacity} tokens x {self.batch} sequences: "
                "close other sessions, or use fewer or shorter sequences."
            ) from None
        for spec in self.specs:
            if self.capacity:
                used = self._used(spec, stored)
                fresh[spec.name][used] = self.array(spec.name)[used]
            self._put(spec.name, fresh.pop(spec.name))  # frees the old buffer
        self.capacity = capacity

    def trimmed(self, stored: int) -> dict[str, np.ndarray]:
        """Host copies of the rows that `stored` tokens use."""
        return {spec.name: self.array(spec.name)[self._used(spec, stored)].copy() for spec in self.specs}

    def load(self, arrays: Mapping[str, np.ndarray], capacity: int, stored: int) -> None:
        """Move to new buffers of `capacity` tokens that hold what `trimmed(stored)` returned."""
        fresh = {spec.name: self._zeros(spec, capacity) for spec in self.specs}
        for spec in self.specs:
            fresh[spec.name][self._used(spec, stored)] = arrays[spec.name]
            self._put(spec.name, fresh.pop(spec.name))
        self.capacity = capacity

    def fill(self, seed: int = 0) -> None:
        """Write every row with plausible random content, for benches that need a long cache without a prompt."""
        rng = np.random.default_rng(seed)
        for spec in self.specs:
            array = self.array(spec.name)
            if spec.dtype in INDEX_DTYPES:
                self._fill_ordinals(spec, array, rng)
            else:
                noise = rng.standard_normal(NOISE).clip(-3, 3).astype(spec.dtype)
                if spec.dtype == "int8":
                    noise = rng.integers(-128, 128, NOISE).astype(spec.dtype)
                flat = array.reshape(-1)
                for start in range(0, flat.size, NOISE):  # in place: a copy would double what a bench measures
                    flat[start : start + NOISE] = noise[: flat.size - start]
            if self.device != "cpu":  # there `array` is a copy
                self._values[spec.name].update_inplace(array)

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
            last = np.minimum(last, np.iinfo(spec.dtype).max).reshape(-1, *(1,) * (part.ndim - 1))
            part[...] = rng.integers(0, last, part.shape, spec.dtype, endpoint=False)

    def release(self) -> None:
        self._values, self._arrays = {}, {}
        self.capacity = 0

    def _zeros(self, spec: TensorSpec, capacity: int) -> np.ndarray:
        return np.zeros(spec.dims(state_sizes(capacity, self.geometry, self.batch)), spec.dtype)

    def _put(self, name: str, array: np.ndarray) -> None:
        from onnxruntime import OrtValue

        self._values[name] = OrtValue.ortvalue_from_numpy(array, self.device, 0)
        if self.device == "cpu":
            self._arrays[name] = array

    def _used(self, spec: TensorSpec, stored: int) -> tuple[slice, ...]:
        if spec.row_symbol is None:
            return (slice(None),)
        rows = row_count(spec.row_symbol, stored, self.geometry)
        return (slice(None),) * spec.row_axis + (slice(0, rows),)
