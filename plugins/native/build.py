"""Compiling the native library: nvcc over src/*.cu, the faces for ONNX Runtime and TensorRT, one shared library.

Per kernel, what ptxas says it needs of a multiprocessor comes back as a `Kernel`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from plugins.errors import UserError
from plugins.native.faces import ONNXRUNTIME, TENSORRT, find_headers

ROOT = Path(__file__).parent
COMMON_ARCHES = (80, 90)  # what is compiled for where there is no GPU to ask
FLAGS = ("-std=c++17", "-lineinfo", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")
CUDA_NVCC = "/usr/local/cuda/bin/nvcc"
FACES = (ONNXRUNTIME, TENSORRT)


@dataclass(frozen=True)
class Kernel:
    """What one kernel needs on one architecture, by ptxas.

    source: file it came from. name: without its arguments. arch: 90 for sm_90. registers: of a thread. spill_stores,
    spill_loads, stack: bytes of a thread in local memory. shared: static bytes of a block. threads: the most that a
    block has, by the kernel's launch bounds; None without.
    """

    source: str
    name: str
    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    threads: int | None = None


@dataclass(frozen=True)
class BuildReport:
    """library: what was written; None when nothing was linked. onnxruntime, tensorrt: folders of the headers that the
    operators and plugins were compiled with; None when the library has none."""

    library: Path | None
    nvcc: Path
    version: str
    arches: tuple[int, ...]
    onnxruntime: Path | None
    tensorrt: Path | None
    kernels: tuple[Kernel, ...]
    seconds: float

    def families(self) -> dict[tuple[str, int, str], list[Kernel]]:
        """Kernels that differ in template arguments only, together: by source, architecture and name."""
        found: dict[tuple[str, int, str], list[Kernel]] = {}
        for kernel in self.kernels:
            found.setdefault((kernel.source, kernel.arch, kernel.name.partition("<")[0]), []).append(kernel)
        return found

    def to_json(self) -> dict[str, Any]:
        plain = {name: None if value is None else str(value) for name, value in self._paths().items()}
        return {
            **plain,
            "version": self.version,
            "arches": list(self.arches),
            "seconds": round(self.seconds, 1),
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }

    def _paths(self) -> dict[str, Path | None]:
        faces = {"onnxruntime": self.onnxruntime, "tensorrt": self.tensorrt}
        return {"library": self.library, "nvcc": self.nvcc, **faces}


def sources() -> list[Path]:
    """The CUDA files of the library."""
    return sorted(ROOT.glob("src/*.cu"))


def compile(
    arches: Sequence[int],
    out: Path | None = None,
    files: Sequence[Path] | None = None,
    nvcc: str | Path | None = None,
    onnxruntime: str | Path | None = None,
    tensorrt: str | Path | None = None,
    jobs: int | None = None,
    level: str = "-O3",
    done: Callable[[str], None] = lambda name: None,
) -> BuildReport:
    """Compile `files` (all by default) for `arches`, and link them to the library `out`; None: do not link.

    nvcc, onnxruntime, tensorrt: see `find_nvcc` and `find_headers`. jobs: files compiled at a time. done is called with
    the name of each piece of work that ended, `pieces` times in all. Raises UserError.
    """
    started = time.monotonic()
    compiler = find_nvcc(nvcc)
    chosen = sources() if files is None else list(files)
    if not chosen:
        raise UserError(f"there is nothing to compile in {ROOT / 'src'}: install kvpack again")
    _check_arches(compiler, arches)
    folders = [None, None] if out is None else _face_headers(onnxruntime, tensorrt)
    headers = {ROOT / "src" / face.source: folder for face, folder in zip(FACES, folders, strict=True) if folder}
    work = [*chosen, *headers]
    with tempfile.TemporaryDirectory(prefix="kvpack-build-") as folder:
        objects, kernels = [], []
        with ThreadPoolExecutor(max(1, jobs or len(os.sched_getaffinity(0)))) as pool:
            waiting = {
                pool.submit(_compile_one, compiler, source, arches, Path(folder), level, headers.get(source)): source
                for source in sorted(work, key=lambda path: -path.stat().st_size)  # the longest first
            }
            try:
                for future in as_completed(waiting):
                    made, found = future.result()
                    objects.append(made)
                    kernels += found
                    done(waiting[future].name)
            except UserError:
                pool.shutdown(cancel_futures=True)
                raise
        if out is not None:
            _link(compiler, sorted(objects), out)
            done(out.name)
    kernels.sort(key=lambda kernel: (kernel.source, kernel.arch, kernel.name))
    seconds = time.monotonic() - started
    return BuildReport(out, compiler, _version(compiler), tuple(arches), *folders, tuple(kernels), seconds)


def pieces(out: Path | None, onnxruntime: str | Path | None = None, tensorrt: str | Path | None = None) -> int:
    """How often `compile` calls `done`."""
    if out is None:
        return len(sources())
    return len(sources()) + 1 + sum(folder is not None for folder in _face_headers(onnxruntime, tensorrt))


def _face_headers(*given: str | Path | None) -> list[Path | None]:
    """The folder of each face's headers, in the order of FACES."""
    return [find_headers(face, folder) for face, folder in zip(FACES, given, strict=True)]


