"""What a plan is asked to be, and the optimisation profiles that follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.cache import cache_folder
from plugins.contract import CAPACITY_STEP, TensorSpec, state_sizes
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.native import library as native
from runtime.device import Driver

from .packages import PACKAGES

Range = tuple[int, int, int]  # smallest, usual, largest
USUAL = 4096  # tokens that a plan is tuned for, where its limit allows


@dataclass(frozen=True)
class PlanOptions:
    """Options of `python -m export build` that plans have, see its --help.

    targets: ("sm_89", ...), the GPUs of a tensorrt-rtx plan; none: this machine's. library: the native library whose
    plugins a tensorrt plan uses; None: where `python -m plugins build` put it.
    """

    batch: int = 1
    prefill_tokens: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    version_compatible: bool = False
    hardware_compatible: bool = False
    strip_weights: bool = False
    keep_onnx: bool = False
    library: Path | None = None

    def given(self) -> dict[str, object]:
        """The options that were set, by their names on the command line."""
        values = {
            "--batch": self.batch if self.batch != 1 else None,
            "--prefill-tokens": self.prefill_tokens,
            "--target": self.targets,
            "--version-compatible": self.version_compatible,
            "--hardware-compatible": self.hardware_compatible,
            "--strip-weights": self.strip_weights,
            "--keep-onnx": self.keep_onnx,
            "--library": self.library,
        }
        return {name: value for name, value in values.items() if value}

    def check(self, backend: str, dtype: str, kv_dtype: str) -> None:
        """Raises UserError for what the backend cannot do, before anything is made. Imports its package."""
        given = self.given()
        if backend not in PACKAGES:
            if given:
                raise UserError(f"{min(given)} is about plans: it needs --backend {' or '.join(PACKAGES)}")
            return
        package = PACKAGES[backend]
        if self.batch < 1:
            raise UserError(f"--batch {self.batch} must be at least 1")
        if any(tokens < 2 for tokens in self.prefill_tokens):
            raise UserError(f"--prefill-tokens {min(self.prefill_tokens)} must be at least 2: one token has a profile")
        if package.plugins and self.targets:
            raise UserError(
                f"--target {','.join(self.targets)} needs --backend tensorrt-rtx: a plan of tensorrt is for the GPU "
                "that it is built on"
            )
        alone = ("--version-compatible", "--hardware-compatible", "--strip-weights", "--library")
        if not package.plugins and (wrong := [name for name in alone if name in given]):
            raise UserError(f"{wrong[0]} needs --backend tensorrt: {backend} has nothing of the kind")
        if package.plugins and (dtype != kv_dtype or dtype == "fp32"):
            raise UserError(
                f"the plugins of --backend tensorrt compute in fp16 or bf16 throughout, not in {dtype} with a cache in "
                f"{kv_dtype}: use --dtype fp16 or --dtype bf16, without --kv-dtype"
            )
        package.load()
        self.capabilities(backend)
        if package.plugins:
            native.find(self.library)

    def capabilities(self, backend: str) -> list[str]:
        """Compute capabilities of the GPUs that the plan is for, as in ["8.9", "12.0"]. Raises UserError."""
        package, own = PACKAGES[backend], None if self.targets else own_capability()
        if not self.targets and own is None:
            mend = "build on the machine that is to run it"
            if not package.plugins:
                mend = "name the compute capability of the one that is to run it, as in --target sm_89"
            raise UserError(f"--backend {backend} finds no NVIDIA GPU here to build a plan for: {mend}")
        if package.plugins:
            return [own]
        known = {f"sm_{name[2:]}" for name in package.load().ComputeCapability.__members__ if name.startswith("SM")}
        targets = self.targets or (f"sm_{own.replace('.', '')}",)
        for target in targets:
            if not re.fullmatch(r"sm_\d{2,3}", target):
                raise UserError(f"--target {target} is no compute capability: write it like sm_89, several with commas")
            if target not in known:
                several = ", ".join(sorted(known, key=lambda name: int(name[3:])))
                raise UserError(f"--target {target} is none that --backend {backend} builds for: use {several}")
        if len(set(targets)) < len(targets):
            raise UserError(f"--target {','.join(targets)} names one twice: leave it out")
        return [f"{target[3:-1]}.{target[-1]}" for target in targets]

    def flags(self, backend: str) -> list[str]:
        """Names of TensorRT's BuilderFlag. TensorRT-RTX captures steps of such plans alone as allocate nothing."""
        wanted = {
            "VERSION_COMPATIBLE": self.version_compatible,
            "STRIP_PLAN": self.strip_weights,
            "REQUIRE_USER_ALLOCATION": not PACKAGES[backend].plugins,
        }
        return [name for name, on in wanted.items() if on]

    def profiles(self, backend: str, limit: int) -> list[Profile]:
        """Decoding first. limit: tokens of the longest sequence. Raises UserError."""
        if limit < 2:
            raise UserError(f"--max-length {limit} leaves no prompt to build a profile for: it must be at least 2")
        batch = (1, 1, self.batch)
        usual = {min(tokens, limit) for tokens in PACKAGES[backend].prefill_tokens}
        lengths = sorted(set(self.prefill_tokens) or usual)
        if lengths[-1] > limit:
            raise UserError(f"--prefill-tokens {lengths[-1]} is longer than --max-length {limit}: give less")
        found = [Profile("decode", (1, 1, 1), batch)]
        return found + [Profile(f"prefill-{length}", (2, length, length), batch) for length in lengths]


