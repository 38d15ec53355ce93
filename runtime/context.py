"""Execution contexts of a TensorRT plan, and the memory and the kernels that they share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.cache import cache_folder
from plugins.contract import GROWTH
from plugins.files import write_whole
from runtime.artefact import Artefact
from runtime.backend import RunError
from runtime.device import Streams
from runtime.plan import Profile

if TYPE_CHECKING:
    from runtime.state import State
    from runtime.tensorrt import TensorRT

log = logging.getLogger("kvpack")

Place = tuple[tuple[int, ...], int]  # shape and address


class Context:
    """An execution context of one profile, set step by step. captured: it is for a step that will be replayed."""

    def __init__(self, backend: TensorRT, profile: Profile, captured: bool = False) -> None:
        self.backend = backend
        self.context = backend.create_context(captured)
        if self.context is None or not self.context.set_optimization_profile_async(profile.index, backend.stream):
            raise RunError(f"no context of profile {profile.index} ({backend.logger.told()})", begun=False)
        backend.memory.wait(backend.stream)
        self.bound: object = None  # the binding of the state that is set
        self.set_: Any = None  # shapes, values and addresses that are set
        self.activations = (0, 0)  # address and bytes

    def bind(self, state: State, binding: object) -> None:
        """The state's addresses. binding: the same object means that they have not changed since."""
        if self.bound is binding:
            return
        self.bound = self.set_ = None
        for spec, dims, source, target in state.places():
            self.shape(spec.name, dims)
            self.address(spec.name, source)
            self.address(spec.alias, target)
        self.bound = binding

    def prepare(self, inputs: Mapping[str, Place], outputs: Mapping[str, Place], values: Mapping[str, int]) -> None:
        """Everything but the state, then memory for activations. Raises RunError.

        values: of the inputs that the host reads, which are at their addresses already.
        """
        context, plan = self.context, self.backend.plan
        wanted = (inputs, outputs, values)
        if self.set_ != wanted:
            self.set_ = None
            for name, (dims, address) in inputs.items():
                self.shape(name, dims)
                self.address(name, address)
            for name, (_, address) in outputs.items():
                self.address(name, address)
            try:
                missing = context.infer_shapes()
            except RuntimeError as error:
                raise RunError(self.backend.logger.told() or str(error), begun=False) from error
            if missing:
                raise RunError(f"the plan has inputs that were not set: {', '.join(missing)}", begun=False)
            for name, (dims, _) in outputs.items():  # more would be written beyond the end
                if tuple(context.get_tensor_shape(name)) != dims:
                    found = list(context.get_tensor_shape(name))
                    raise RunError(f"{name} would be {found}, not {list(dims)}", begun=False)
            self.needed = int(context.update_device_memory_size_for_shapes()) if plan.device_memory_size_v2 else 0
            self.activations = (0, 0)
            self.set_ = wanted
        room = self.backend.activations
        room.reserve(self.needed)
        if self.activations != (room.address, room.nbytes):
            self.activations = room.address, room.nbytes
            context.set_device_memory(*self.activations)

    def launch(self) -> None:
        """Into the stream. Raises RunError."""
        if not self.context.execute_async_v3(self.backend.stream):
            raise RunError(self.backend.logger.told() or "execute_async_v3 failed and does not say why")

    def shape(self, name: str, dims: tuple[int, ...]) -> None:
        if not self.context.set_input_shape(name, dims):
            raise RunError(f"{name} cannot be {list(dims)} ({self.backend.logger.told()})", begun=False)

    def address(self, name: str, address: int) -> None:
        if not self.context.set_tensor_address(name, address):
            raise RunError(f"{name} cannot be at {address:#x} ({self.backend.logger.told()})", begun=False)


class Room:
    """Device memory that grows with what is asked of it, and host memory beside it if `pinned`."""

    def __init__(self, memory: Streams, pinned: bool = False) -> None:
        self.memory, self.pinned = memory, pinned
        self.address = self.nbytes = 0
        self.host = np.empty(0, np.uint8)
        self._free: Any = None

    def reserve(self, nbytes: int) -> int:
        """The address of at least so many bytes; what was there before is lost when they move. Raises RunError."""
        if nbytes > self.nbytes:
            wanted = max(nbytes, int(self.nbytes * GROWTH))
            self.release()
            try:
                self.address = self.memory.allocate(wanted)
                self._free = weakref.finalize(self, self.memory.free, self.address)
                self.nbytes = wanted
                if self.pinned:
                    self.host = self.memory.staging(wanted)
            except MemoryError:
                self.release()
                raise RunError(f"out of memory: no {wanted:,} bytes to work in", begun=False) from None
        return self.address

    def release(self) -> None:
        if self._free is not None:
            self._free()
        self.address, self.nbytes, self._free, self.host = 0, 0, None, np.empty(0, np.uint8)


class KernelCache:
    """Kernels that TensorRT-RTX compiled for this GPU: an IRuntimeCache for all contexts, kept for later processes."""

    def __init__(self, config: Any, artefact: Artefact) -> None:
        self.cache = config.create_runtime_cache()
        self.path = cache_folder() / "tensorrt-rtx" / f"{artefact.config['digest'][:24]}.cache"
        with suppress(OSError):  # TensorRT-RTX refuses what is of another GPU, driver or version
            self.cache.deserialize(self.path.read_bytes())

    def save(self) -> None:
        """Write it, if there is anything new in it. Where that fails the next process compiles again."""
        memory = self.cache.serialize()
        data = b"" if memory is None else bytes(memory)
        try:
            if not data or (self.path.is_file() and self.path.read_bytes() == data):
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, data)
        except OSError as error:
            log.warning("the kernels of %s are not kept: %s", self.path, error)
