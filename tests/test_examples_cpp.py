"""The hosts in C++: the same tokens as the Python runtime, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import ort_headers
import pytest
import tiny_artefact as tiny
import trt_headers
from debian import Unavailable
from engines import make_engine
from test_runtime_artefact import edit_model, read, rewrite, set_entry

from plugins.contract import HOST_INPUTS, LIVE_STEP, ROW_SYMBOLS, TensorSpec, capacity_for, state_sizes
from plugins.deltakv.config import DeltaKVConfig
from plugins.geometry import Geometry
from plugins.intkv.config import Int4Config
from plugins.native.build import cuda_include
from plugins.vqkv.config import VQKVConfig
from runtime import Engine, SamplingParams
from runtime.artefact import write_config
from runtime.sampling import Sampler

HERE = Path(__file__).parent
SOURCES = HERE.parent / "examples" / "cpp"
SANITIZED = ["-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
LIMIT = 600
GREEDY = SamplingParams(max_tokens=230)  # so many that the cache grows
DRAWN = SamplingParams(max_tokens=60, temperature=40.0, top_k=20, top_p=0.8, seed=2**33 + 5)

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("g++")), reason="there is no cmake or no g++: pip install cmake"
)


def tool(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def onnxruntime() -> tuple[Path, Path]:
    """The folder of ONNX Runtime's headers, and its library."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.submodule_search_locations
    library = next(Path(spec.submodule_search_locations[0], "capi").glob("libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("this build of onnxruntime has no libonnxruntime.so")
    try:
        return ort_headers.find(), library
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tensorrt() -> list[Path]:
    """The folders that hold TensorRT's headers and those of CUDA that they include."""
    cuda = cuda_include()
    if cuda is None:
        pytest.skip('there are no CUDA headers: pip install "kvpack[native]"')
    try:
        return [trt_headers.find(), Path(cuda)]
    except trt_headers.Unavailable as error:
        pytest.skip(str(error))


def configure(folder: Path, *definitions: str) -> None:
    flags = f"-DCMAKE_CXX_FLAGS={' '.join(SANITIZED)}"
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []  # with CMake from a wheel there may be no make
    tool("cmake", "-S", SOURCES, "-B", folder, *ninja, "-DCMAKE_BUILD_TYPE=None", flags, *definitions)


@pytest.fixture(scope="module")
def ort(onnxruntime: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvpack_ort, sanitized."""
    folder = tmp_path_factory.mktemp("ort")
    headers, library = onnxruntime
    configure(folder, f"-DONNXRUNTIME_INCLUDE_DIR={headers}", f"-DONNXRUNTIME_LIBRARY={library}")
    tool("cmake", "--build", folder, "--target", "kvpack_ort")
    return folder / "kvpack_ort"


@pytest.fixture(scope="module")
def trt(
    tensorrt: list[Path], onnxruntime: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str | Path]]:
    """kvpack_trt, sanitized, with TensorRT and CUDA's driver faked: its command line."""
    folder = tmp_path_factory.mktemp("trt")
    configure(folder, f"-DTENSORRT_INCLUDE_DIR={tensorrt[0]}", f"-DCUDA_INCLUDE_DIR={tensorrt[1]}")
    tool("cmake", "--build", folder, "--target", "kvpack_trt")
    (folder / "fake_nvinfer_stubs.h").write_text(stubs(tensorrt[0]))
    headers, library = onnxruntime
    (folder / "libonnxruntime.so.1").symlink_to(library)
    includes = [f"-I{folder}", *(flag for path in (*tensorrt, headers) for flag in ("-isystem", path))]
    fake = folder / "libcuda.so.1"
    link = [folder / "libonnxruntime.so.1", f"-Wl,-rpath,{folder}", "-o", fake]
    tool("g++", "-std=c++17", "-w", *SANITIZED, "-shared", "-fPIC", *includes, HERE / "fake_nvinfer.cc", *link)
    return [folder / "kvpack_trt", "--tensorrt", fake]


def stubs(headers: Path) -> str:
    """Classes in which every function of an interface that its heir does not override ends the program."""
    places = {
        "Runtime": ("NvInferImpl.h", "apiv::VRuntime"),
        "CudaEngine": ("NvInferImpl.h", "apiv::VCudaEngine"),
        "ExecutionContext": ("NvInferImpl.h", "apiv::VExecutionContext"),
        "PluginRegistry": ("NvInferRuntimeCommon.h", "IPluginRegistry"),
    }
    text = ['#include "NvInferRuntime.h"', "#include <cstdlib>", "namespace nvinfer1 {"]
    for name, (file, base) in places.items():
        header = re.sub(r"//[^\n]*|/\*.*?\*/|#if .*?#endif|TRT_\w+", "", (headers / file).read_text(), flags=re.S)
        body = re.search(rf"class {base.split('::')[-1]}\b[^;{{]*{{(.*?)^}};", header, re.S | re.M)
        assert body is not None, base
        methods = re.findall(r"virtual\s+([^;{}()]+?\w+\([^;{}]*?\)[^;{}]*?)=\s*0;", body[1])
        assert len(methods) > 5, base
        text += [
            f"struct Stub{name} : {base} {{",
            *(f"  {one.strip()} override {{ std::abort(); }}" for one in methods),
            "};",
        ]
    return "\n".join([*text, "}", ""])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Runs tests/host_driver.cc: a command, and what is on stdin."""
    program = tmp_path_factory.mktemp("driver") / "driver"
    tool("g++", "-std=c++17", *WARNINGS, *SANITIZED, f"-I{SOURCES}", HERE / "host_driver.cc", "-o", program)

    def run(command: str, text: str | bytes) -> str:
        given = text.encode() if isinstance(text, str) else text
        done = subprocess.run([program, command], input=given, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    return run


def host(
    command: Sequence[str | Path], folder: Path, prompts: Sequence[Sequence[int]], params: SamplingParams, *more: str
) -> tuple[dict[str, Any], str]:
    """What a host prints with --json, and on stderr."""
    line = [*command, "--engine", folder, "--json", *more]
    for prompt in prompts:
        line += ["--tokens", ",".join(map(str, prompt))]
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        if getattr(params, name) is not None:
            line += [f"--{name.replace('_', '-')}", str(getattr(params, name))]
    done = started(line)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def started(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    fakes = str(Path(command[0]).parent)
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": fakes}
    )


def refusal(command: Sequence[str | Path]) -> str:
    done = started(command)
    said = re.sub(r"^fake: .*\n", "", done.stderr)
    assert done.returncode == 2 and done.stdout == "" and re.fullmatch(r"error: [^\n]*\.\n", said), done.stderr
    return said


def prompts(vocabulary: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


# -- the header beside its counterpart in Python


def test_sha256(driver: Callable[..., str]) -> None:
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 100_000):
        content = random.Random(size).randbytes(size)
        assert driver("sha256", content) == hashlib.sha256(content).hexdigest()


def test_canonical_json(driver: Callable[..., str]) -> None:
    rng = random.Random(1)

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth < 4 else 6)
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {text(): value(depth + 1) for _ in range(rng.randrange(4))}
        return (None, True, False, rng.randrange(-(2**60), 2**60), rng.gauss(0, 1e-6), text())[kind]

    def text() -> str:
        return "".join(rng.choice('a"\\/\n\t\x01\x7fäß€\ud7ff\ue000𝄞') for _ in range(rng.randrange(6)))

    values = [value(0) for _ in range(300)]
    lines = [json.dumps(one, ensure_ascii=rng.random() < 0.5) for one in values]
    expected = [json.dumps(one, sort_keys=True, separators=(",", ":")) for one in values]
    assert driver("json", "\n".join(lines)).splitlines() == expected
    bad = [
        "",
        "{",
        '{"a":1,"a":2}',
        "[1,]",
        "01",
        "1.",
        "nul",
        '"\\ud800"',
        '"\\x"',
        '"a',
        "[]x",
        "NaN",
        "-",
        "[" * 300,
    ]
    assert all(line.startswith("error: ") for line in driver("json", "\n".join(bad)).splitlines())
    assert driver("json", b'"\xff"\n"\xed\xa0\x80"\n"\xc0\x80"').count("not UTF-8") == 3


def test_steps_of_random_lengths(driver: Callable[..., str]) -> None:
    rng = np.random.default_rng(0)
    lines, expected = [], []
    for _ in range(400):
        sinks, window, block, stride, count = (int(n) for n in rng.integers((0, 1, 1, 0, 0), (6, 40, 20, 12, 60)))
        fraction = float(rng.integers(0, 100)) / 100
        geometry = Geometry(sinks, window, block, stride, fraction, count if rng.random() < 0.3 else 0)
        batch, single = int(rng.integers(1, 5)), rng.random() < 0.5
        past = rng.integers(0, 700, batch) * (rng.random() < 0.8)
        new = rng.integers(0, 2 if single else 90, batch)
        new[0] = max(new[0], 1)
        current = capacity_for(int(past.max()), 900)
        capacity = capacity_for(int((past + new).max()), 900, current)
        padded = 1 if rng.random() < 0.7 else 16
        width = max(padded, int(new.max()))
        given = (*dataclasses.astuple(geometry), 900, current, padded, batch, *past, *new)
        lines.append(" ".join(map(str, given)))

        sizes = state_sizes(capacity, geometry)
        live = min(-(-int(past.max()) // LIVE_STEP) * LIVE_STEP, capacity)
        source, target = geometry.schedule(past, new, sizes["code_rows"] - 1)
        read, room = geometry.selection(past, live, width == 1)
        tokens = np.zeros((batch, width), int)
        for b in range(batch):
            tokens[b, : new[b]] = b + 1
        expected += [
            ("sizes", [capacity, *(sizes[symbol] for symbol in ROW_SYMBOLS)]),
            ("tokens", tokens), ("logit_index", np.maximum(new - 1, 0)), ("past_len", past), ("new_len", new),
            ("live", live), ("enc_src", source), ("enc_dst", target), ("select_len", read), ("select_width", room),
        ]  # fmt: skip
    found = driver("steps", "\n".join(lines)).splitlines()
    assert found == [" ".join([name, *map(str, np.ravel(values))]) for name, values in expected]


def test_numbers_of_numpys_generator_and_sums_in_its_order(driver: Callable[..., str]) -> None:
    pairs = [(0, 0), (1, 0), (2**32, 7), (2**64 - 1, 2**32 - 1), (123456789012345, 3)]
    found = driver("uniform", "\n".join(f"{seed} {index}" for seed, index in pairs)).splitlines()
    expected = [np.random.default_rng([seed, index]).random(5) for seed, index in pairs]
    assert [[float.fromhex(number) for number in line.split()] for line in found] == [list(row) for row in expected]
    rng = np.random.default_rng(2)
    for size in (1, 7, 8, 100, 128, 129, 1000, 5003):
        values = rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9, size)
        assert float.fromhex(driver("sum", " ".join(map(repr, values.tolist())))) == values.sum()


def test_draws_from_given_logits(driver: Callable[..., str]) -> None:
    rng = np.random.default_rng(3)
    lines, expected = [], []
    for number in range(60):
        size = int(rng.integers(1, 400))
        logits = (rng.standard_normal(size) * 3).astype(np.float32)
        if number % 3 == 0:
            logits = np.round(logits)  # ties
        temperature = float(rng.choice([0, 0.3, 1.0, 4.0]))
        params = SamplingParams(
            None, temperature, int(rng.integers(0, 20)), float(rng.choice([0.2, 0.7, 0.95, 1])), number
        )
        sampler = Sampler(params, number % 4)
        expected.append([sampler(logits) for _ in range(20)])
        head = (params.temperature, params.top_k, params.top_p, number, number % 4, 20, size)
        lines.append(" ".join(map(repr, (*head, *map(float, logits)))))
    found = driver("draws", "\n".join(lines)).splitlines()
    assert [list(map(int, line.split())) for line in found] == expected
    for logits in ("nan 1", "1 nan", "inf 1", "-inf -inf"):
        assert "are not numbers" in driver("draws", f"1 0 0.9 0 0 1 2 {logits}")
    assert driver("draws", "0 0 1 0 0 1 3 1 nan 2\n1 0 0.9 0 0 2 2 -inf 1").split() == ["1", "1", "1"]


@pytest.mark.parametrize("geometry", [None, tiny.SMALL], ids=["append-only", "ring"])
def test_sessions_after_a_failed_step(driver: Callable[..., str], tmp_path: Path, geometry: Geometry | None) -> None:
    folder = tiny.make(tmp_path / "e", geometry=geometry, max_length=64)
    failed, after = ("reset the session.", "this session lost its cache in a failed step: reset it.")
    if geometry is None:
        failed, after = "the session is as before.", "32"
    assert driver("sessions", str(folder)).splitlines() == [
        *["3"] * 3, "3 places", "widths 3 3 2 1 1", "30",
        "sequence 0 holds 30 tokens and 35 more exceed the engine's limit of 64: shorten the prompt or export with a "
        "larger --max-length.",
        f"appending 2 tokens to 30 failed (told to): {failed}", after, "2",
    ]  # fmt: skip


def test_the_readmes_code_compiles(tmp_path: Path) -> None:
    (code,) = re.findall(r"```cpp\n(.*?)```", (SOURCES / "README.md").read_text(), re.S)
    (tmp_path / "reply.cc").write_text(code)
    tool("g++", "-std=c++17", *WARNINGS, "-fsyntax-only", f"-I{SOURCES}", tmp_path / "reply.cc")


# -- kvpack_ort


@pytest.mark.parametrize("geometry", [None, tiny.SMALL, tiny.SELECTING], ids=["dense", "coded", "selecting"])
def test_the_host_says_what_the_python_runtime_says(ort: Path, tmp_path: Path, geometry: Geometry | None) -> None:
    folder = tiny.make(tmp_path / "e", geometry=geometry, max_length=LIMIT)
    batch = prompts(tiny.VOCAB, 1, 37, 300)
    with Engine.open(folder, threads=1) as engine:
        for params in (GREEDY, DRAWN, SamplingParams(max_tokens=30, temperature=90.0, seed=0)):
            expected = engine.generate(batch, params)
            for more in ((), ("--chunk", "7")):
                found, _ = host([ort], folder, batch, params, "--threads", "1", *more)
                for one, two in zip(found["sequences"], expected, strict=True):
                    assert one == {
                        "tokens": two.tokens, "prompt_tokens": two.prompt_tokens, "finish": two.finish_reason,
                        "text": two.text,
                    }  # fmt: skip
                assert found["cache_bytes"] == sum(one.cache_bytes for one in expected)
                assert found["tokens"] == sum(len(one.tokens) for one in expected)


METHODS = {
    "none": None,
    "vqkv": VQKVConfig.from_ratio(0.172, 32, window=16, block=8),
    "deltakv": DeltaKVConfig(32, 2, "32x4", full_layers=(0,), select_fraction=0.3, stride=7, window=16, block=8),
    "int4": Int4Config(32, window=16, block=8),
}


@pytest.mark.parametrize("method", METHODS)
def test_engines_of_every_method(ort: Path, tmp_path: Path, method: str) -> None:
    folder = tmp_path / "e"
    model, _ = make_engine(folder, "llama", METHODS[method], {"kv_dtype": "fp16"}, num_hidden_layers=2)
    batch = prompts(model.config.vocab_size, 290, 3)
    with Engine.open(
        folder, threads=1
    ) as engine:  # several blocks are encoded, and more than the first 512 rows needed
        for params in (
            SamplingParams(max_tokens=230),
            SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=4),
        ):
            expected = engine.generate(batch, params)
            found, _ = host([ort], folder, batch, params, "--threads", "1")
            assert [one["tokens"] for one in found["sequences"]] == [one.tokens for one in expected]
            assert found["cache_bytes"] == sum(one.cache_bytes for one in expected)


def test_prompts_come_from_files_and_text_goes_out(ort: Path, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e", geometry=tiny.SMALL)
    batch = prompts(tiny.VOCAB, 5, 9)
    file = tmp_path / "prompts"
    file.write_text("\n".join(" ".join(map(str, prompt)) for prompt in batch) + "\n")
    with Engine.open(folder, threads=1) as engine:
        expected = engine.generate(batch, SamplingParams(max_tokens=12))
    command = [ort, "--engine", folder, "--max-tokens", "12"]
    ids = [",".join(map(str, one.tokens)) + "\n" for one in expected]
    assert started([*command, "--prompt-file", file]).stdout == "".join(ids)
    texts = [f"--- {number}\n{one.text}\n" for number, one in enumerate(expected, 1)]
    assert started([*command, "--prompt-file", file, "--text"]).stdout == "".join(texts)
    file.write_text(", ".join(map(str, batch[0])))
    streamed = started([*command, "--tokens", file])
    assert streamed.stdout == ids[0] and "12 tokens in " in streamed.stderr
    assert started([*command, "--tokens", file, "--text"]).stdout == expected[0].text + "\n"


def test_characters_of_several_tokens_stay_whole(ort: Path, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e")
    with Engine.open(folder, threads=1) as engine:
        params = SamplingParams(max_tokens=200, temperature=1e7, seed=1, ignore_eos=True)  # any byte at all
        expected = engine.generate(prompts(tiny.VOCAB, 3, 4), params)
        assert any("\ufffd" in one.text for one in expected)
        found, _ = host([ort], folder, prompts(tiny.VOCAB, 3, 4), params, "--ignore-eos")
        for one, two in zip(found["sequences"], expected, strict=True):
            assert one["tokens"] == two.tokens and one["text"] == engine.text.decode(two.tokens)


def test_end_of_sequence_ends_a_sequence_and_the_limit_all(ort: Path, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e", geometry=tiny.SMALL, max_length=64)
    batch = prompts(tiny.VOCAB, 4, 60)
    with Engine.open(folder, threads=1) as engine:
        ending = engine.generate(batch, SamplingParams())[0].tokens[7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ending, 2]}))
    write_config(folder, read(folder))
    with Engine.open(folder, threads=1) as engine:
        for flag, params in (((), SamplingParams()), (("--ignore-eos",), SamplingParams(ignore_eos=True))):
            expected = engine.generate(batch, params)
            found, _ = host([ort], folder, batch, params, *flag)
            assert [one["tokens"] for one in found["sequences"]] == [one.tokens for one in expected]
            assert [one["finish"] for one in found["sequences"]] == [one.finish_reason for one in expected]


def damaged(folder: Path, name: str, damage: str) -> None:
    file = folder / name
    if damage == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "link":
        file.rename(folder.parent / name)
        file.symlink_to(folder.parent / name)
    elif damage == "hard link":
        os.link(file, folder.parent / name)
    else:
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("flipped", "is damaged"), ("short", "bytes, not"), ("gone", "is missing"), ("link", "symbolic link"),
        ("hard link", "hard links"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(ort: Path, tmp_path: Path, damage: str, complaint: str) -> None:
    folder = tiny.make(tmp_path / "e", geometry=tiny.SMALL)
    damaged(folder, "model.onnx.data", damage)
    sentence = refusal([ort, "--engine", folder, "--tokens", "1"])
    assert complaint in sentence and str(folder / "model.onnx.data") in sentence


def _state(config: dict[str, Any], side: str = "inputs") -> dict[str, Any]:
    return next(spec for spec in config[side] if spec["role"] == "state")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.update(format=1), "has format 1 and this host reads format 2"),
        (lambda c: c.update(format=2.0), "has format 2.0"),
        (lambda c: c.update(surprise=1), "unknown key 'surprise'"),
        (lambda c: c.pop("geometry"), "lacks the key 'geometry'"),
        (lambda c: c["files"].clear(), "lists no files"),
        (lambda c: c["files"].update({"../x": {"sha256": "0", "bytes": 1}}), "not a plain file name"),
        (lambda c: c["files"].pop("tokenizer.json"), "tokenizer.json is not listed"),
        (lambda c: c["files"]["model.onnx"].pop("bytes"), "no size and SHA-256"),
        (lambda c: c["limits"].update(max_length=0), "out of range"),
        (lambda c: c["limits"].update(max_length="8"), "an integer must be"),
        (lambda c: c.update(fixed_bytes=-1), "out of range"),
        (lambda c: c.update(nodes=[{"op": "x"}]), "'attributes' is missing"),
        (
            lambda c: c["outputs"].append(c["outputs"][0] | {"name": "layer0.selected", "role": "selected"}),
            "must be int32",
        ),
        (lambda c: c["geometry"].update(block=0), "out of range"),
        (lambda c: c["geometry"].update(colour=0), "unknown key 'colour'"),
        (lambda c: c.update(geometry=None), "and a geometry must come together"),
        (lambda c: _state(c).update(alias=None), "has no output of its own to alias"),
        (lambda c: _state(c).update(alias="codes_out"), "differ in dtype or shape"),
        (lambda c: _state(c, "outputs").update(dtype="float32"), "differ in dtype or shape"),
        (lambda c: _state(c)["shape"].__setitem__(2, "pages"), "no session can allocate"),
        (lambda c: _state(c)["shape"].__setitem__(2, -1), "no session can allocate"),
        (lambda c: [_state(c, side)["shape"].__setitem__(2, 2**31 - 1) for side in ("inputs", "outputs")], "disagree"),
        (lambda c: c["inputs"].pop(0), "no input has the role 'tokens'"),
        (lambda c: c["inputs"][1].update(role="magic"), "role 'magic' is unknown"),
        (lambda c: c["inputs"][1].update(dtype="int64"), "must be int32"),
        (lambda c: c["inputs"].append(c["inputs"][0]), "the same name"),
        (lambda c: c["outputs"].pop(0), "one output 'logits'"),
        (lambda c: c["outputs"][0].update(shape=["batch", "picks", 5]), "the logits are not"),
        (lambda c: c["outputs"].pop(1), "no output of its own to alias"),
        (lambda c: c["target"].update(backend="tensorrt"), "is an engine for 'tensorrt', not for ONNX Runtime"),
        (lambda c: c.update(dtype="bf16"), "cannot do on a CPU"),
    ],
)
def test_a_wrong_configuration_is_refused(
    ort: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    folder = tiny.make(tmp_path / "e", geometry=tiny.SMALL)
    rewrite(folder, change)
    assert complaint in refusal([ort, "--engine", folder, "--tokens", "1"])


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("location", "../secret.bin", "'../secret.bin', which is no file of the engine"),
        ("offset", "999999999", "beyond the end of 'model.onnx.data'"),
        ("offset", "-8", "beyond the end of 'model.onnx.data'"),
        ("offset", "x", "is not an ONNX model"),
    ],
)
def test_weights_may_only_come_from_inside_the_engine(
    ort: Path, tmp_path: Path, key: str, value: str, complaint: str
) -> None:
    folder = tiny.make(tmp_path / "e")
    edit_model(folder, lambda tensor: set_entry(tensor, key, value))
    assert complaint in refusal([ort, "--engine", folder, "--tokens", "1"])
    (folder / "model.onnx").write_bytes(b"\x3a\x7f no model")
    write_config(folder, read(folder))
    assert "model.onnx is not an ONNX model" in refusal([ort, "--engine", folder, "--tokens", "1"])


def test_what_is_no_configuration_is_refused(ort: Path, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e")
    command = [ort, "--engine", folder, "--tokens", "1"]
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": ', '"vocab_size": 1'))
    assert "was changed after the build" in refusal(command)
    for text, complaint in (("[", "is not valid JSON"), ("[]", "does not hold a JSON object"), ("{}", "has no format")):
        (folder / "config.json").write_text(text)
        assert complaint in refusal(command)
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(command)
    assert "is not an engine folder" in refusal([ort, "--engine", tmp_path / "nowhere", "--tokens", "1"])


def test_hashes_are_skipped_only_when_asked(ort: Path, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "e")
    damaged(folder, "chat_template.jinja", "flipped")
    command = [ort, "--engine", folder, "--tokens", "1", "--max-tokens", "1"]
    assert "is damaged" in refusal(command)
    assert started([*command, "--no-verify"]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--tokens", "1," * 65), "65 more exceed the engine's limit of 64"),
        (("--tokens", str(tiny.VOCAB)), f"token {tiny.VOCAB} of sequence 0 is outside the vocabulary"),
        (("--tokens", "1", "--tokens", ""), "prompt 1 is empty"),
        (("--tokens", ""), "the prompt is empty"),
        ((), "there is no prompt"),
        (("--tokens", "1", "--max-tokens", "0"), "max_tokens is 0"),
        (("--tokens", "1", "--top-p", "0"), "top_p is 0"),
        (("--tokens", "1", "--temperature", "nan"), "temperature is nan"),
        (("--tokens", "1", "--seed", "-1"), "--seed -1: give a number"),
        (("--tokens", "1", "--chunk", "0"), "--chunk 0: use at least 1"),
        (("--tokens", "1", "--threads", "x"), "--threads x: give a number"),
        (("--tokens", "nowhere"), "the file nowhere cannot be read"),
        (("--tokens", "1", "--colour", "x"), "the option --colour is unknown"),
        (("--tokens",), "--tokens needs a value"),
        (("--tokens", "1", "--library", "x.so"), "run on CUDA only"),
        (("--tokens", "1", "--provider", "tpu"), "unknown provider 'tpu'"),
    ],
)
def test_bad_arguments_are_refused(ort: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    folder = tiny.make(tmp_path / "e", max_length=64)
    assert complaint in refusal([ort, "--engine", folder, *arguments])


# -- kvpack_trt, where TensorRT and the GPU are fakes over ONNX Runtime

PROFILES = {
    "decode": ([1, 1, 1], [1, 1, 4]),
    "prefill-16": ([2, 16, 16], [1, 1, 4]),
    "prefill-64": ([20, 64, 64], [1, 1, 4]),
}


def planned(folder: Path, *, in_place: bool = True, plugins: bool = True, **target: Any) -> None:
    """Turn an engine for ONNX Runtime into one for the fake TensorRT."""
    model = onnx.load(folder / "model.onnx")
    for name in ("model.onnx", "model.onnx.data"):
        (folder / name).unlink()
    head = ";".join(f"{tokens[0]} {tokens[2]} {batch[2]}" for tokens, batch in PROFILES.values())
    head = ("host " if plugins else "device ") + head
    (folder / "engine.plan").write_bytes(head.encode() + b"\n" + model.SerializeToString())
    if plugins:
        (folder / "libkvpack_tensorrt.so").write_text("no library at all")
    config = read(folder)
    if all(entry["role"] != "live" for entry in config["inputs"]):  # nothing reads it, so that the plan has none
        config["inputs"].append(TensorSpec("live", "live", *HOST_INPUTS["live"]).to_json())
    config["target"] = {
        "backend": "tensorrt" if plugins else "tensorrt-rtx", "versions": {}, "sm": ["8.9"], "plan": "engine.plan",
        "plugins": "libkvpack_tensorrt.so" if plugins else None, "in_place": in_place,
        "profiles": [{"name": name, "tokens": tokens, "batch": batch} for name, (tokens, batch) in PROFILES.items()],
    } | target  # fmt: skip
    write_config(folder, config)


@pytest.mark.parametrize("geometry", [None, tiny.SMALL, tiny.SELECTING], ids=["dense", "coded", "selecting"])
@pytest.mark.parametrize("kind", ["in place", "two buffers", "graphs"])
def test_the_tensorrt_host_says_the_same(
    trt: list[str | Path], tmp_path: Path, geometry: Geometry | None, kind: str
) -> None:
    folder = tiny.make(tmp_path / "e", geometry=geometry, max_length=LIMIT)
    batch = prompts(tiny.VOCAB, 1, 37, 5 * 64 + 18)  # no profile takes the 18 as they are
    with Engine.open(folder, threads=1) as engine:
        expected = engine.generate(batch, GREEDY), engine.generate(batch, DRAWN)
    planned(folder, in_place=kind != "two buffers", plugins=kind != "two buffers")
    more = ("--cuda-graphs",) if kind == "graphs" else ()
    for params, wanted in zip((GREEDY, DRAWN), expected, strict=True):
        found, said = host(trt, folder, batch, params, *more)
        assert [one["tokens"] for one in found["sequences"]] == [one.tokens for one in wanted]
        replays, libraries = map(int, re.findall(r"fake: (\d+) replays, (\d+) plugin", said)[0])
        assert (replays > 20) == (kind == "graphs") and libraries == (kind != "two buffers")
        assert found["cache_bytes"] == sum(one.cache_bytes for one in wanted) * (2 if kind == "two buffers" else 1)


def test_what_the_tensorrt_host_refuses(trt: list[str | Path], tmp_path: Path) -> None:
    def sentence(folder: Path, *more: str) -> str:
        return refusal([*trt, "--engine", folder, "--tokens", "1,2,3", "--max-tokens", "2", *more])

    folder = tiny.make(tmp_path / "e")
    assert "is an engine for 'onnxruntime', not for TensorRT" in sentence(folder)
    planned(folder)
    assert "cannot be loaded" in sentence(folder, "--tensorrt", "libnowhere.so")
    assert "takes 1 to 4 sequences at once, not 5" in sentence(folder, *("--tokens", "1,2,3") * 4)
    damaged(folder, "libkvpack_tensorrt.so", "flipped")
    assert "libkvpack_tensorrt.so is damaged" in sentence(folder)
    profile = {"name": "decode", "tokens": [1, 1], "batch": [1, 1, 1]}
    for number, (target, complaint) in enumerate(
        [
            ({"plan": "../engine.plan"}, "../engine.plan is no file of the engine"),
            ({"plan": None}, "the target is malformed"),
            ({"profiles": []}, "there is no profile"),
            ({"weights": "plan.onnx"}, "build the engine without --strip-weights"),
            ({"in_place": 1}, "true or false must be"),
            ({"profiles": [profile]}, "has not three sizes"),
            ({"profiles": [profile | {"tokens": [2, 1, 1]}]}, "has an empty range"),
            ({"profiles": [profile | {"tokens": [1, 1, 1]}]}, "disagree about the profiles"),
            ({"plan": "tokenizer.json"}, "disagree|cannot load"),
        ]
    ):
        folder = tiny.make(tmp_path / str(number))
        planned(folder, **target)
        assert re.search(complaint, sentence(folder)), target
    folder = tiny.make(tmp_path / "rtx")
    planned(folder, plugins=False, in_place=False)
    assert "--cuda-graphs needs a plan with kvpack's plugins" in sentence(folder, "--cuda-graphs")
    folder = tiny.make(tmp_path / "large", ballast=1 << 17)
    planned(folder)
    assert "there is no memory for a cache of 1024 tokens x 1 sequences" in refusal(
        [*trt, "--engine", folder, "--tokens", "1," * 900, "--max-tokens", "2"]
    )
