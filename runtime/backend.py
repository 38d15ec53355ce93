"""What an engine needs of whatever computes its graph: a backend per engine, and its steps per session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from plugins.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.artefact import Artefact
    from runtime.device import Memory
    from runtime.state import State

PROVIDERS = ("cpu", "cuda")
TENSORRT = ("tensorrt", "tensorrt-rtx")  # backends whose plans run on a GPU only

Feeds = Mapping[str, np.ndarray]  # what the host gives a step, by role
Answer = tuple[np.ndarray, dict[int, np.ndarray]]  # logits, float32 [B, P, V], and rows that observing layers chose


class RunError(Exception):
    """A graph did not run to its end; the message is the reason.

    begun: whether the state may have been written. interrupted: whether `Steps.interrupt` is why.
    """

    def __init__(self, reason: str, *, begun: bool = True, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.begun = begun
        self.interrupted = interrupted


def reason_of(error: Exception) -> str:
    """The first line of what a library's exception says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Backend(Protocol):
    """A loaded graph. Shared by the sessions of an engine, from any thread.

    name: for errors. provider: one of PROVIDERS. kernels: what computes, for people. memory: where states are; None for
    the host's. sequences: the most that it takes at once; None: any number. workspace: bytes that the backend itself
    allocated beside weights and states, as far as it knows them.
    """

    name: str
    provider: str
    kernels: str
    memory: Memory | None
    sequences: int | None
    workspace: int

    def steps(self, state: State) -> Steps:
        """The steps of one session. Raises UserError when there are none for so many sequences."""

    def close(self) -> None:
        """Let the model go."""


class Steps(Protocol):
    """Runs steps over one session's state. Used by one thread at a time, `interrupt` by any."""

    def fitting(self, capacity: int) -> int:
        """The least capacity from `capacity` on that a state may have. Raises UserError when there is none."""

    def most(self) -> tuple[int, int] | None:
        """Tokens and logits per sequence of the largest step over the state as it is; None: any number."""

    def moved(self) -> None:
        """The state has other buffers than before."""

    def run(self, parts: Sequence[Feeds], watch: bool) -> list[Answer]:
        """Run the parts of one step one after the other; watch: fetch which rows were chosen.

        Raises RunError, and UserError before anything is written.
        """

    def interrupt(self) -> None:
        """Let the running step fail as soon as it can; without one nothing happens."""

    def close(self) -> None:
        """Let go of everything that refers to the state."""


def is_plan(artefact: Artefact) -> bool:
    """Whether the engine is a TensorRT plan."""
    return artefact.config["target"].get("backend") in TENSORRT


def provider_for(artefacts: Sequence[Artefact], provider: str | None) -> str:
    """Where these engines run: what was asked for, else CUDA if one of them needs it. Raises UserError."""
    if provider not in (None, *PROVIDERS):
        raise UserError(f"unknown provider {provider!r}: use {' or '.join(PROVIDERS)}.")
    plans = [artefact for artefact in artefacts if is_plan(artefact)]
    if plans and provider == "cpu":
        backend = plans[0].config["target"]["backend"]
        raise UserError(
            f"{plans[0].path} is a plan of {backend}, which runs on NVIDIA GPUs only: use --provider cuda, or build "
            "the engine with --backend onnxruntime."
        )
    return provider or ("cuda" if plans else "cpu")


def open_backend(
    artefact: Artefact, provider: str, threads: int | None, library: str | Path | bool | None, cuda_graphs: bool
) -> Backend:
    """Load the artefact's graph; the arguments are those of `Engine.open`. Raises UserError."""
    if is_plan(artefact):
        from runtime import tensorrt

        if threads is not None:
            raise UserError(f"{artefact.path} is a TensorRT plan, which knows no --threads {threads}: leave it out.")
        return tensorrt.open_plan(artefact, library, cuda_graphs)
    from runtime import onnxruntime

    return onnxruntime.open_model(artefact, provider, threads, library, cuda_graphs)
