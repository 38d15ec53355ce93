"""The native library compiles, its kernels keep within what a multiprocessor has, and it shows nothing but its API."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import trt_headers

from plugins.errors import UserError
from plugins.native import build, faces
from plugins.native.abi import OPS, Library
from plugins.native.faces import TENSORRT, Face, find_headers

REGISTERS = 65536  # of a multiprocessor
BLOCK = 1024  # threads that a block may have, where a kernel has no launch bounds
STATIC_SHARED = 48 << 10
DECODE = re.compile("decode|table_kernel|select|add_rms_norm|gated_activation")  # names of what a decode step launches
# Bytes that a kernel of these files may spill, outside its inner loop, and of the others.
SPILLED = {"vqkv_table.cu": 352, "vqkv_decode.cu": 160, "deltakv_decode_sm90.cu": 128}
FEW = 8
EVERY_ARCH = (80, 86, 89, 90, 100, 120)
HEADER = (build.ROOT / "kvpack.h").read_text(encoding="utf-8")


def compiler() -> Path | None:
    try:
        return build.find_nvcc()
    except UserError:
        return None


needs_nvcc = pytest.mark.skipif(compiler() is None, reason='there is no nvcc: pip install "kvpack[native]"')


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> build.BuildReport:
    """For every architecture, with the plugins for TensorRT where their headers can be had."""
    try:
        headers = trt_headers.find()
    except trt_headers.Unavailable:
        headers = None
    return build.compile(EVERY_ARCH, tmp_path_factory.mktemp("native") / "libkvpack.so", tensorrt=headers)


def check_budgets(report: build.BuildReport) -> None:
    assert {kernel.arch for kernel in report.kernels} == set(report.arches)
    found = {f"{kernel.name} of {kernel.source}, sm_{kernel.arch}": kernel for kernel in report.kernels}
    assert {name: kernel.shared for name, kernel in found.items() if kernel.shared > STATIC_SHARED} == {}
    assert {name for name, kernel in found.items() if kernel.registers > 255} == set()
    crowded = {name for name, kernel in found.items() if kernel.registers * (kernel.threads or BLOCK) > REGISTERS}
    assert crowded == set(), "a block's registers are more than a multiprocessor has"
    spilling = {
        name: kernel.spill_stores
        for name, kernel in found.items()
        if DECODE.search(kernel.name) and kernel.spill_stores > SPILLED.get(kernel.source, FEW)
    }
    assert spilling == {}


@needs_nvcc
def test_every_kernel_keeps_within_the_budgets_on_every_architecture(built: build.BuildReport) -> None:
    check_budgets(built)
    assert {kernel.source for kernel in built.kernels} <= {path.name for path in build.sources()}


@needs_nvcc
def test_the_library_exports_what_its_header_declares_and_opens_without_a_gpu(built: build.BuildReport) -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", built.library], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines()}
    declared = set(re.findall(r"^KVPACK_API [\w *]*?(kvpack_\w+)\(", HEADER, re.MULTILINE))
    assert len(declared) > 10 and declared <= exported
    assert exported - declared <= {"RegisterCustomOps", "getCreators", "setLoggerFinder"}
    library = Library(built.library)
    assert all(hasattr(library.handle, f"kvpack_{op}_attention") for op in OPS)


@needs_nvcc
def test_an_architecture_that_nvcc_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot compile for architecture 999: use one of 80"):
        build.compile([80, 999], tmp_path / "x.so")
    with pytest.raises(UserError, match="80 or newer, not 75"):
        build.compile([75], tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


@needs_nvcc
def test_a_source_that_does_not_compile_says_so_and_leaves_the_library_alone(tmp_path: Path) -> None:
    wrong, out = tmp_path / "wrong.cu", tmp_path / "libkvpack.so"
    wrong.write_text("__global__ void decode_kernel(float *x) { *x = nowhere; }\n")
    out.write_text("old")
    with pytest.raises(UserError, match=r"wrong\.cu does not compile:\n.*nowhere"):
        build.compile([80], out, files=[wrong])
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == [out, wrong]


@needs_nvcc
def test_a_kernel_that_spills_and_has_launch_bounds_is_told(tmp_path: Path) -> None:
    source = tmp_path / "spill.cu"
    source.write_text(
        "namespace kvpack {\n"
        "template <class T, int N> __global__ void __launch_bounds__(1024, 2) decode_kernel(T *x) {\n"
        "  __shared__ T shared[128];\n"
        "  T held[N];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < N; i++) held[i] = x[i * 1024 + threadIdx.x];\n"
        "  shared[threadIdx.x & 127] = held[0];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < N; i++) x[i * 2048 + threadIdx.x] = held[i] * shared[i & 127];\n"
        "}\n"
        "template __global__ void decode_kernel<float, 96>(float *);\n"
        "}\n"
    )
    report = build.compile([80, 90], files=[source])
    assert report.library is None and [kernel.arch for kernel in report.kernels] == [80, 90]
    for kernel in report.kernels:
        assert kernel.name == "decode_kernel<float, 96>" and kernel.threads == 1024 and kernel.shared == 512
        assert kernel.registers <= 32 and kernel.spill_stores > 0 and kernel.spill_loads > 0
    with pytest.raises(AssertionError):
        check_budgets(report)


PTXAS = """\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN6kvpack1fI6__halfLi64EEEvPf' for 'sm_80'
ptxas info    : Function properties for _ZN6kvpack1fI6__halfLi64EEEvPf
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 2048 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 3.596 ms
ptxas info    : Compiling entry function 'g' for 'sm_90a'
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_what_ptxas_says_is_read() -> None:
    assert build.parse_resources(PTXAS, "a.cu") == [
        build.Kernel("a.cu", "_ZN6kvpack1fI6__halfLi64EEEvPf", 80, 40, 4, 12, 16, 2048),
        build.Kernel("a.cu", "g", 90, 8, 0, 0, 0, 0),
    ]


