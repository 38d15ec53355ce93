"""ONNX Runtime as a backend: an InferenceSession per engine, an IOBinding per session, decode steps as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.contract import HOST_INPUTS, ONNX_TYPES
from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact
from runtime.backend import Answer, Feeds, RunError, reason_of
from runtime.external import check_external_data
from runtime.replay import Capturing, Kind, Numbers, Recorded

if TYPE_CHECKING:
    from runtime.device import Memory
    from runtime.state import State

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# By default CUDA's arena doubles, and its float32 products have ten bits.
OPTIONS = {"cpu": {}, "cuda": {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}}
MODEL_FILE = "model.onnx"
ORT_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16", "tensor(int8)": "int8",
    "tensor(int16)": "int16", "tensor(int32)": "int32", "tensor(int64)": "int64",
}  # fmt: skip
BODIES = "function bodies"  # how an engine without native kernels computes: in ONNX Runtime's own operators
OPTION = "gpu_graph_id"
NOT_CAPTURED = -1  # the number of runs that are no part of a graph
log = logging.getLogger("kvpack")


class OnnxRuntime:
    """A `runtime.backend.Backend`.

    inference: onnxruntime.InferenceSession; runs concurrently. kernels: "native kernels, CUDA graphs", or "function
    bodies: " and why. graphs: the numbers of captured decode steps; None: none is captured. loads: how often the model
    was loaded anew: what was bound before is bound to nothing. reload: makes an InferenceSession that captures nothing.
    """

    name = "ONNX Runtime"
    sequences = None
    workspace = 0  # its arena is its own secret
    follow = False  # see `runtime.replay.Replays`

    def __init__(
        self,
        artefact: Artefact,
        inference: Any,
        provider: str = "cpu",
        *,
        kernels: str = BODIES,
        memory: Memory | None = None,
        graphs: Numbers | None = None,
        reload: Callable[[], object] | None = None,
    ) -> None:
        self.artefact = artefact
        self.inference = inference
        self.provider = provider
        self.kernels = kernels
        self.memory = memory
        self.graphs = graphs
        self.loads = 0
        self._reload = reload

    def steps(self, state: State) -> OnnxSteps:
        return OnnxSteps(self, state)

    def give_up_graphs(self, reason: str) -> None:
        """From now on capture nothing: load the model anew, for its stream may be left in the middle of a capture."""
        log.warning("decode steps run without CUDA graphs: %s", reason)
        self.kernels = f"native kernels, no CUDA graphs: {reason}"
        self.graphs = None
        self.inference = self._reload()
        self.loads += 1

    def close(self) -> None:
        self.inference = None


class OnnxSteps(Capturing):
    """A `runtime.backend.Steps`: an IOBinding of the state, and captured steps beside."""

    def __init__(self, backend: OnnxRuntime, state: State) -> None:
        self.backend, self.state = backend, state
        self._names = {spec.role: spec.name for spec in backend.artefact.inputs if spec.role != "state"}
        self._logits = next(spec.name for spec in backend.artefact.outputs if spec.role == "logits")
        self._binding: Any = None
        self._loads = 0  # backend.loads when the state was bound
        self._options: Any = None  # RunOptions of the step in progress

    def fitting(self, capacity: int) -> int:
        return capacity

    def most(self) -> None:
        return None

    def moved(self) -> None:
        self._binding, self._replays, self._loads = self._bound_state(), None, self.backend.loads

    def close(self) -> None:
        self._binding = self._replays = None

    def interrupt(self) -> None:
        """The step ends at the graph's next node."""
        options = self._options
        if options is not None:
            options.terminate = True

    def run(self, parts: Sequence[Feeds], watch: bool) -> list[Answer]:
        return [self._run(feeds, watch) for feeds in parts]

    def _run(self, feeds: Feeds, watch: bool) -> Answer:
        if self._loads != self.backend.loads:
            self.moved()
        recorded = None if watch else self._recorded(feeds, self._bind)
        logits = None if recorded is None else self._replayed(recorded, feeds)
        return self._plain_run(feeds, watch) if logits is None else (logits, {})

    def _bound_state(self) -> Any:
        """A new IOBinding of the state."""
        binding = self.backend.inference.io_binding()
        self.state.bind(binding)
        return binding

    def _bind(self, kind: Kind, number: int) -> Recorded:
        """A step of a kind, not captured yet, with everything bound to where it stays."""
        from onnxruntime import OrtValue

        replays, memory = self._replays, self.backend.memory
        step = Recorded(number, self._bound_state())
        for role, (address, shape) in replays.inputs_of(kind).items():
            place = (memory.provider, 0, ONNX_TYPES[HOST_INPUTS[role][0]], shape, address)
            step.binding.bind_input(self._names[role], *place)
        for role, value in replays.numbers_of(kind).items():
            value = OrtValue.ortvalue_from_numpy(np.array(value, np.int32))
            step.binding.bind_ortvalue_input(self._names[role], value)
            step.keep.append(value)
        place = (memory.provider, 0, ONNX_TYPES["float32"], replays.logits_shape, replays.logits.address)
        step.binding.bind_output(self._logits, *place)
        return step

    def _replayed(self, step: Recorded, feeds: Feeds) -> np.ndarray | None:
        """Logits of a captured step, float32 [B, 1, V]; None when it cannot be captured, which ends all capturing."""
        from onnxruntime import RunOptions

        options = RunOptions()
        options.add_run_config_entry(OPTION, str(step.number))
        self._replays.feed(feeds)
        if step.captured:
            self._attempt(step.binding, options)
            return self._replays.answer()
        try:
            self.backend.inference.run_with_iobinding(step.binding, options)  # an interrupt would spoil the capture
        except Exception as error:  # onnxruntime's exceptions share no base class but this one
            self.backend.give_up_graphs(reason_of(error))
            self.moved()
            return None
        step.captured = True
        return self._replays.answer()

    def _plain_run(self, feeds: Feeds, watch: bool) -> Answer:
        """Logits, float32 [B, P, V], and the rows that observing layers chose when they are watched."""
        from onnxruntime import OrtValue, RunOptions

        artefact = self.backend.artefact
        chosen = {}
        if watch:
            shape = (self.state.batch, int(feeds.get("select_width", 0)))
            chosen = {layer: np.empty(shape, np.int32) for layer in artefact.selected}
        logits = np.empty((*feeds["logit_index"].shape, artefact.vocab_size), np.float32)  # [B, P, V]
        for role, name in self._names.items():
            self._binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(feeds[role]))
        self._binding.bind_ortvalue_output(self._logits, OrtValue.ortvalue_from_numpy(logits))
        for layer, rows in chosen.items():
            self._binding.bind_ortvalue_output(artefact.selected[layer], OrtValue.ortvalue_from_numpy(rows))
        options = RunOptions()
        if self.backend.graphs is not None:
            options.add_run_config_entry(OPTION, str(NOT_CAPTURED))
        try:
            self._attempt(self._binding, options)
        finally:
            if chosen:
                self._binding = self._bound_state()  # without the outputs of this step's shape
        return logits, chosen

    def _attempt(self, binding: Any, options: Any) -> None:
        """Run the graph. Raises RunError."""
        self._options = options
        try:
            self.backend.inference.run_with_iobinding(binding, options)
        except Exception as error:  # onnxruntime's exceptions share no base class but this one
            raise RunError(reason_of(error), interrupted=options.terminate) from error
        finally:
            self._options = None


