"""An open engine: one backend over a checked artefact, shared by any number of cache sessions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from plugins.contract import bytes_at
from plugins.errors import UserError
from runtime.artefact import Artefact
from runtime.backend import Backend, open_backend, provider_for

if TYPE_CHECKING:
    from runtime.canary import Check
    from runtime.device import Memory
    from runtime.generate import Completion
    from runtime.sampling import SamplingParams
    from runtime.session import Session
    from runtime.text import Text


class Engine:
    """Open with `Engine.open`; then `session()` for a cache to step, or `generate()` for whole completions.

    Safe to use from several threads; each session is used by one thread at a time.
    """

    def __init__(self, artefact: Artefact, backend: Backend, memory_limit: int | None = None) -> None:
        self.artefact = artefact
        self.backend = backend
        self.memory_limit = memory_limit
        self.closed = False
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        provider: str | None = None,
        threads: int | None = None,
        verify: bool = True,
        memory_limit: int | None = None,
        library: str | Path | bool | None = None,
        cuda_graphs: bool = True,
    ) -> Engine:
        """Check the engine folder and load it.

        provider: "cpu" or "cuda" (None: cuda for a TensorRT plan, else cpu). threads: for one step (None: ONNX
        Runtime's choice). verify=False skips the SHA-256 of the files. memory_limit: cap in bytes on the caches of all
        open sessions. library: the native kernels to use on CUDA: a file, None for the one that
        `plugins.native.library.find` finds, False for none. Where one was not asked for and cannot be used, the engine
        computes without, and `kernels` says why. A TensorRT plan has its plugins with it; a file replaces them.
        cuda_graphs: whether decode steps may be captured, which in ONNX Runtime needs native kernels. Raises UserError.
        """
        if threads is not None and threads < 1:
            raise UserError(f"threads is {threads}: it must be at least 1.")
        if memory_limit is not None and memory_limit < 1:
            raise UserError(f"the memory limit is {memory_limit} bytes: it must be positive, or left out.")
        artefact = Artefact.open(path, verify=verify)
        provider = provider_for([artefact], provider)
        if library and provider == "cpu":
            raise UserError(f"the native kernels of {library} run on CUDA only: use --provider cuda, or no --library.")
        return cls(artefact, open_backend(artefact, provider, threads, library, cuda_graphs), memory_limit)

    @property
    def provider(self) -> str:
        """Where it runs: "cpu" or "cuda"."""
        return self.backend.provider

    @property
    def kernels(self) -> str:
        """What computes, for people: "native kernels, CUDA graphs", "TensorRT 11.4, plugins, CUDA graphs", ..."""
        return self.backend.kernels

    @property
    def memory(self) -> Memory | None:
        """Where caches are; None for the host's."""
        return self.backend.memory

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

    @property
    def sequences(self) -> int | None:
        """The most that a session may have; None: any number."""
        return self.backend.sequences

    @property
    def workspace(self) -> int:
        """Bytes of device memory that a TensorRT plan computes in, so far; 0 for ONNX Runtime, which does not tell."""
        return self.backend.workspace

    def reserve(self, session: Session, capacity: int) -> None:
        """Claim the bytes of `capacity` tokens for `session`, before it allocates them. Raises UserError."""
        artefact = self.artefact
        wanted = bytes_at(artefact.buffers, capacity, artefact.geometry, session.batch) if capacity else 0
        with self._lock:
            if self.closed:
                raise UserError("this engine is closed: open it again.")
            others = sum(other.nbytes for other in self._sessions if other is not session)
            if self.memory_limit is not None and others + wanted > self.memory_limit:
                raise UserError(
                    f"a cache of {capacity} tokens x {session.batch} needs {wanted:,} bytes, other sessions hold "
                    f"{others:,} and the limit is {self.memory_limit:,}: close sessions or raise --memory-limit."
                )
            self._sessions.add(session)
            session.nbytes = wanted

    def close(self) -> None:
        """Close every session and let the model go. Closing twice is allowed."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        with self._lock:
            self.closed = True
        self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
