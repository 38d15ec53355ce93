"""The native library for tests: built for the CPU emulator, or the real one on a machine with a GPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from calib.gguf import cache_folder
from plugins.layer import LayerSpec
from plugins.native.abi import BF16, FP16, Layer, Library

ROOT = Path(__file__).parent.parent / "plugins" / "native"
EMULATOR = Path(__file__).parent / "emulator"
DTYPES = {torch.float16: FP16, torch.bfloat16: BF16}


def emulated(names: Iterable[str] = ()) -> Library:
    """The kernels of src/<name>.cu (all of them by default), compiled to run on this CPU."""
    sources = sorted(ROOT.glob("src/*.cu")) if not names else [ROOT / "src" / f"{name}.cu" for name in names]
    inputs = [*sources, *ROOT.glob("src/*.cuh"), ROOT / "kvpack.h", *EMULATOR.glob("*")]
    digest = hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in sorted(inputs))).hexdigest()[:16]
    folder = cache_folder() / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"libkvpack-{digest}.so"
    if not out.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-DKVPACK_EMULATE", f"-I{cuda_include()}", f"-I{ROOT}"]
            flags += [f"-I{ROOT / 'src'}", f"-I{EMULATOR}"]
            objects, jobs = [], []
            for n, source in enumerate(sources):
                objects.append(f"{work}/{source.stem}.o")
                main = ["-DKVPACK_EMULATOR_MAIN"] if n == 0 else []
                jobs.append(subprocess.Popen(["g++", *flags, *main, "-x", "c++", "-c", source, "-o", objects[-1]]))
            assert not any(job.wait() for job in jobs), "the kernels do not compile"
            subprocess.run(["g++", "-shared", *objects, "-o", f"{work}/out.so"], check=True)
            os.replace(f"{work}/out.so", out)
    return Library(out)


def cuda_include() -> str:
    """Where cuda_fp16.h is."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda_fp16.h").is_file():
            return f"{home}/include"
    raise FileNotFoundError("no CUDA headers: set CUDA_HOME")


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def layer(spec: LayerSpec, dtype: torch.dtype) -> Layer:
    sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rotary_dim, spec.window)
    return Layer(*sizes, DTYPES[dtype], spec.scale, spec.softcap)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    found, wanted = (np.asarray(x.detach().cpu().double()) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
