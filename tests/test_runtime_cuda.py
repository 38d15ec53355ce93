"""What a session does on CUDA, on a machine without: device memory faked by the host's, captures by plain runs."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_artefact as tiny
from tiny_artefact import decode_all, prompt

from plugins.contract import TensorSpec, state_sizes
from plugins.errors import UserError
from plugins.geometry import Geometry
from runtime import onnxruntime as backends
from runtime.artefact import Artefact, write_config
from runtime.device import Device
from runtime.engine import Engine
from runtime.onnxruntime import NOT_CAPTURED, OPTION, OnnxRuntime
from runtime.replay import CAPTURE_AFTER, Numbers, room
from runtime.session import StepFailed
from runtime.state import State

LIMIT = 1500
KINDS = {"dense": None, "coded": tiny.SMALL, "with references": tiny.SELECTING}


class FakeMemory:
    """Host memory behind the interface of a device's; `left` bytes of it. Fresh memory is full of NaN."""

    provider = "cpu"

    def __init__(self, left: int = 1 << 40) -> None:
        self.left = left
        self.held: dict[int, np.ndarray] = {}

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.left:
            raise MemoryError
        block = np.full(nbytes + 1, 255, np.uint8)
        self.held[block.ctypes.data] = block
        self.left -= nbytes
        return block.ctypes.data

    def free(self, address: int) -> None:
        self.left += self.held.pop(address).size - 1

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def finish(self) -> None:
        pass

    def staging(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def free_bytes(self) -> int:
        return self.left


class Graphs:
    """An InferenceSession that notes the graph number of each run and replays as CUDA graphs do: the buffers bound when
    a number was captured. Like ONNX Runtime's it runs a step more than once to capture it."""

    def __init__(self, inference: Any) -> None:
        self.inference = inference
        self.numbers: list[int] = []
        self.captured: dict[int, Any] = {}
        self.refuses = False

    def io_binding(self) -> Any:
        return self.inference.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        number = int(options.get_run_config_entry(OPTION))
        self.numbers.append(number)
        if number == NOT_CAPTURED:
            return self.inference.run_with_iobinding(binding, options)
        if number not in self.captured:
            for _ in range(2):
                self.inference.run_with_iobinding(binding, options)
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.captured[number] = binding
        return self.inference.run_with_iobinding(self.captured[number], options)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("e"), geometry=KINDS[request.param], max_length=LIMIT)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.open(folder, threads=1) as opened:
        reload = opened.backend.inference
        graphs = Graphs(opened.backend.inference)
        backend = OnnxRuntime(
            opened.artefact,
            graphs,
            "cuda",
            kernels="native kernels, CUDA graphs",
            memory=FakeMemory(),
            graphs=Numbers(),
            reload=lambda: reload,
        )
        with Engine(opened.artefact, backend) as faked:
            yield faked


def test_captured_steps_give_the_logits_of_the_reference_across_blocks_and_growth(engine: Engine) -> None:
    tokens = prompt(330)
    with engine.session() as session:
        session.prefill(tokens[:20])
        decode_all(session, tokens, 20)
    numbers = engine.backend.inference.numbers
    assert numbers[: 1 + CAPTURE_AFTER] == [NOT_CAPTURED] * (1 + CAPTURE_AFTER)  # the prompt, and the first steps
    kinds = 1 if engine.artefact.geometry is None else 2  # with nothing to encode and with a block
    assert len(engine.backend.inference.captured) >= 2 * kinds  # before the cache grew and after
    assert sum(number == NOT_CAPTURED for number in numbers) <= 1 + 2 * CAPTURE_AFTER * (len(set(numbers)) - 1)
    assert engine.backend.graphs.used == len(engine.backend.inference.captured)


def test_sequences_of_a_batch_share_a_captured_step_at_their_own_lengths(engine: Engine) -> None:
    rows = [prompt(60, seed=1), prompt(45, seed=2), prompt(90, seed=3)]
    starts = [30, 15, 60]
    with engine.session(batch=3) as session:
        session.prefill([row[:start] for row, start in zip(rows, starts, strict=True)])
        for step in range(30):
            got = session.decode([row[start + step] for row, start in zip(rows, starts, strict=True)])
            for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
                np.testing.assert_array_equal(got[b], tiny.reference(row[: start + step + 1])[-1])
    assert engine.backend.inference.captured


def test_a_capture_that_fails_ends_all_captures_and_loses_nothing(engine: Engine, caplog) -> None:
    tokens = prompt(60)
    engine.backend.inference.refuses = True
    broken = engine.backend.inference
    with engine.session() as session, engine.session() as other, caplog.at_level(logging.WARNING, "kvpack"):
        other.prefill(tokens[:30])
        session.prefill(tokens[:20])
        broken_from = engine.backend.loads
        # the fake's replacement takes no run options of captures: it is the plain session
        decode_all(session, tokens, 20)
        assert engine.backend.inference is not broken and engine.backend.loads == broken_from + 1
        decode_all(other, tokens, 30)
    assert engine.backend.graphs is None and "not permitted when stream is capturing" in engine.kernels
    assert "without CUDA graphs" in caplog.text