def open_model(
    artefact: Artefact, provider: str, threads: int | None, library: str | Path | bool | None, cuda_graphs: bool
) -> OnnxRuntime:
    """Load the artefact's model; the arguments are those of `Engine.open`. Raises UserError."""
    half = {artefact.config["dtype"], artefact.config["kv_dtype"]}
    if provider == "cpu" and "bf16" in half:
        raise UserError(
            f"{artefact.path} computes in bf16, which ONNX Runtime cannot do on a CPU: use --provider cuda, or "
            "build it with --dtype fp16."
        )
    if provider == "cpu":
        return OnnxRuntime(artefact, _load(artefact, provider, threads))
    return _on_cuda(artefact, threads, library, cuda_graphs)


def _on_cuda(
    artefact: Artefact, threads: int | None, library: str | Path | bool | None, cuda_graphs: bool
) -> OnnxRuntime:
    from plugins.native.library import choose
    from runtime.device import device

    kernels, reason = choose(artefact.config, library)

    def load(graphs: bool = False) -> object:
        return _load(artefact, "cuda", threads, kernels, graphs)

    if kernels is None:
        told, inference, cuda_graphs = f"{BODIES}: {reason}", load(), False
        if library is not False:
            log.warning("%s: %s", artefact.path, told)
    else:
        told, inference = "native kernels, CUDA graphs", None
        if cuda_graphs:
            try:
                inference = load(graphs=True)
            except UserError as error:  # nodes that need the host between two kernels
                log.warning("decode steps run without CUDA graphs: %s", error)
                cuda_graphs = False
        if inference is None:
            told, inference = "native kernels", load()
    graphs = Numbers() if cuda_graphs else None
    return OnnxRuntime(artefact, inference, "cuda", kernels=told, memory=device(), graphs=graphs, reload=load)