def timing_cache(sm: Sequence[str]) -> Path:
    """Where what TensorRT measured on such a GPU is kept for the next build."""
    return cache_folder() / "tensorrt" / f"timing-sm{'-'.join(sm).replace('.', '')}.cache"


def check_selection(backend: str, geometry: Geometry | None, limit: int) -> None:
    """Raises UserError when a decode step would choose more rows than the backend sorts."""
    from plugins.dense.onnx_body import TOP_LIMIT

    if PACKAGES[backend].plugins or geometry is None or not geometry.selects:
        return
    most = int(geometry.selected(np.array([limit]))[0])
    if most > TOP_LIMIT:
        raise UserError(
            f"--backend {backend} chooses at most {TOP_LIMIT:,} tokens in a step, and this selection takes {most:,} "
            f"when {limit:,} are stored: use --select-count {TOP_LIMIT}, a smaller --select-fraction or --max-length"
        )


@dataclass(frozen=True)
class Profile:
    """One optimisation profile. tokens: appended per sequence."""

    name: str
    tokens: Range
    batch: Range

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "tokens": list(self.tokens), "batch": list(self.batch)}

    def sizes(self, geometry: Geometry | None, limit: int) -> dict[str, Range]:
        """Every symbol of the tensor contract, and the numbers `live` and `select_width`, that a step may have."""
        single = self.tokens[2] == 1
        capacities = [min(CAPACITY_STEP, limit), min(USUAL, limit), limit]
        held = [state_sizes(capacity, geometry) for capacity in capacities]
        found = {symbol: tuple(sizes[symbol] for sizes in held) for symbol in held[0]}
        found |= {"batch": self.batch, "sequence": self.tokens, "live": (0, capacities[1], limit)}
        found["picks"] = (1, 1, 1 if single else self.tokens[2])
        if geometry is not None:
            most = -(-self.tokens[2] // geometry.block) * geometry.block
            found["encode"] = (0, most, most)
        if geometry is not None and geometry.selects:
            widths = [int(geometry.selection(np.array([n]), n, single)[1]) for n in capacities[1:]]
            found["select_width"] = (0, widths[0], widths[1])
        return found


def shapes(spec: TensorSpec, sizes: Mapping[str, Range]) -> list[list[int]]:
    """The three shapes of a tensor; of a scalar its three values, [[n], [n], [n]]."""
    dims = spec.shape or (spec.role,)
    return [[dim if isinstance(dim, int) else sizes[dim][n] for dim in dims] for n in range(3)]


def own_capability() -> str | None:
    """Compute capability of this machine's first GPU, "8.9"; None where there is no driver or no GPU."""
    try:
        return Driver().capability()
    except (UserError, MemoryError):
        return None