def test_an_engine_runs_out_of_graph_numbers_and_goes_on(engine: Engine) -> None:
    engine.backend.graphs.limit = 1
    tokens = prompt(80)
    with engine.session() as session, engine.session() as other:
        for each in (session, other):
            each.prefill(tokens[:20])
            decode_all(each, tokens, 20)
    assert len(engine.backend.inference.captured) == 1 and engine.backend.graphs.used == 1


def test_a_failed_replay_is_a_failed_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(60)
    with engine.session() as session:
        session.prefill(tokens[:20])
        decode_all(session, tokens[:25], 20)
        before = session.snapshot()

        def fails(binding: Any, options: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        with monkeypatch.context() as patch, pytest.raises(StepFailed, match="illegal memory access"):
            patch.setattr(engine.backend.inference, "run_with_iobinding", fails)
            session.decode([1])
        session.restore(before)
        decode_all(session, tokens, 25)


def test_snapshots_and_forks_cross_between_the_host_and_a_device(engine: Engine, folder: Path) -> None:
    tokens = prompt(120)
    with Engine.open(folder, threads=1) as plain, plain.session() as host, engine.session() as device:
        device.prefill(tokens[:70])
        snapshot = device.snapshot()
        host.restore(snapshot)
        np.testing.assert_array_equal(host.prefill(tokens[70:])[0, -1], tiny.reference(tokens)[-1])
        with device.fork() as fork:
            decode_all(fork, tokens, 70)
        device.restore(host.snapshot())
        decode_all(device, [*tokens, *prompt(20, seed=9)], 120)
        for spec in engine.artefact.states:
            assert device.state(spec.name).shape == host.state(spec.name).shape or device.capacity != host.capacity


def test_memory_of_a_device_comes_back_when_sessions_grow_and_close(engine: Engine) -> None:
    whole = engine.memory.left
    with engine.session() as session:
        for start in range(0, 900, 100):
            session.prefill(prompt(100, seed=start))
            gc.collect()
            assert whole - engine.memory.left == session.nbytes
    gc.collect()
    assert engine.memory.left == whole and not engine.memory.held


def test_growth_without_room_leaves_the_session_as_it_was(engine: Engine) -> None:
    tokens = prompt(400)
    with engine.session() as session:
        session.prefill(tokens[:200])
        kept, engine.memory.left = engine.memory.left, 1000
        with pytest.raises(UserError, match="no memory for a cache"):
            session.prefill(tokens[200:])
        engine.memory.left = kept
        assert session.lengths.tolist() == [200] and not session.broken
        np.testing.assert_array_equal(session.prefill(tokens[200:])[0, -1], tiny.reference(tokens)[-1])


def test_a_device_that_has_less_memory_than_it_said_breaks_the_session_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(400)
    with engine.session() as session:
        session.prefill(tokens[:200])
        snapshot = session.snapshot()
        with monkeypatch.context() as patch, pytest.raises(UserError, match="no memory for a cache"):
            patch.setattr(engine.memory, "free_bytes", lambda: 1 << 40)
            patch.setattr(engine.memory, "left", 1000)
            session.prefill(tokens[200:])
        engine.memory.left = 1 << 40
        with pytest.raises(UserError, match="lost its cache"):
            session.prefill(tokens[200:])
        session.restore(snapshot)
        np.testing.assert_array_equal(session.prefill(tokens[200:])[0, -1], tiny.reference(tokens)[-1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "float32"])
@pytest.mark.parametrize("symbol", ["rows", "code_rows", 12])
def test_a_device_holds_what_the_host_holds(dtype: str, symbol: str | int) -> None:
    geometry = Geometry(sinks=2, window=5, block=4)
    spec = TensorSpec("s", "state", dtype, ("batch", 3, symbol, 5), "s_out")
    memory = FakeMemory()
    states = [State([spec], geometry, 2), State([spec], geometry, 2, memory)]
    for state in states:
        state.allocate(300)
        assert not state.array("s").any()
        state.fill(seed=4)
    assert states[0].array("s").dtype == states[1].array("s").dtype == spec.carrier
    for capacity, stored in ((900, 290), (700, 250), (701, 0)):
        for state in states:
            state.allocate(capacity, stored)
        np.testing.assert_array_equal(states[0].array("s"), states[1].array("s"))
        kept = [state.trimmed(stored)["s"] for state in states]
        np.testing.assert_array_equal(*kept)
        assert states[1].array("s").shape == spec.dims(state_sizes(capacity, geometry, 2))
    filled = states[0].array("s").size and symbol != 12
    states[1].load({"s": kept[0]}, 400, 0)
    assert states[1].capacity == 400 and (not filled or not states[1].array("s").any())


def test_synthetic_bfloat16_numbers_are_plausible() -> None:
    spec = TensorSpec("s", "state", "bfloat16", ("batch", 1, "rows", 64), "s_out")
    state = State([spec], None, 1)
    state.allocate(2000)
    state.fill()
    numbers = (state.array("s").astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(numbers).all() and abs(numbers.mean()) < 0.05 and abs(numbers.std() - 1) < 0.05


@pytest.mark.parametrize(
    ("count", "most", "wanted"),
    [
        (1, 1000, 32),
        (33, 1000, 64),
        (256, 1000, 256),
        (257, 5000, 320),
        (2048, 5000, 2048),
        (2049, 9000, 2560),
        (9, 5, 5),
    ],
)
def test_the_room_of_captured_selections_grows_in_few_steps(count: int, most: int, wanted: int) -> None:
    assert room(count, most) == wanted


def test_few_graphs_serve_a_selection_that_grows_with_the_context() -> None:
    rooms = {room(count, 1 << 20) for count in range(1, 22_000)}
    assert len(rooms) < 45 and all(room(count, 1 << 20) >= count for count in range(1, 22_000))


# -- the driver's functions, over a library that has the few that are used

DRIVER = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static int current, pinned, streams, capturing, graphs, launched;
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int number) { return *device = number + 7, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(0xabcd00000000 + device), 0; }
int cuCtxSetCurrent(void *context) { return current = 1, context == (void *)0xabcd00000007 ? 0 : 201; }
int cuMemAlloc_v2(uint64_t *address, size_t n) {
  if (n > 1 << 30) return 2;
  char *block = malloc(n);
  return memset(block, 255, n), *address = (uint64_t)block, !current;
}
int cuMemFree_v2(uint64_t address) { return free((void *)address), 0; }
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t n) { return memset((void *)address, value, n), 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { return memcpy((void *)to, from, n), 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { return memcpy(to, (void *)from, n), 0; }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t n) { return memcpy((void *)to, (void *)from, n), 0; }
int cuStreamSynchronize(void *stream) { return stream != 0 && (stream != (void *)64 || capturing); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return *value = attribute == 75 ? 12 : attribute == 76 ? 1 : -1, device != 7;
}
int cuStreamCreate(void **stream, unsigned flags) { return ++streams, *stream = (void *)64, flags != 1; }
int cuStreamDestroy_v2(void *stream) { return --streams, stream != (void *)64; }
int cuStreamBeginCapture_v2(void *stream, int mode) { return capturing = 1, stream != (void *)64 || mode != 1; }
int cuStreamEndCapture(void *stream, void **graph) {
  if (!capturing) return 901;
  return capturing = 0, ++graphs, *graph = (void *)65, stream != (void *)64;
}
int cuGraphInstantiateWithFlags(void **launchable, void *graph, unsigned long long flags) {
  return ++graphs, *launchable = (void *)66, graph != (void *)65 || flags;
}
int cuGraphDestroy(void *graph) { return --graphs, graph != (void *)65; }
int cuGraphExecDestroy(void *graph) { return --graphs, graph != (void *)66; }
int cuGraphLaunch(void *graph, void *stream) { return ++launched, graph != (void *)66 || stream != (void *)64; }
int cuMemHostAlloc(void **address, size_t n, unsigned flags) { return ++pinned, *address = malloc(n), flags != 1; }
int cuMemFreeHost(void *address) { return --pinned, free(address), 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = (size_t)5 << 32, *total = (size_t)9 << 32, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "no such luck", 0; }
int held(void) { return pinned; }
int count(int what) { return what == 0 ? streams : what == 1 ? graphs : launched; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "driver.c", "-o", folder / "libcuda.so"], check=True)
    return folder / "libcuda.so"


