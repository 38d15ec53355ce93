"""TensorRT and TensorRT for RTX as backends: a plan, a context per profile, decode steps as CUDA graphs.

Everything of an engine runs in one stream, under the lock `runtime.device.GPU`, so that all contexts share one block of
memory for activations. A captured step has a context of its own, which nobody touches again, as TensorRT demands.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.cache import cache_folder
from plugins.contract import GROWTH, TensorSpec, capacity_for, state_sizes
from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact
from runtime.backend import Answer, Feeds, RunError
from runtime.device import ALIGNMENT, Block, Streams, device, side_by_side
from runtime.external import check_external_data
from runtime.replay import Kind, Numbers, Recorded, Replays

if TYPE_CHECKING:
    from runtime.state import State

# backend -> the names that its Python module goes by, and what it is called
MODULES = {
    "tensorrt": (("tensorrt",), "TensorRT"),
    "tensorrt-rtx": (("tensorrt_rtx", "tensorrt_rtx_bindings"), "TensorRT-RTX"),
}
ANY_GPU = "current"  # in "sm": built for the GPU of the machine that built it, of which only TensorRT knows more
AMPERE_PLUS = "8.0+"
DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
}  # fmt: skip
NAMESPACE = "kvpack"  # of the plugins
GRAPHS = 64  # captured steps that an engine keeps at once: each has a context
MESSAGES = 8  # of TensorRT's errors, how many are kept for the next sentence
log = logging.getLogger("kvpack")

Place = tuple[tuple[int, ...], int]  # shape and address
Range = tuple[tuple[int, ...], tuple[int, ...]]  # smallest and largest sizes, or values


@dataclass(frozen=True)
class Profile:
    """What one optimisation profile of a plan takes. shapes: by input. values: of inputs that the host reads."""

    index: int
    shapes: Mapping[str, Range]
    values: Mapping[str, Range]

    def holds(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int] | None = None) -> bool:
        return not self.outside(shapes, values or {})

    def outside(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int]) -> list[str]:
        """What of these is not in the ranges, for people."""
        wrong = []
        for ranges, given in ((self.shapes, shapes), (self.values, {n: (v,) for n, v in values.items()})):
            for name, sizes in given.items():
                low, high = ranges.get(name, (sizes, sizes))
                if not all(a <= x <= b for a, x, b in zip(low, sizes, high, strict=True)):
                    wrong.append(f"{name} {list(sizes)} is not between {list(low)} and {list(high)}")
        return wrong


class TensorRT:
    """A `runtime.backend.Backend`. graphs: the number of captured decode steps; None: none is captured."""

    provider = "cuda"

    def __init__(
        self, artefact: Artefact, module: Any, runtime: Any, plan: Any, memory: Streams, name: str, graphs: bool
    ) -> None:
        """runtime: of the module, with `_logger`'s logger; plan: its ICudaEngine. name: "TensorRT 11.4"."""
        self.artefact, self.module, self.runtime, self.plan = artefact, module, runtime, plan
        self.memory, self.logger, self.name = memory, runtime.logger, name
        self.graphs = Numbers(GRAPHS) if graphs else None
        self.why_none = ""  # why there are no graphs, where they were wanted
        # With function bodies a decode step looks at `live` rows, with plugins at those that there are.
        self.follow = artefact.config["target"].get("plugins") is None
        self.profiles = _profiles(plan)
        self.on_host = {name for name in _names(plan) if plan.get_tensor_location(name).name == "HOST"}
        tokens = next(spec.name for spec in artefact.inputs if spec.role == "tokens")
        self.fewest = min(profile.shapes[tokens][0][0] for profile in self.profiles)
        self.sequences = max(profile.shapes[tokens][1][0] for profile in self.profiles)
        self.stream = memory.stream()
        weakref.finalize(self, memory.close_stream, self.stream)
        self.activations = Room(memory)
        self.inputs = Room(memory, pinned=True)
        self.outputs = Room(memory)
        self._contexts: dict[int, Context] = {}
        self._told_parts = False
        config = plan.create_runtime_config()
        self.kernels_cache = KernelCache(config, artefact) if hasattr(config, "set_runtime_cache") else None

    def create_context(self, captured: bool) -> Any:
        """An IExecutionContext that computes in memory it is given; None when it cannot be had.

        captured: all its steps have the same shapes.
        """
        module, config = self.module, self.plan.create_runtime_config()
        config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.kernels_cache is not None:
            config.set_runtime_cache(self.kernels_cache.cache)
            if captured:  # a graph keeps the kernels that there were when it was captured
                strategy = module.DynamicShapesKernelSpecializationStrategy.EAGER
                config.dynamic_shapes_kernel_specialization_strategy = strategy
        return self.plan.create_execution_context(config)

    @property
    def kernels(self) -> str:
        graphs = ", CUDA graphs" if self.graphs is not None else self.why_none
        return f"{self.name}, {'function bodies' if self.follow else 'plugins'}{graphs}"

    @property
    def workspace(self) -> int:
        return sum(room.nbytes for room in (self.activations, self.inputs, self.outputs))

    def steps(self, state: State) -> PlanSteps:
        return PlanSteps(self, state)

    def context(self, profile: Profile) -> Context:
        """The context of a profile, for steps that are not captured."""
        if profile.index not in self._contexts:
            self._contexts[profile.index] = Context(self, profile)
        return self._contexts[profile.index]

    def profile(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int]) -> Profile:
        """The first that holds a step. Raises UserError."""
        for profile in self.profiles:
            if profile.holds(shapes, values):
                return profile
        raise self.no_profile(shapes, values)

    def no_profile(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int]) -> UserError:
        nearest = min((profile.outside(shapes, values) for profile in self.profiles), key=len)
        return UserError(
            f"no profile of {self.artefact.path} holds such a step ({'; '.join(nearest[:3])}): use fewer or shorter "
            f"sequences, or {REBUILD} for these."
        )

    def tell_parts(self, width: int) -> None:
        """Say once what it means that a prompt is split."""
        if not self._told_parts and self.artefact.geometry is not None:
            log.warning(
                "%s: prompts of more than %d tokens are read in parts, of which the later attend to the compressed "
                "cache of the earlier: build the plan with larger --prefill-tokens to read them exactly",
                self.artefact.path, width,
            )  # fmt: skip
        self._told_parts = True

    def give_up_graphs(self, reason: str) -> None:
        log.warning("decode steps run without CUDA graphs: %s", reason)
        self.graphs, self.why_none = None, f", no CUDA graphs: {reason}"

    def close(self) -> None:
        if self.kernels_cache is not None and self.plan is not None:
            self.kernels_cache.save()
        self._contexts.clear()
        for room in (self.activations, self.inputs, self.outputs):
            room.release()
        self.plan = None


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
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            if not data or (self.path.is_file() and self.path.read_bytes() == data):
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(self.path)
        except OSError as error:
            log.warning("the kernels of %s are not kept: %s", self.path, error)
            partial.unlink(missing_ok=True)


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


