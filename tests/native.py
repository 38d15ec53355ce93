"""The native library for tests: built for the CPU emulator, or the real one on a machine with a GPU."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plugins.cache import cache_folder
from plugins.layer import LayerSpec
from plugins.native.abi import BF16, FP16, Layer, Library
from plugins.native.build import cuda_include
from plugins.native.layer import NativeLayer

ROOT = Path(__file__).parent.parent / "plugins" / "native"
EMULATOR = Path(__file__).parent / "emulator"
DTYPES = {torch.float16: FP16, torch.bfloat16: BF16}


def emulated() -> Library:
    """The kernels, compiled to run on this CPU; each source file once, until it or a header changes."""
    include = cuda_include()
    if include is None:
        pytest.skip('there are no CUDA headers: pip install "kvpack[native]"')
    headers = [*ROOT.glob("src/*.cuh"), ROOT / "kvpack.h", *EMULATOR.glob("*.h")]
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-DKVPACK_EMULATE", f"-I{include}", f"-I{ROOT}"]
    flags += [f"-I{ROOT / 'src'}", f"-I{EMULATOR}"]
    folder = cache_folder() / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=folder) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it: take what it made

        def compiled(source: Path) -> Path:
            out = folder / f"{source.stem}-{digest([source, *headers])}.o"
            if not out.is_file():
                made = f"{work}/{out.name}"
                subprocess.run(["g++", *flags, "-x", "c++", "-c", source, "-o", made], check=True)
                os.replace(made, out)
            return out

        sources = [EMULATOR / "main.cc", *sorted(ROOT.glob("src/*.cu"))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        out = folder / f"libkvpack-{digest(objects)}.so"
        if not out.is_file():
            subprocess.run(["g++", "-shared", *objects, "-o", f"{work}/out.so"], check=True)
            os.replace(f"{work}/out.so", out)
    return Library(out)


def digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in sorted(files))).hexdigest()[:16]


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def layer(spec: LayerSpec, dtype: torch.dtype) -> Layer:
    sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim, spec.window)
    return Layer(*sizes, DTYPES[dtype], spec.scale, spec.softcap)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite where a number is NaN, which would be lost in a maximum."""
    found, wanted = (np.asarray(x.detach().cpu().double()) for x in (found, wanted))
    error = float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
    return np.inf if np.isnan(error) else error


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] -> [B, S, H * D]."""
    return x.transpose(1, 2).flatten(2).contiguous()


def heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, H * D] -> [B, H, S, D]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).contiguous()


def step(
    native: NativeLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool = True, **rest: Any
) -> torch.Tensor:
    """`NativeLayer.step` of q, k, v [B, H, S, D] as the references take them: [B, Hq, S, D].

    packed: whether q, k and v lie side by side in one tensor, as a graph's joint projection leaves them.
    """
    given = [tokens_first(x) for x in (q, k, v)]
    if packed:
        given = [torch.cat(given, dim=-1)]
    return heads_first(native.step(*given, **rest), q.shape[1])


def follow(
    native: NativeLayer,
    references: Sequence[Any],
    steps: Sequence[Sequence[int]],
    tokens: Callable[[int, torch.Generator], list[torch.Tensor]],
    stored: Callable[[int], Any],
) -> float:
    """The worst relative difference of a step's outputs, each step fed to both.

    steps: tokens appended per sequence. tokens(length, generator): q, k, v. stored(member): the rows that a sequence
    has stored, as its reference takes them.
    """
    generator, worst = torch.Generator().manual_seed(1), 0.0
    for counts in steps:
        drawn = tokens(max(counts), generator)
        given = [stored(member) for member in range(len(counts))]
        out = step(native, *drawn, new=counts).float()
        found, wanted = [], []
        for member, count in enumerate(counts):
            assert (out[member, :, count:] == 0).all()
            if count:
                fed = (x[member : member + 1, :, :count].float() for x in drawn)
                wanted.append(references[member].step(*fed, given=given[member]).flatten())
                found.append(out[member, :, :count].flatten())
        worst = max(worst, relative(torch.cat(found), torch.cat(wanted)))
    return worst