# -- what is on the machine


def find_nvcc(given: str | Path | None = None) -> Path:
    """nvcc: the one given, CUDACXX's, CUDA_HOME's, the path's, or that of PyPI's nvidia-cuda-nvcc.

    Raises UserError when there is none, or none where it was said to be.
    """
    asked = {"--nvcc": given, "CUDACXX": os.environ.get("CUDACXX")}
    for name, value in asked.items():
        if value:
            found = shutil.which(str(value))
            if found is None:
                raise UserError(f"{name} {value} is not a program: give the path of nvcc, or leave it out")
            return Path(found)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", CUDA_NVCC]:
        if found := shutil.which(candidate):
            return Path(found)
    for candidate in _packaged("bin/nvcc"):
        if os.access(candidate, os.X_OK):
            return candidate
    raise UserError(
        "there is no nvcc (looked at --nvcc, CUDACXX, CUDA_HOME, PATH and PyPI's nvidia-cuda-nvcc): "
        'pip install "kvpack[native]" brings one'
    )


def _packaged(inside: str) -> Iterator[Path]:
    """`inside` in each folder nvidia/*/ of the installed packages that has it, newest CUDA first."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        yield from sorted(Path(folder).glob(f"cu*/{inside}"), reverse=True)


def cuda_include() -> Path | None:
    """The folder of cuda_runtime.h beside nvcc; None when there is none. For programs that only need the headers."""
    try:
        root = find_nvcc().resolve().parent.parent
    except UserError:
        return None
    candidates = (root / "include", Path("/usr/local/cuda/include"), *_packaged("include"))
    return next((folder for folder in candidates if (folder / "cuda_fp16.h").is_file()), None)


def native_arches() -> tuple[int, ...]:
    """The architectures of this machine's GPUs, by nvidia-smi; () when there is none."""
    try:
        asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(sorted({int(major) * 10 + int(minor) for major, minor in re.findall(r"(\d+)\.(\d+)", done.stdout)}))


def _check_arches(nvcc: Path, arches: Sequence[int]) -> None:
    """Raises UserError for an architecture below 80 or one that nvcc does not know."""
    known = [int(number) for number in re.findall(r"sm_(\d+)", _run([nvcc, "--list-gpu-code"], "nvcc does not run"))]
    for arch in arches:
        if arch < 80:
            raise UserError(f"the kernels need a GPU of architecture 80 or newer, not {arch}: leave it out of --arch")
        if arch not in known:
            raise UserError(
                f"{nvcc} (CUDA {_version(nvcc)}) cannot compile for architecture {arch}: use one of "
                f"{', '.join(str(number) for number in known if number >= 80)}, or another nvcc by --nvcc"
            )


def _version(nvcc: Path) -> str:
    found = re.search(r"release ([\d.]+)", _run([nvcc, "--version"], "nvcc does not run"))
    return found[1] if found else "unknown"


# -- the work