@dataclass
class Captured:
    """The binding of a `Recorded`: a context that nobody touches after the capture, and the graph made of it."""

    context: Context
    numbers: Block  # inputs that are the same in every replay
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    values: Mapping[str, int]  # of the inputs that the host reads
    scratch: Block  # for what observing layers choose, which nobody reads
    graph: int = 0
    activations: tuple[int, int] = (0, 0)  # of the capture
    free: Any = None  # the graph's finalizer


class PlanSteps:
    """A `runtime.backend.Steps`."""

    def __init__(self, backend: TensorRT, state: State) -> None:
        self.backend, self.state = backend, state
        artefact, there = backend.artefact, set(_names(backend.plan))
        # An input that nothing reads may have been left out of the plan.
        self._names = {s.role: s.name for s in artefact.inputs if s.role != "state" and s.name in there}
        self._logits = next(spec.name for spec in artefact.outputs if spec.role == "logits")
        self._binding = object()
        self._replays: Replays | None = None
        self._running = threading.Event()
        self._stop = threading.Event()
        if not backend.fewest <= state.batch <= backend.sequences:
            raise UserError(
                f"{artefact.path} takes {backend.fewest} to {backend.sequences} sequences at once, not {state.batch}: "
                f"use another number of them, or {REBUILD} for it."
            )

    def fitting(self, capacity: int) -> int:
        for tokens in (capacity, capacity_for(capacity, self.backend.artefact.max_length)):  # plans begin with a step
            if any(profile.holds(self._state_shapes(tokens)) for profile in self.backend.profiles):
                return tokens
        raise self.backend.no_profile(self._state_shapes(capacity), {})

    def most(self) -> tuple[int, int]:
        shapes = self._state_shapes(self.state.capacity)
        tokens, picks = self._names["tokens"], self._names.get("logit_index")
        fit = [profile for profile in self.backend.profiles if profile.holds(shapes)]
        largest = max(fit or self.backend.profiles, key=lambda profile: profile.shapes[tokens][1][1])
        width = largest.shapes[tokens][1][1]
        return width, largest.shapes[picks][1][1] if picks else width

    def moved(self) -> None:
        self._binding, self._replays = object(), None

    def close(self) -> None:
        self._replays = None

    def interrupt(self) -> None:
        """A step ends between two of its parts."""
        if self._running.is_set():
            self._stop.set()

    def run(self, parts: Sequence[Feeds], watch: bool) -> list[Answer]:
        for feeds in parts:  # all of them, before anything is written
            self._profile(feeds)
        if len(parts) > 1:
            self.backend.tell_parts(parts[0]["tokens"].shape[1])
        answers: list[Answer] = []
        self._stop.clear()
        self._running.set()
        try:
            for feeds in parts:
                if self._stop.is_set():
                    raise RunError("interrupted", begun=bool(answers), interrupted=True)
                answers.append(self._run(feeds, watch))
                self._swap()
        except (RunError, UserError, MemoryError, RuntimeError) as error:
            if not isinstance(error, RunError):  # of the driver, or TensorRT's own
                error = RunError(str(error) or type(error).__name__)
            error.begun |= bool(answers)
            raise error from None
        finally:
            self._running.clear()
        return answers

    def _swap(self) -> None:
        """What the step wrote is what the next one reads."""
        before = self.state.side
        self.state.swap()
        if self.state.side != before:
            self._binding = object()

    def _state_shapes(self, capacity: int) -> dict[str, tuple[int, ...]]:
        artefact = self.backend.artefact
        sizes = state_sizes(capacity, artefact.geometry, self.state.batch)
        return {spec.name: spec.dims(sizes) for spec in artefact.states}

    def _profile(self, feeds: Feeds) -> Profile:
        shapes = {name: feeds[role].shape for role, name in self._names.items()}
        shapes |= self._state_shapes(self.state.capacity)
        values = {name: int(feeds[r]) for r, name in self._names.items() if name in self.backend.on_host}
        return self.backend.profile(shapes, values)

    def _run(self, feeds: Feeds, watch: bool) -> Answer:
        recorded = None if watch else self._recorded(feeds)
        if recorded is None:
            return self._plain_run(feeds, watch)
        return self._replayed(recorded, feeds), {}

    def _plain_run(self, feeds: Feeds, watch: bool) -> Answer:
        """Logits, float32 [B, P, V], and the rows that observing layers chose when they are watched."""
        backend = self.backend
        context = backend.context(self._profile(feeds))
        context.bind(self.state, self._binding)
        offsets, end = side_by_side({role: (feeds[role].dtype, feeds[role].shape) for role in self._names})
        backend.inputs.reserve(end)
        host = backend.inputs.host[:end]
        for role, offset in offsets.items():
            _put(host, offset, feeds[role])
        backend.memory.upload(backend.inputs.address, host)
        inputs, values = {}, {}
        for role, name in self._names.items():
            base = host.ctypes.data if name in backend.on_host else backend.inputs.address
            inputs[name] = feeds[role].shape, base + offsets[role]
            if name in backend.on_host:
                values[name] = int(feeds[role])
        tensors = self._answers(feeds["logit_index"].shape, int(feeds.get("select_width", 0)))
        places, end = side_by_side(tensors)
        backend.outputs.reserve(end)
        outputs = {name: (tensors[name][1], backend.outputs.address + offset) for name, offset in places.items()}
        context.prepare(inputs, outputs, values)
        context.launch()
        backend.memory.wait(backend.stream)

        def fetched(name: str) -> np.ndarray:
            array = np.empty(outputs[name][0], tensors[name][0])
            backend.memory.download(outputs[name][1], array)
            return array

        watched = backend.artefact.selected if watch else {}
        return fetched(self._logits), {layer: fetched(name) for layer, name in watched.items()}

    def _answers(self, picks: tuple[int, ...], width: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of all outputs but the state: TensorRT writes those that nobody reads as well."""
        artefact = self.backend.artefact
        found = {self._logits: (np.dtype(np.float32), (*picks, artefact.vocab_size))}
        rows = (np.dtype(np.int32), (self.state.batch, width))
        return found | {name: rows for name in artefact.selected.values()}

    def _recorded(self, feeds: Feeds) -> Recorded | None:
        """The captured step, or the one to capture now, that does what these feeds ask; None: there is none."""
        backend, state = self.backend, self.state
        single = feeds["tokens"].shape[1] == 1 and feeds["logit_index"].shape[1] == 1
        if backend.graphs is None or not single:
            return None
        try:
            if self._replays is None:
                self._replays = Replays(
                    backend.artefact, state.batch, state.capacity, backend.memory, backend.graphs, backend.follow
                )
            return self._replays.step(self._replays.kind(feeds, state.side), self._record)
        except MemoryError:  # it goes without
            return None
        except (RunError, UserError) as error:
            backend.give_up_graphs(str(error))
            return None

    def _record(self, kind: Kind, number: int) -> Recorded:
        """A step of a kind, not captured yet, with everything where it stays."""
        backend, replays = self.backend, self._replays
        given = {role: value for role, value in replays.numbers_of(kind).items() if role in self._names}
        numbers = Block(backend.memory, ALIGNMENT * max(len(given), 1))
        inputs = {self._names[r]: (shape, at) for r, (at, shape) in replays.inputs_of(kind).items() if r in self._names}
        values = {}
        for place, (role, value) in enumerate(given.items()):
            name, offset = self._names[role], place * ALIGNMENT
            numbers.upload({offset: np.array(value, np.int32)})
            inputs[name] = (), (numbers.host.ctypes.data if name in backend.on_host else numbers.address) + offset
            if name in backend.on_host:
                values[name] = value
        shapes = {name: dims for name, (dims, _) in inputs.items()} | self._state_shapes(self.state.capacity)
        tensors = self._answers((self.state.batch, 1), kind.selected)
        del tensors[self._logits]
        places, end = side_by_side(tensors)
        scratch = Block(backend.memory, max(end, 1))
        outputs = {name: (tensors[name][1], scratch.address + offset) for name, offset in places.items()}
        outputs[self._logits] = replays.logits_shape, replays.logits.address
        context = Context(backend, backend.profile(shapes, values), captured=True)
        context.bind(self.state, self._binding)
        recorded = Recorded(number, Captured(context, numbers, inputs, outputs, values, scratch))
        weakref.finalize(recorded, backend.graphs.give_back)
        return recorded

    def _replayed(self, step: Recorded, feeds: Feeds) -> np.ndarray:
        """Logits, float32 [B, 1, V], of a captured step, or of one that was captured just now, if it could be."""
        backend, own = self.backend, step.binding
        self._replays.feed(feeds)
        room = backend.activations
        if step.captured and own.activations == (room.address, room.nbytes):
            backend.memory.launch(own.graph, backend.stream)
            backend.memory.wait(backend.stream)
            return self._replays.answer()
        own.context.prepare(own.inputs, own.outputs, own.values)
        own.context.launch()  # what TensorRT puts off until the first run must not be captured
        backend.memory.wait(backend.stream)
        answer = self._replays.answer()
        try:
            self._capture(step, own)
        except Exception as error:  # of the driver or of TensorRT; the step has run all the same
            backend.logger.told()
            backend.give_up_graphs(str(error).strip().splitlines()[0])
        return answer

    def _capture(self, step: Recorded, own: Captured) -> None:
        backend = self.backend
        capturable = getattr(own.context.context, "is_stream_capturable", None)
        if capturable is not None and not capturable(backend.stream):
            raise RuntimeError("this plan cannot be captured")
        if own.free is not None:
            own.free()
        own.graph = backend.memory.capture(backend.stream, own.context.launch)
        own.free = weakref.finalize(own, backend.memory.free_graph, own.graph)
        own.activations, step.captured = own.context.activations, True


def open_plan(artefact: Artefact, library: str | Path | bool | None, cuda_graphs: bool) -> TensorRT:
    """Load the artefact's plan; library and cuda_graphs as for `Engine.open`. Raises UserError."""
    target = artefact.config["target"]
    backend = target["backend"]
    path, plugins = artefact.path / _file(artefact, target.get("plan")), _plugins(artefact, library)
    module, title = _module(backend)
    memory = device()
    capability = memory.capability()
    wanted = [AMPERE_PLUS] if target.get("hardware_compatible") else target.get("sm", [ANY_GPU])
    if not _runs_on(wanted, capability):
        raise UserError(
            f"{artefact.path} was built for GPUs of SM {', '.join(wanted)} and this one is of SM {capability}: "
            f"{REBUILD} for it."
        )
    logger = _logger(module)
    runtime = module.Runtime(logger)
    if plugins is not None and not _register(runtime.get_plugin_registry(), plugins):
        raise UserError(f"{title} cannot load the plugins of {plugins} ({logger.told()}): {REBUILD}.")
    logger.told()  # of a registry that has them already
    if target.get("version_compatible"):
        runtime.engine_host_code_allowed = True  # such a plan brings its runtime with it, and its hash was checked
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        plan = runtime.deserialize_cuda_engine(data)
    if plan is None:
        versions = sorted(target.get("versions", {}).items())
        built = ", ".join(f"{name} {number}" for name, number in versions if name.startswith("tensorrt"))
        raise UserError(
            f"{path} cannot be loaded ({logger.told() or f'{title} does not say why'}); it was built with {built} for "
            f"SM {', '.join(wanted)}, and here are {title} {module.__version__} and SM {capability}: install that "
            f"version, or {REBUILD}."
        )
    if target.get("weights") is not None:
        _refit(module, plan, logger, artefact, target["weights"])
    _check_contract(artefact, path, plan)
    version = ".".join(module.__version__.split(".")[:2])
    return TensorRT(artefact, module, runtime, plan, memory, f"{title} {version}", cuda_graphs)


def _refit(module: Any, plan: Any, logger: Any, artefact: Artefact, name: str) -> None:
    """Give a plan that was built without weights those of the engine's graph. Raises UserError."""
    path = artefact.path / _file(artefact, name)
    check_external_data(path, {name: entry["bytes"] for name, entry in artefact.config["files"].items()}, REBUILD)
    refitter = module.Refitter(plan, logger)
    parser = module.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(path)) or not refitter.refit_cuda_engine():
        raise UserError(
            f"the plan of {artefact.path} does not take the weights of {path} ({logger.told()}): {REBUILD}."
        )