def _load(
    artefact: Artefact, provider: str, threads: int | None, library: Path | None = None, graphs: bool = False
) -> object:
    """The onnxruntime.InferenceSession of the artefact, checked against its tensor contract.

    library: operators to register. graphs: capture runs in CUDA graphs.
    """
    path = artefact.path / MODEL_FILE
    backend = artefact.config["target"].get("backend")
    if backend != "onnxruntime" or MODEL_FILE not in artefact.config["files"]:
        raise UserError(
            f"{artefact.path} is an engine for {backend!r}, not for ONNX Runtime: {REBUILD} for onnxruntime."
        )
    try:
        import onnxruntime as ort
    except ImportError:
        raise UserError(f"ONNX Runtime is not installed: pip install 'kvpack[{provider}]'.") from None
    if PROVIDERS[provider] not in ort.get_available_providers():
        raise UserError(f"this ONNX Runtime has no {provider} provider: pip install 'kvpack[{provider}]'.")
    check_external_data(path, {name: entry["bytes"] for name, entry in artefact.config["files"].items()}, REBUILD)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    # Steps have ever new shapes: an arena would keep the largest prefill, and a pattern per shape, for ever.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    settings = OPTIONS[provider] | ({"enable_cuda_graph": "1"} if graphs else {})
    try:
        if library is not None:
            options.register_custom_ops_library(str(library))
        inference = ort.InferenceSession(path, options, providers=[(PROVIDERS[provider], settings)])
    except Exception as error:  # onnxruntime's exceptions share no base class but this one
        told = reason_of(error)
        raise UserError(f"ONNX Runtime {ort.__version__} cannot load {path} ({told}): {REBUILD}.") from error
    if PROVIDERS[provider] not in inference.get_providers():  # a missing CUDA library makes ONNX Runtime fall back
        raise UserError(
            f"ONNX Runtime could not start its {provider} provider: install its libraries or use --provider cpu."
        )
    for declared, found in ((artefact.inputs, inference.get_inputs()), (artefact.outputs, inference.get_outputs())):
        specs, nodes = {spec.name: spec for spec in declared}, {node.name: node for node in found}
        if wrong := set(specs) ^ set(nodes):
            raise UserError(f"{path} and config.json disagree about the tensor {min(wrong)!r}: {REBUILD}.")
        for name, spec in specs.items():
            if not spec.agrees(ORT_TYPES.get(nodes[name].type), nodes[name].shape):
                raise UserError(
                    f"{path} has {name!r} as {nodes[name].type} {nodes[name].shape} and config.json as {spec.dtype} "
                    f"{list(spec.shape)}: {REBUILD}."
                )
    return inference
