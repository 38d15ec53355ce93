"""TensorRT and TensorRT for RTX as backends: a plan, a context per profile, decode steps as CUDA graphs.

Everything of an engine runs in one stream, under the lock `runtime.device.GPU`, so that all contexts share one block of
memory for activations. A captured step has a context of its own, which nobody touches again, as TensorRT demands.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.contract import capacity_for, state_sizes
from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact
from runtime.backend import Answer, Feeds, RunError, reason_of
from runtime.context import Context, KernelCache, Place, Room
from runtime.device import ALIGNMENT, Block, put, side_by_side
from runtime.plan import Loaded, Profile, load, names_of, profiles_of
from runtime.replay import Capturing, Kind, Numbers, Recorded

if TYPE_CHECKING:
    from runtime.state import State

GRAPHS = 16  # captured steps that an engine keeps at once: each has a context, with tables of its own in the plugins
log = logging.getLogger("kvpack")


class TensorRT:
    """A `runtime.backend.Backend`. graphs: the number of captured decode steps; None: none is captured."""

    provider = "cuda"

    def __init__(self, artefact: Artefact, loaded: Loaded, graphs: bool) -> None:
        self.artefact = artefact
        self.module, self.runtime, self.plan, self.memory, self.name = loaded
        self.logger, plan, memory = self.runtime.logger, self.plan, self.memory
        self.graphs = Numbers(GRAPHS) if graphs else None
        self.why_none = ""  # why there are no graphs, where they were wanted
        # With function bodies a decode step looks at `live` rows, with plugins at those that there are.
        self.follow = artefact.config["target"].get("plugins") is None
        self.profiles = profiles_of(plan)
        self.on_host = {name for name in names_of(plan) if plan.get_tensor_location(name).name == "HOST"}
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


class PlanSteps(Capturing):
    """A `runtime.backend.Steps`."""

    def __init__(self, backend: TensorRT, state: State) -> None:
        self.backend, self.state = backend, state
        artefact, there = backend.artefact, set(names_of(backend.plan))
        # An input that nothing reads may have been left out of the plan.
        self._names = {s.role: s.name for s in artefact.inputs if s.role != "state" and s.name in there}
        self._logits = next(spec.name for spec in artefact.outputs if spec.role == "logits")
        self._binding = object()
        self._held: tuple[int, list[Profile]] = (-1, [])  # a capacity, and the profiles that hold such a state
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
        tokens, picks = self._names["tokens"], self._names.get("logit_index")
        largest = max(self._holding() or self.backend.profiles, key=lambda profile: profile.shapes[tokens][1][1])
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
        profiles = [self._profile(feeds) for feeds in parts]  # all of them, before anything is written
        if len(parts) > 1:
            self.backend.tell_parts(parts[0]["tokens"].shape[1])
        answers: list[Answer] = []
        self._stop.clear()
        self._running.set()
        try:
            for feeds, profile in zip(parts, profiles, strict=True):
                if self._stop.is_set():
                    raise RunError("interrupted", begun=bool(answers), interrupted=True)
                answers.append(self._run(feeds, profile, watch))
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

    def _holding(self) -> list[Profile]:
        """The profiles that hold the state as it is."""
        capacity = self.state.capacity
        if self._held[0] != capacity:
            shapes = self._state_shapes(capacity)
            self._held = capacity, [profile for profile in self.backend.profiles if profile.holds(shapes)]
        return self._held[1]

    def _profile(self, feeds: Feeds) -> Profile:
        """The one for a step. Raises UserError."""
        shapes = {name: feeds[role].shape for role, name in self._names.items()}
        values = {name: int(feeds[r]) for r, name in self._names.items() if name in self.backend.on_host}
        return self._first(shapes, values)

    def _first(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int]) -> Profile:
        """The first profile that holds the state and such other inputs. Raises UserError."""
        for profile in self._holding():
            if profile.holds(shapes, values):
                return profile
        raise self.backend.no_profile({**shapes, **self._state_shapes(self.state.capacity)}, values)

    def _run(self, feeds: Feeds, profile: Profile, watch: bool) -> Answer:
        try:
            recorded = None if watch else self._recorded(feeds, self._record)
        except (RunError, UserError) as error:
            self.backend.give_up_graphs(str(error))
            recorded = None
        logits = None if recorded is None else self._replayed(recorded, feeds)
        return self._plain_run(feeds, profile, watch) if logits is None else (logits, {})

    def _plain_run(self, feeds: Feeds, profile: Profile, watch: bool) -> Answer:
        """Logits, float32 [B, P, V], and the rows that observing layers chose when they are watched."""
        backend = self.backend
        context = backend.context(profile)
        context.bind(self.state, self._binding)
        offsets, end = side_by_side({role: (feeds[role].dtype, feeds[role].shape) for role in self._names})
        backend.inputs.reserve(end)
        host = backend.inputs.host[:end]
        for role, offset in offsets.items():
            put(host, offset, feeds[role])
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
        shapes = {name: dims for name, (dims, _) in inputs.items()}
        tensors = self._answers((self.state.batch, 1), kind.selected)
        del tensors[self._logits]
        places, end = side_by_side(tensors)
        scratch = Block(backend.memory, max(end, 1))
        outputs = {name: (tensors[name][1], scratch.address + offset) for name, offset in places.items()}
        outputs[self._logits] = replays.logits_shape, replays.logits.address
        context = Context(backend, self._first(shapes, values), captured=True)
        context.bind(self.state, self._binding)
        recorded = Recorded(number, Captured(context, numbers, inputs, outputs, values, scratch))
        weakref.finalize(recorded, backend.graphs.give_back)
        return recorded

    def _replayed(self, step: Recorded, feeds: Feeds) -> np.ndarray | None:
        """Logits, float32 [B, 1, V], of a captured step, or of one that is captured now; None: that was not possible.

        What cannot be captured ends all capturing.
        """
        backend, own = self.backend, step.binding
        self._replays.feed(feeds)
        room = backend.activations
        if step.captured and own.activations == (room.address, room.nbytes):
            backend.memory.launch(own.graph, backend.stream)
            backend.memory.wait(backend.stream)
            return self._replays.answer()
        answer = None
        try:
            own.context.prepare(own.inputs, own.outputs, own.values)
            own.context.launch()  # what TensorRT puts off until the first run must not be captured
            backend.memory.wait(backend.stream)
            answer = self._replays.answer()
            self._capture(step, own)
        except Exception as error:  # of the driver or of TensorRT, which may want memory for one more context
            backend.logger.told()
            backend.give_up_graphs(reason_of(error))
        return answer  # without one the step runs anew: it writes no row that it reads

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
    return TensorRT(artefact, load(artefact, library), cuda_graphs)