def _logger(module: Any) -> Any:
    """An ILogger of the module with a method `told`, which returns the errors reported since its last call."""
    levels = {"INFO": logging.DEBUG, "VERBOSE": logging.DEBUG, "WARNING": logging.INFO}

    class Logger(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: deque[str] = deque(maxlen=MESSAGES)

        def log(self, severity: Any, msg: str) -> None:
            if severity.name in levels:
                log.log(levels[severity.name], "%s", msg)
            else:
                self.messages.append(" ".join(msg.split()))

        def told(self) -> str:
            told = "; ".join(dict.fromkeys(self.messages))
            self.messages.clear()
            return told

    return Logger()


def _module(backend: str) -> tuple[Any, str]:
    """The Python module of a backend, and what it is called. Raises UserError."""
    names, title = MODULES[backend]
    for name in names:
        try:
            return import_module(name), title
        except ModuleNotFoundError as error:
            if error.name != name:
                raise UserError(f"{title} needs the package {error.name}: pip install 'kvpack[{backend}]'.") from None
        except (ImportError, OSError) as error:
            raise UserError(f"{title} is installed but does not load ({error}): install its libraries.") from None
    raise UserError(f"{title} is not installed: pip install 'kvpack[{backend}]'.")


def _plugins(artefact: Artefact, library: str | Path | bool | None) -> Path | None:
    """The file of plugins that the plan needs: its own, or the one that was asked for. Raises UserError."""
    own = artefact.config["target"].get("plugins")
    if own is None:
        if library:
            raise UserError(f"{artefact.path} is a plan without plugins, so --library {library} has no use: drop it.")
        return None
    if library is False:
        raise UserError(f"{artefact.path} is a plan of plugins, which cannot run without: drop --library none.")
    if library not in (None, True):
        if not Path(library).is_file():
            raise UserError(f"there is no library {library}: build one with `python -m plugins build`.")
        return Path(library).absolute()
    return (artefact.path / _file(artefact, own)).absolute()


def _register(registry: Any, library: Path) -> bool:
    """Whether the registry has kvpack's plugins: those of the library, or, as it refuses a second time, others'."""
    if registry.load_library(str(library)) is not None:
        return True
    return any(creator.plugin_namespace == NAMESPACE for creator in registry.all_creators_recursive)


def _file(artefact: Artefact, name: Any) -> str:
    """A file of the target that config.json lists, so that its hash was checked. Raises UserError."""
    if name not in artefact.config["files"]:
        raise UserError(
            f"{artefact.path / 'config.json'} has the target file {name!r} and does not list it: {REBUILD}."
        )
    return name


def _runs_on(wanted: Sequence[str], capability: str) -> bool:
    """Whether a plan for these SMs runs on a GPU: "8.9" on such a GPU, "8.0+" on newer ones as well."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    return any(
        sm in (ANY_GPU, capability) or (sm.endswith("+") and number(sm[:-1]) <= number(capability)) for sm in wanted
    )


def _names(plan: Any) -> list[str]:
    return [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]


def _profiles(plan: Any) -> list[Profile]:
    inputs = [name for name in _names(plan) if plan.get_tensor_mode(name).name == "INPUT"]
    found = []
    for index in range(plan.num_optimization_profiles):
        shapes, values = {}, {}
        for name in inputs:
            shape = tuple(plan.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                low, _, high = plan.get_tensor_profile_shape(name, index)
                shapes[name] = tuple(low), tuple(high)
            else:
                shapes[name] = shape, shape
            if plan.get_tensor_location(name).name == "HOST":
                bounds = plan.get_tensor_profile_values(index, name)
                if bounds:  # there are none where they were not set
                    values[name] = tuple(bounds[0]), tuple(bounds[2])
        found.append(Profile(index, shapes, values))
    return found


def _check_contract(artefact: Artefact, path: Path, plan: Any) -> None:
    """Names, dtypes and fixed sizes of the plan's tensors against config.json. Raises UserError."""
    there = set(_names(plan))
    for specs, mode in ((artefact.inputs, "INPUT"), (artefact.outputs, "OUTPUT")):
        for spec in specs:
            if spec.name not in there:
                if mode == "INPUT" and spec.role != "state":
                    continue  # nothing reads it
                raise UserError(f"{path} and config.json disagree about the tensor {spec.name!r}: {REBUILD}.")
            there.remove(spec.name)
            dtype, shape = plan.get_tensor_dtype(spec.name).name, tuple(plan.get_tensor_shape(spec.name))
            if plan.get_tensor_mode(spec.name).name != mode or not _agree(spec, dtype, shape):
                raise UserError(
                    f"{path} has {spec.name!r} as {DTYPES.get(dtype, dtype)} {list(shape)} and config.json as "
                    f"{spec.dtype} {list(spec.shape)}: {REBUILD}."
                )
    if there:
        raise UserError(f"{path} and config.json disagree about the tensor {min(there)!r}: {REBUILD}.")


def _agree(spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> bool:
    if DTYPES.get(dtype) != spec.dtype or len(shape) != len(spec.shape):
        return False
    return all(dim in (size, "vocab") for dim, size in zip(spec.shape, shape, strict=True) if size >= 0)


def _put(host: np.ndarray, offset: int, array: np.ndarray) -> None:
    host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