def _compile_one(
    nvcc: Path, source: Path, arches: Sequence[int], folder: Path, level: str, headers: Path | None
) -> tuple[Path, list[Kernel]]:
    """One source file to an object in `folder`, and the kernels in it."""
    out, kept = folder / f"{source.name}.o", folder / f"{source.name}.kept"
    kept.mkdir()
    newest = max(arches)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches]
    targets[list(arches).index(newest)] = f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]"
    if source.stem.endswith("_sm90") and 90 in arches:  # instructions that no other architecture has
        targets = ["-gencode=arch=compute_90a,code=sm_90a", "-DKVPACK_SM90A"]
    include = [f"-I{ROOT}", f"-I{ROOT / 'src'}", *([f"-I{headers}"] if headers else [])]
    keep = ["--keep", "--keep-dir", kept] if source.suffix == ".cu" else []  # the PTX tells the launch bounds
    command = [nvcc, level, *FLAGS, *targets, *include, *keep, "-c", source, "-o", out]
    log = _run(command, f"{source.name} does not compile")
    threads: dict[str, int] = {}
    for ptx in kept.glob("*.ptx"):
        threads |= launch_bounds(ptx.read_text(encoding="utf-8", errors="replace"))
    shutil.rmtree(kept)
    found = [replace(kernel, threads=threads.get(kernel.name)) for kernel in parse_resources(log, source.name)]
    names = _demangled([kernel.name for kernel in found])
    return out, [replace(kernel, name=name) for kernel, name in zip(found, names, strict=True)]


def _link(nvcc: Path, objects: Sequence[Path], out: Path) -> None:
    """Write the library under another name, then rename it: nobody opens half of one."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".kvpack-") as folder:
            made = Path(folder) / out.name
            hidden = ["-Xlinker", f"--version-script={ROOT / 'exports.map'}", "-Xlinker", "--no-undefined"]
            _run([nvcc, "-shared", "-cudart", "static", *hidden, *objects, "-o", made], "the library does not link")
            made.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): choose another place by --out") from None


_MENDS = {
    "nv/target": "the headers of nvidia-cuda-cccl are missing: pip install nvidia-cuda-cccl",
    "cuda_runtime.h": "the headers of the CUDA runtime are missing: pip install nvidia-cuda-runtime",
    "Failed to preprocess host compiler properties": "nvcc needs a C++ compiler: install g++, or set NVCC_CCBIN",
    "gcc: No such file": "nvcc needs a C++ compiler: install g++, or set NVCC_CCBIN",
    "unsupported GNU version": "this g++ is too new for this nvcc: set NVCC_CCBIN to an older one",
    "No space left": "the disk is full: free some space, or set TMPDIR to another disk",
}


def _run(command: Sequence[str | Path], failure: str) -> str:
    """The output of a command. Raises UserError, with the mend where it is known and the compiler's word otherwise."""
    try:
        done = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"{failure}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        for sign, mend in _MENDS.items():
            if sign in done.stdout:
                raise UserError(f"{failure}: {mend}")
        said = [line for line in done.stdout.splitlines() if not line.startswith("ptxas info")]
        raise UserError(f"{failure}:\n" + "\n".join(said[-40:]))
    return done.stdout


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str, source: str) -> list[Kernel]:
    """The kernels that `ptxas -v` tells of, names mangled."""
    found: list[Kernel] = []
    name, arch, spills = "", 0, (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name, arch, spills = match[1], int(match[2]), (0, 0, 0)
        elif match := _SPILLS.search(line):
            spills = tuple(map(int, match.groups()))
        elif name and (match := _USED.search(line)):
            stack, stores, loads = spills
            shared = _SHARED.search(line)
            found.append(
                Kernel(source, name, arch, int(match[1]), stores, loads, stack, int(shared[1]) if shared else 0)
            )
            name = ""
    return found


def launch_bounds(ptx: str) -> dict[str, int]:
    """Threads of a block at most, of every kernel of a PTX text that says so, by its mangled name."""
    bounds: dict[str, int] = {}
    for match in re.finditer(r"\.entry (\w+)\(.*?\)([^{]*)\{", ptx, re.DOTALL):
        if limit := re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", match[2]):
            x, y, z = (int(size or 1) for size in limit.groups())
            bounds[match[1]] = x * y * z
    return bounds


def _demangled(names: Sequence[str]) -> list[str]:
    """Kernels' names as written, without namespace and arguments; mangled where there is no c++filt."""
    if not names or shutil.which("c++filt") is None:
        return list(names)
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [_bare(name) for name in done.stdout.splitlines()]


def _bare(name: str) -> str:
    """ "void kvpack::f<__half, (int)64>(float*)" -> "f<half, 64>"."""
    name = name.replace("(anonymous namespace)::", "").replace("kvpack::", "")
    name = re.sub(r"\((?:unsigned )?(?:int|bool|long|char)\)", "", name)
    depth, end = 0, len(name)
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = at
            break
    name = name[:end].removeprefix("void ")
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "half")
