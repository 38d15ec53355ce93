"""Memory and streams of an NVIDIA GPU, through the driver's library, which every machine with such a GPU has.

ONNX Runtime's own arena for values made in Python doubles as it grows and never gives anything back, copies only whole
tensors, and knows no bfloat16: a cache of many gigabytes needs memory of its own.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping
from math import prod
from typing import Protocol

import numpy as np

from plugins.errors import UserError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
PORTABLE = 1  # pinned memory that is pinned for every context
NON_BLOCKING = 1  # a stream that does not wait for the default one
THREAD_LOCAL = 1  # a capture that what other threads do cannot spoil
MAJOR, MINOR = 75, 76  # attributes of a device: its compute capability
ALIGNMENT = 256
# A capture fails when anything else in the process allocates or copies on the device meanwhile.
GPU = threading.RLock()


class Memory(Protocol):
    """Memory that holds tensors for ONNX Runtime's `provider`; addresses are plain numbers."""

    provider: str  # as IOBinding names it

    def allocate(self, nbytes: int) -> int:
        """Raises MemoryError."""

    def free(self, address: int) -> None: ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to `address`; it may change as soon as this returns."""

    def download(self, address: int, array: np.ndarray) -> None:
        """Fill a contiguous array from `address`."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the memory. Not finished until `finish`."""

    def finish(self) -> None:
        """Wait for copies."""

    def staging(self, nbytes: int) -> np.ndarray:
        """Host memory, uint8 [nbytes], that is quick to copy from and to."""

    def free_bytes(self) -> int: ...


class Streams(Memory, Protocol):
    """A device whose work runs in streams and can be captured. Streams and graphs are plain numbers."""

    def capability(self) -> str:
        """ "8.9": the compute capability."""

    def stream(self) -> int:
        """A new stream that does not wait for others."""

    def close_stream(self, stream: int) -> None: ...

    def wait(self, stream: int) -> None:
        """Until everything in the stream has run."""

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        """What `work` launches in the stream, as a graph; none of it runs. Raises whatever goes wrong."""

    def launch(self, graph: int, stream: int) -> None: ...

    def free_graph(self, graph: int) -> None: ...


def side_by_side(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """Where each of the tensors begins, and the bytes of all, when each is aligned as TensorRT asks for."""
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        offsets[name] = end
        end += -(-max(prod(shape) * dtype.itemsize, 1) // ALIGNMENT) * ALIGNMENT  # an empty one has a place, too
    return offsets, end


def put(host: np.ndarray, offset: int, array: np.ndarray) -> None:
    """Write the array's bytes to host memory, uint8, from `offset` on."""
    host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Block:
    """Device memory, zeros at first, and pinned host memory of the same size through which it is written and read."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        """Raises MemoryError."""
        self.memory, self.nbytes = memory, nbytes
        self.host = memory.staging(nbytes)  # uint8 [nbytes]
        self.address = memory.allocate(nbytes)
        weakref.finalize(self, memory.free, self.address)
        memory.zero(self.address, nbytes)

    def upload(self, arrays: Mapping[int, np.ndarray]) -> None:
        """Write arrays at these offsets."""
        for offset, array in arrays.items():
            put(self.host, offset, array)
        self.memory.upload(self.address, self.host)

    def download(self) -> np.ndarray:
        """All of it, uint8 [nbytes]: the host memory itself, valid until the next call."""
        self.memory.download(self.address, self.host)
        return self.host


class Driver:
    """The driver's library and its first CUDA device, of which nothing is used yet."""

    def __init__(self) -> None:
        """Raises UserError when there is no driver or no device."""
        try:
            self._driver = ctypes.CDLL(LIBRARY)
        except OSError:
            raise UserError(f"there is no {LIBRARY}: install NVIDIA's driver, or use --provider cpu.") from None
        self._device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))

    def capability(self) -> str:
        """ "8.9": the compute capability."""
        parts = []
        for attribute in (MAJOR, MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._device)
            parts.append(str(value.value))
        return ".".join(parts)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise MemoryError("the GPU is out of memory")
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {status}"
            raise UserError(f"the GPU cannot be used ({name}: {reason}): check nvidia-smi, or use --provider cpu.")


class Device(Driver):
    """The first CUDA device. Allocations live in its primary context, which ONNX Runtime and TensorRT use too."""

    provider = "cuda"

    def __init__(self) -> None:
        """Raises UserError when there is no driver or no device."""
        super().__init__()
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)  # goes with the process

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._here("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def free(self, address: int) -> None:
        self._here("cuMemFree_v2", ctypes.c_uint64(address))

    def zero(self, address: int, nbytes: int) -> None:
        if nbytes:
            self._here("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
            self.finish()  # ONNX Runtime's streams do not wait for the default one

    def upload(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            data = ctypes.c_void_p(_contiguous(array).ctypes.data)
            self._here("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(array.nbytes))
            self.finish()  # a copy from pageable memory may still be on its way

    def download(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            data = ctypes.c_void_p(_contiguous(array).ctypes.data)
            self._here("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            places = ctypes.c_uint64(target), ctypes.c_uint64(source)
            self._here("cuMemcpyDtoD_v2", *places, ctypes.c_size_t(nbytes))

    def finish(self) -> None:
        self._here("cuStreamSynchronize", ctypes.c_void_p(0))  # everything here is on the default stream

    def staging(self, nbytes: int) -> np.ndarray:
        address = ctypes.c_void_p()
        self._here("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)), ctypes.c_uint(PORTABLE))
        memory = (ctypes.c_ubyte * nbytes).from_address(address.value)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(memory, self._driver.cuMemFreeHost, address)  # `array` and its views keep `memory`
        return array

    def free_bytes(self) -> int:
        return self._bytes()[0]

    def total_bytes(self) -> int:
        return self._bytes()[1]

    def _bytes(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._here("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self._here("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        return stream.value

    def close_stream(self, stream: int) -> None:
        self._here("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        self._here("cuStreamSynchronize", ctypes.c_void_p(stream))

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
        self._here("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(THREAD_LOCAL))
        try:
            work()
        except BaseException:
            self._driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))  # fails, or is of no use
            if graph:
                self._call("cuGraphDestroy", graph)
            raise
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(launchable), graph, ctypes.c_ulonglong(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return launchable.value

    def launch(self, graph: int, stream: int) -> None:
        self._here("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def free_graph(self, graph: int) -> None:
        self._here("cuGraphExecDestroy", ctypes.c_void_p(graph))

    def _here(self, name: str, *arguments: object) -> None:
        self._call("cuCtxSetCurrent", self._context)  # of the calling thread
        self._call(name, *arguments)


_devices: list[Device] = []
_opening = threading.Lock()


def device() -> Device:
    """The one Device of this process. Raises UserError."""
    with _opening:
        if not _devices:
            _devices.append(Device())
        return _devices[0]


def _contiguous(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous arrays can be copied")
    return array