def test_launch_bounds_are_read_from_ptx() -> None:
    ptx = """
.visible .entry f(
	.param .u64 f_param_0
)
.maxntid 128, 2, 1
.minnctapersm 2
{
}
.visible .entry g(
	.param .u64 g_param_0
)
{
}
.entry h()
.maxntid 64
{
}
"""
    assert build.launch_bounds(ptx) == {"f": 256, "h": 64}


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of CUDA in the environment, on the path or among the packages. Returns an empty folder on the path."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "ONNXRUNTIME_INCLUDE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "CUDA_NVCC", str(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setattr(build, "_packaged", lambda inside: iter(()))
    return tmp_path


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_looked_for_where_it_is_said_to_be_first(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"there is no nvcc .*pip install \"kvpack\[native\]\""):
        build.find_nvcc()
    packaged = program(bare_machine / "nvidia" / "cu13" / "bin" / "nvcc")
    monkeypatch.setattr(build, "_packaged", lambda inside: iter([packaged]))
    assert build.find_nvcc() == packaged
    usual = program(bare_machine / "cuda" / "bin" / "nvcc")
    assert build.find_nvcc() == usual
    on_path = program(bare_machine / "nvcc")
    assert build.find_nvcc() == on_path
    home = program(bare_machine / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(bare_machine / "home"))
    assert build.find_nvcc() == home
    named = program(bare_machine / "named")
    monkeypatch.setenv("CUDACXX", str(named))
    assert build.find_nvcc() == named
    given = program(bare_machine / "given")
    assert build.find_nvcc(given) == given
    with pytest.raises(UserError, match="--nvcc .*missing is not a program"):
        build.find_nvcc(bare_machine / "missing")
    monkeypatch.setenv("CUDACXX", "nowhere")
    with pytest.raises(UserError, match="CUDACXX nowhere is not a program"):
        build.find_nvcc()


@pytest.mark.parametrize("face", build.FACES, ids=lambda face: face.framework)
def test_the_headers_of_a_face_are_looked_for(bare_machine: Path, monkeypatch: pytest.MonkeyPatch, face: Face) -> None:
    face = replace(face, folders=(str(bare_machine / "headers"),))
    assert find_headers(face) is None
    release = bare_machine / "release"
    with pytest.raises(UserError, match=f"{face.option} .*release holds no {face.header}"):
        find_headers(face, release)
    put_headers(face, release / "include")
    assert find_headers(face, release) == release / "include"
    monkeypatch.setenv(face.variable, str(release / "include"))
    assert find_headers(face) == release / "include"
    monkeypatch.delenv(face.variable)
    put_headers(face, bare_machine / "headers")
    assert find_headers(face) == bare_machine / "headers"


def test_headers_of_a_tensorrt_without_aliased_plugins_are_not_used(tmp_path: Path) -> None:
    face = replace(TENSORRT, folders=(str(tmp_path / "headers"),))
    put_headers(face, tmp_path / "headers", "8", "6")
    assert find_headers(face) is None
    with pytest.raises(UserError, match="is of a TensorRT before 10.3"):
        find_headers(face, tmp_path / "headers")


def put_headers(face: Face, folder: Path, major: str = "10", minor: str = "14") -> None:
    folder.mkdir(parents=True)
    (folder / face.header).touch()
    text = f"#define NV_TENSORRT_MAJOR {major} //!< major\n#define NV_TENSORRT_MINOR {minor}\n"
    (folder / faces.VERSION_HEADER).write_text(text)


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ("cuda_fp16.h:45:10: fatal error: nv/target: No such file or directory", "pip install nvidia-cuda-cccl"),
        ("nvcc fatal   : Failed to preprocess host compiler properties.", "install g\\+\\+, or set NVCC_CCBIN"),
        ("#error -- unsupported GNU version! gcc versions later than 15", "set NVCC_CCBIN to an older one"),
    ],
)
def test_a_failure_of_the_compiler_that_is_known_comes_with_its_mend(said: str, mend: str, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\necho '{said}'\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(UserError, match=f"^a.cu does not compile: [^\n]*{mend}$"):
        build._run([compiler], "a.cu does not compile")
