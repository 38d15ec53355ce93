"""One state tensor in memory: on the host, where numpy owns it, or on a device. All begin as zeros.

A tensor's rows are those along its `TensorSpec.row_axis`; `rows` counts them from the first, None means all of a tensor
that has no such axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from plugins.contract import ONNX_TYPES, TensorSpec
from runtime.device import Memory


class HostTensor:
    """In numpy's memory, where untouched rows take none."""

    def __init__(self, spec: TensorSpec, dims: tuple[int, ...]) -> None:
        """Raises MemoryError."""
        self.spec = spec
        self.live = np.zeros(dims, spec.carrier)

    def array(self) -> np.ndarray:
        """The memory itself."""
        return self.live

    def bind(self, binding: Any) -> None:
        """Make it the graph's input and output."""
        from onnxruntime import OrtValue

        if self.live.dtype.name == self.spec.dtype:
            value = OrtValue.ortvalue_from_numpy(self.live)
        else:
            value = OrtValue.ortvalue_from_numpy_with_onnx_type(self.live, ONNX_TYPES[self.spec.dtype])
        binding.bind_ortvalue_input(self.spec.name, value)
        binding.bind_ortvalue_output(self.spec.alias, value)

    def take(self, other: HostTensor, rows: int | None) -> None:
        """Copy the first rows of a tensor that may have more or fewer."""
        self.load(other.live[_first(self.spec, rows)], rows)

    def trimmed(self, rows: int | None) -> np.ndarray:
        """A copy of the first rows."""
        return self.live[_first(self.spec, rows)].copy()

    def load(self, array: np.ndarray, rows: int | None) -> None:
        """Write the first rows."""
        self.live[_first(self.spec, rows)] = array

    def repeat(self, values: np.ndarray) -> None:
        """Fill the tensor with `values` over and over."""
        flat = self.live.reshape(-1)
        for start in range(0, flat.size, values.size):  # in place: a copy would double what a bench measures
            flat[start : start + values.size] = values[: flat.size - start]


class DeviceTensor:
    """In a `Memory`; freed with this object."""

    def __init__(self, spec: TensorSpec, dims: tuple[int, ...], memory: Memory) -> None:
        """Raises MemoryError."""
        self.spec, self.dims, self.memory = spec, dims, memory
        self.nbytes = prod(dims) * spec.carrier.itemsize
        self.address = memory.allocate(self.nbytes)
        weakref.finalize(self, memory.free, self.address)
        memory.zero(self.address, self.nbytes)

    def array(self) -> np.ndarray:
        """A copy on the host."""
        array = np.empty(self.dims, self.spec.carrier)
        self.memory.download(self.address, array)
        return array

    def bind(self, binding: Any) -> None:
        place = (self.memory.provider, 0, ONNX_TYPES[self.spec.dtype], self.dims, self.address)
        binding.bind_input(self.spec.name, *place)
        binding.bind_output(self.spec.alias, *place)

    def take(self, other: DeviceTensor, rows: int | None) -> None:
        for (mine, nbytes), (theirs, _) in zip(self._slabs(rows), other._slabs(rows), strict=True):
            self.memory.copy(mine, theirs, nbytes)
        self.memory.finish()

    def trimmed(self, rows: int | None) -> np.ndarray:
        array = np.empty(self._trimmed_dims(rows), self.spec.carrier)
        for part, (address, _) in zip(self._parts(array), self._slabs(rows), strict=True):
            self.memory.download(address, part)
        return array

    def load(self, array: np.ndarray, rows: int | None) -> None:
        array = np.ascontiguousarray(np.broadcast_to(array, self._trimmed_dims(rows)))
        for part, (address, _) in zip(self._parts(array), self._slabs(rows), strict=True):
            self.memory.upload(address, part)

    def repeat(self, values: np.ndarray) -> None:
        values = values[: self.nbytes // values.itemsize]
        self.memory.upload(self.address, values)
        done = values.nbytes
        while done < self.nbytes:  # what is there already is copied behind itself
            count = min(done, self.nbytes - done)
            self.memory.copy(self.address + done, self.address, count)
            self.memory.finish()
            done += count

    def _trimmed_dims(self, rows: int | None) -> tuple[int, ...]:
        axis = self.spec.row_axis
        return self.dims if rows is None else (*self.dims[:axis], rows, *self.dims[axis + 1 :])

    def _slabs(self, rows: int | None) -> Iterator[tuple[int, int]]:
        """Address and bytes of the first rows of everything before the row axis."""
        if rows is None:
            yield self.address, self.nbytes
            return
        axis = self.spec.row_axis
        row = prod(self.dims[axis + 1 :]) * self.spec.carrier.itemsize
        for number in range(prod(self.dims[:axis])):
            yield self.address + number * self.dims[axis] * row, rows * row

    def _parts(self, array: np.ndarray) -> np.ndarray:
        """`array`, trimmed, by slabs."""
        axis = self.spec.row_axis
        return array.reshape(1 if axis is None else prod(self.dims[:axis]), -1)


def _first(spec: TensorSpec, rows: int | None) -> tuple[slice, ...]:
    return (slice(None),) if rows is None else (*(slice(None),) * spec.row_axis, slice(0, rows))