def test_a_state_lives_in_what_the_driver_allocates(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.device.LIBRARY", str(driver))
    memory, geometry = Device(), Geometry(sinks=2, window=5, block=4)
    specs = [
        TensorSpec("ring", "state", "bfloat16", ("batch", 3, 11, 5), "ring_out"),
        TensorSpec("codes", "state", "int8", ("batch", 3, "code_rows", 7), "codes_out"),
    ]
    states = [State(specs, geometry, 2), State(specs, geometry, 2, memory)]
    for state in states:
        state.allocate(100)
        assert not any(state.array(spec.name).any() for spec in specs)
        state.fill(seed=1)
        state.allocate(300, 90)
    for spec in specs:
        np.testing.assert_array_equal(states[0].array(spec.name), states[1].array(spec.name))
        np.testing.assert_array_equal(states[0].trimmed(50)[spec.name], states[1].trimmed(50)[spec.name])
    assert memory.free_bytes() == 5 << 32
    staging = memory.staging(1000)
    view = staging[10:20].view(np.int16)
    view[:] = 5
    held = ctypes.CDLL(str(driver)).held
    del staging
    gc.collect()
    assert held() == 1 and view.tolist() == [5] * 5
    del view
    gc.collect()
    assert held() == 0


def test_streams_and_captures_are_the_drivers(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.device.LIBRARY", str(driver))
    device, count = Device(), ctypes.CDLL(str(driver)).count
    assert device.capability() == "12.1" and device.total_bytes() == 9 << 32
    stream = device.stream()
    device.wait(stream)
    graph = device.capture(stream, lambda: None)
    device.launch(graph, stream)
    assert (count(0), count(1), count(2)) == (1, 1, 1)

    def fails() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        device.capture(stream, fails)
    device.wait(stream)  # no capture is left
    device.free_graph(graph)
    device.close_stream(stream)
    assert (count(0), count(1)) == (0, 0)


def test_what_the_driver_refuses_is_one_sentence(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.device.LIBRARY", str(driver))
    memory = Device()
    with pytest.raises(MemoryError):
        memory.allocate(2 << 30)
    memory._context.value = 5
    with pytest.raises(UserError, match=r"cuCtxSetCurrent: no such luck\): check nvidia-smi"):
        memory.allocate(10)
    monkeypatch.setattr("runtime.device.LIBRARY", "libnothing.so.1")
    with pytest.raises(UserError, match="install NVIDIA's driver, or use --provider cpu"):
        Device()


# -- which kernels an engine gets


def bf16(folder: Path, out: Path) -> Artefact:
    """The engine as if it were built for bf16."""
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = {k: v for k, v in Artefact.open(out).config.items() if k not in ("files", "digest")}
    write_config(out, config | {"dtype": "bf16", "kv_dtype": "bf16"})
    return Artefact.open(out)


def test_an_engine_in_bf16_says_that_it_needs_a_gpu(folder: Path, tmp_path: Path) -> None:
    bf16(folder, tmp_path)
    with pytest.raises(UserError, match="computes in bf16, which ONNX Runtime cannot do on a CPU: use --provider cuda"):
        Engine.open(tmp_path)


def test_a_library_without_cuda_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="run on CUDA only"):
        Engine.open(folder, library="x.so")


class Loads:
    """Stands in for `runtime.onnxruntime._load`: notes what was asked for, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chosen: tuple[Path | None, str], fails: bool = False) -> None:
        self.asked: list[tuple[Path | None, bool]] = []
        self.fails = fails
        monkeypatch.setattr(backends, "_load", self)
        monkeypatch.setattr("plugins.native.library.choose", lambda config, library: chosen)
        monkeypatch.setattr("runtime.device.device", FakeMemory)

    def __call__(self, artefact: Artefact, provider: str, threads: int | None, library: Any, graphs: bool) -> object:
        self.asked.append((library, graphs))
        if self.fails and graphs:
            raise UserError("not all nodes are on CUDA.")
        return object()


def test_an_engine_on_cuda_takes_native_kernels_and_captures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch, (Path("k.so"), ""))
    with Engine.open(folder, provider="cuda") as engine:
        assert engine.kernels == "native kernels, CUDA graphs" and engine.backend.graphs is not None
        assert loads.asked == [(Path("k.so"), True)]
    with Engine.open(folder, provider="cuda", cuda_graphs=False) as engine:
        assert engine.kernels == "native kernels" and engine.backend.graphs is None
        assert loads.asked[1:] == [(Path("k.so"), False)]


def test_without_a_library_the_function_bodies_run_and_the_engine_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    loads = Loads(monkeypatch, (None, "no native library was built"))
    with Engine.open(folder, provider="cuda") as engine:
        assert engine.kernels == "function bodies: no native library was built" and engine.backend.graphs is None
    assert loads.asked == [(None, False)] and "no native library was built" in caplog.text
    caplog.clear()
    with Engine.open(folder, provider="cuda", library=False):
        assert not caplog.text  # nobody has to be told what they asked for


def test_a_model_that_cannot_be_captured_is_loaded_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    loads = Loads(monkeypatch, (Path("k.so"), ""), fails=True)
    with Engine.open(folder, provider="cuda") as engine:
        assert engine.kernels == "native kernels" and engine.backend.graphs is None
    assert [graphs for _, graphs in loads.asked] == [True, False] and "not all nodes are on CUDA" in caplog.text


def test_specs_of_other_dtypes_are_told_by_their_carrier() -> None:
    spec = TensorSpec("s", "state", "bfloat16", ("batch", 4), "s_out")
    assert spec.nbytes({"batch": 3}) == 24 and spec.carrier == np.uint16
    assert replace(spec, dtype="int8").nbytes({"batch": 3}) == 12
