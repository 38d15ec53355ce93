"""An open engine: one ONNX Runtime session over a checked artefact, shared by any number of cache sessions."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from plugins.contract import TensorSpec, bytes_at
from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact
from runtime.external import check_external_data
from runtime.replay import Numbers

if TYPE_CHECKING:
    from runtime.canary import Check
    from runtime.device import Memory
    from runtime.generate import Completion
    from runtime.sampling import SamplingParams
    from runtime.session import Session
    from runtime.text import Text

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# By default CUDA's arena doubles, and its float32 products have ten bits.
OPTIONS = {"cpu": {}, "cuda": {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}}
MODEL_FILE = "model.onnx"
ORT_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16", "tensor(int8)": "int8",
    "tensor(int16)": "int16", "tensor(int32)": "int32", "tensor(int64)": "int64",
}  # fmt: skip
BODIES = "function bodies"  # how an engine without native kernels computes: in ONNX Runtime's own operators
log = logging.getLogger("kvpack")


class Engine:
    """Open with `Engine.open`; then `session()` for a cache to step, or `generate()` for whole completions.

    Safe to use from several threads; each session is used by one thread at a time.
    kernels: what computes the attentions: "native kernels, CUDA graphs", or "function bodies: " and why.
    memory: where caches are; None for the host's. graphs: the numbers of captured decode steps; None: none is captured.
    """

    def __init__(
        self,
        artefact: Artefact,
        inference: object,
        provider: str,
        memory_limit: int | None,
        *,
        kernels: str = BODIES,
        memory: Memory | None = None,
        graphs: Numbers | None = None,
        reload: Callable[[], object] | None = None,
    ) -> None:
        self.artefact = artefact
        self.provider = provider
        self.memory_limit = memory_limit
        self.inference = inference  # onnxruntime.InferenceSession; runs concurrently, one IOBinding per session
        self.kernels = kernels
        self.memory = memory
        self.graphs = graphs
        self.loads = 0  # how often the model was loaded anew: what was bound before is bound to nothing
        self._reload = reload  # makes an InferenceSession that captures nothing
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        verify: bool = True,
        memory_limit: int | None = None,
        library: str | Path | bool | None = None,
        cuda_graphs: bool = True,
    ) -> Engine:
        """Check the engine folder and load it.

        provider: "cpu" or "cuda". threads: for one step (None: ONNX Runtime's choice). verify=False skips the SHA-256
        of the files. memory_limit: cap in bytes on the caches of all open sessions. library: the native kernels to use
        on CUDA: a file, None for the one that `plugins.native.library.find` finds, False for none. Where one was not
        asked for and cannot be used, the engine computes without, and `kernels` says why. cuda_graphs: whether decode
        steps may be captured, which needs native kernels. Raises UserError.
        """
        if provider not in PROVIDERS:
            raise UserError(f"unknown provider {provider!r}: use {' or '.join(PROVIDERS)}.")
        if threads is not None and threads < 1:
            raise UserError(f"threads is {threads}: it must be at least 1.")
        if memory_limit is not None and memory_limit < 1:
            raise UserError(f"the memory limit is {memory_limit} bytes: it must be positive, or left out.")
        if library and provider != "cuda":
            raise UserError(f"the native kernels of {library} run on CUDA only: use --provider cuda, or no --library.")
        artefact = Artefact.open(path, verify=verify)
        half = {artefact.config["dtype"], artefact.config["kv_dtype"]}
        if provider == "cpu" and "bf16" in half:
            raise UserError(
                f"{artefact.path} computes in bf16, which ONNX Runtime cannot do on a CPU: use --provider cuda, or "
                "build it with --dtype fp16."
            )
        if provider == "cpu":
            return cls(artefact, _load(artefact, provider, threads), provider, memory_limit)
        return cls(artefact, memory_limit=memory_limit, **_on_cuda(artefact, threads, library, cuda_graphs))

    def session(self, batch: int = 1, capacity: int | None = None) -> Session:
        """A new, empty cache for `batch` sequences. capacity: tokens to allocate now (None: grow with use)."""
        from runtime.session import Session

        limit = self.artefact.max_length
        if batch < 1:
            raise UserError(f"batch is {batch}: a session needs at least one sequence.")
        if capacity is not None and not 1 <= capacity <= limit:
            raise UserError(f"capacity is {capacity}: this engine allows 1 to {limit} tokens.")
        session = Session(self, batch)
        if capacity is not None:
            session.allocate(capacity)
        return session

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Completion]:
        """Complete several prompts as one batch; see `runtime.generate.complete`."""
        from runtime.generate import complete

        return complete(self, prompts, params, cancel)

    def self_check(self) -> list[Check]:
        """Replay the prompts stored at build and compare the logits; returns the measured numbers with their bounds.

        Raises runtime.canary.SelfCheckFailed when one does not hold, UserError when the engine stores no prompts.
        """
        from runtime.canary import self_check

        return self_check(self)

    @cached_property
    def text(self) -> Text:
        """Tokenizer, chat template and end-of-sequence tokens of the engine's folder."""
        from runtime.text import Text

        return Text.open(self.artefact)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all open sessions."""
        with self._lock:
            return sum(session.nbytes for session in self._sessions)

    def reserve(self, session: Session, capacity: int) -> None:
        """Claim the bytes of `capacity` tokens for `session`, before it allocates them. Raises UserError."""
        artefact = self.artefact
        wanted = bytes_at(artefact.states, capacity, artefact.geometry, session.batch) if capacity else 0
        with self._lock:
            if self.inference is None:
                raise UserError("this engine is closed: open it again.")
            others = sum(other.nbytes for other in self._sessions if other is not session)
            if self.memory_limit is not None and others + wanted > self.memory_limit:
                raise UserError(
                    f"a cache of {capacity} tokens x {session.batch} needs {wanted:,} bytes, other sessions hold "
                    f"{others:,} and the limit is {self.memory_limit:,}: close sessions or raise --memory-limit."
                )
            self._sessions.add(session)
            session.nbytes = wanted

    def give_up_graphs(self, reason: str) -> None:
        """From now on capture nothing: load the model anew, for its stream may be left in the middle of a capture."""
        log.warning("decode steps run without CUDA graphs: %s", reason)
        self.kernels = f"native kernels, no CUDA graphs: {reason}"
        self.graphs = None
        self.inference = self._reload()
        self.loads += 1

    def close(self) -> None:
        """Close every session and let the model go. Closing twice is allowed."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        with self._lock:
            self.inference = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _on_cuda(
    artefact: Artefact, threads: int | None, library: str | Path | bool | None, cuda_graphs: bool
) -> dict[str, Any]:
    """The InferenceSession on CUDA and what belongs to it, as Engine takes them."""
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
    return {
        "inference": inference, "provider": "cuda", "kernels": told, "memory": device(),
        "graphs": Numbers() if cuda_graphs else None, "reload": load,
    }  # fmt: skip


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
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"ONNX Runtime {ort.__version__} cannot load {path} ({reason}): {REBUILD}.") from error
    if PROVIDERS[provider] not in inference.get_providers():  # a missing CUDA library makes ONNX Runtime fall back
        raise UserError(
            f"ONNX Runtime could not start its {provider} provider: install its libraries or use --provider cpu."
        )
    for declared, found in ((artefact.inputs, inference.get_inputs()), (artefact.outputs, inference.get_outputs())):
        specs, nodes = {spec.name: spec for spec in declared}, {node.name: node for node in found}
        if wrong := set(specs) ^ set(nodes):
            raise UserError(f"{path} and config.json disagree about the tensor {min(wrong)!r}: {REBUILD}.")
        for name, spec in specs.items():
            if not _agree(spec, nodes[name]):
                raise UserError(
                    f"{path} has {name!r} as {nodes[name].type} {nodes[name].shape} and config.json as {spec.dtype} "
                    f"{list(spec.shape)}: {REBUILD}."
                )
    return inference


def _agree(spec: TensorSpec, node: Any) -> bool:
    """Whether dtype, rank and fixed sizes of a graph tensor are what the contract says."""
    if ORT_TYPES.get(node.type) != spec.dtype or len(node.shape) != len(spec.shape):
        return False
    fixed = [(dim, size) for dim, size in zip(spec.shape, node.shape, strict=True) if isinstance(size, int)]
    return all(dim in (size, "vocab") for dim, size in fixed)
