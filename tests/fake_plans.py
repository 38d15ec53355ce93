"""A `tensorrt` module and a GPU for machines without: plans hold ONNX graphs, device memory is the host's.

As strict as NVIDIA's documentation is, where a real one may do anything: work runs when its stream is waited for, at
the addresses given when it was launched; every buffer must be there, large enough and aligned; sizes must be within
the profile of a context; what was captured from a context is lost when that context is touched again; a capture stands
nothing but launches, and no launch whose shapes are new to its context.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from plugins.contract import CAPACITY_STEP, ONNX_TYPES, state_sizes
from runtime.artefact import Artefact, write_config

MAGIC = b"FAKE"
ALIGNMENT = 256
ON_HOST = ("live", "select_width")  # roles of shape inputs
DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int8": "INT8", "int32": "INT32", "int64": "INT64"}


# -- the GPU


class Gpu:
    """What `runtime.device.Streams` asks for; `left` bytes of memory, at first full of NaN."""

    provider = "cpu"

    def __init__(self, left: int = 1 << 40, capability: str = "8.9") -> None:
        self.left = left
        self._capability = capability
        self.held: dict[int, tuple[np.ndarray, int]] = {}  # on the device
        self.pinned: dict[int, tuple[weakref.ref, int]] = {}
        self.streams = 0
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.launched = 0
        self.refuses_captures = False

    def capability(self) -> str:
        return self._capability

    def allocate(self, nbytes: int) -> int:
        self._plain("an allocation")
        if nbytes > self.left:
            raise MemoryError("the GPU is out of memory")
        block = np.full(nbytes + ALIGNMENT, 255, np.uint8)
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.held[address] = block, nbytes
        self.left -= nbytes
        return address

    def free(self, address: int) -> None:
        assert not any(self.queues.values()), "memory was freed while work was under way"
        self.left += self.held.pop(address)[1]

    def zero(self, address: int, nbytes: int) -> None:
        self._plain("a memset")
        ctypes.memset(self.at(address, nbytes), 0, nbytes)

    def upload(self, address: int, array: np.ndarray) -> None:
        self._plain("a copy")
        assert array.flags.c_contiguous
        ctypes.memmove(self.at(address, array.nbytes), array.ctypes.data, array.nbytes)

    def download(self, address: int, array: np.ndarray) -> None:
        self._plain("a copy")
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, self.at(address, array.nbytes), array.nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._plain("a copy")
        ctypes.memmove(self.at(target, nbytes), self.at(source, nbytes), nbytes)

    def finish(self) -> None:
        self._plain("a wait")

    def staging(self, nbytes: int) -> np.ndarray:
        block = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        array = block[start : start + nbytes]
        self.pinned[array.ctypes.data] = weakref.ref(block), nbytes
        return array

    def free_bytes(self) -> int:
        return self.left

    def total_bytes(self) -> int:
        return self.left + sum(size for _, size in self.held.values())

    def stream(self) -> int:
        self.streams += 1
        self.queues[self.streams] = []
        return self.streams

    def close_stream(self, stream: int) -> None:
        del self.queues[stream]

    def wait(self, stream: int) -> None:
        self._plain("a wait")
        queue = self.queues[stream]
        while queue:
            queue.pop(0)()

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        (self.queues[stream] if self.capturing is None else self.capturing).append(work)

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        self._plain("a capture")
        assert not self.queues[stream], "work of before the capture has not ended"
        self.capturing = []
        try:
            work()
            if self.refuses_captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.graphs[len(self.graphs) + 1] = self.capturing
            return len(self.graphs)
        finally:
            self.capturing = None

    def launch(self, graph: int, stream: int) -> None:
        self._plain("a launch of a graph")
        self.launched += 1
        self.queues[stream] += self.graphs[graph]

    def free_graph(self, graph: int) -> None:
        self.graphs[graph] = []

    def at(self, address: int, nbytes: int) -> int:
        """`address`, if so many bytes are allocated there on the device."""
        starts = sorted(self.held)
        place = bisect_right(starts, address) - 1
        assert place >= 0 and address + nbytes <= starts[place] + self.held[starts[place]][1], "outside device memory"
        return address

    def on_host(self, address: int, nbytes: int) -> bool:
        """Whether so many bytes of pinned memory are there."""
        inside = (
            (start, size) for start, (block, size) in self.pinned.items() if block() is not None and start <= address
        )
        return any(address + nbytes <= start + size for start, size in inside)

    def _plain(self, what: str) -> None:
        assert self.capturing is None, f"{what} in the middle of a capture"


# -- plans


def make_plan(
    folder: Path,
    *,
    backend: str = "tensorrt",
    tokens: Sequence[tuple[int, int]] = ((1, 1), (2, 64)),
    batch: tuple[int, int] = (1, 4),
    picks: int | None = None,
    sm: Sequence[str] = ("8.9",),
    plugins: bool = True,
    on_host: bool = True,
    stripped: bool = False,
    **target: Any,
) -> Path:
    """Turn an engine for ONNX Runtime into one whose plan a `FakeTensorRT` runs. Returns the folder.

    tokens: fewest and most of each profile. picks: most logits of a step (default: as many as tokens). on_host:
    whether `live` and `select_width` are shape inputs. stripped: the plan has no weights, which stay in the graph.
    """
    artefact = Artefact.open(folder)
    model = onnx.load(folder / "model.onnx")
    profiles = [_ranges(artefact, least, most, batch, picks or most) for least, most in tokens]
    about = {
        "profiles": profiles,
        "in_place": target.get("in_place", True),
        "plugins": plugins,
        "host": [spec.name for spec in artefact.inputs if spec.role in ON_HOST and on_host],
        "stripped": stripped,
        "aliases": {spec.alias: spec.name for spec in artefact.states},
        "roles": {spec.role: spec.name for spec in artefact.inputs if spec.role != "state"},
        "inputs": {spec.name: [spec.dtype, *_dims(spec.shape)] for spec in artefact.inputs},
        "outputs": {spec.name: [spec.dtype, *_dims(spec.shape)] for spec in artefact.outputs},
    }
    head = json.dumps(about).encode()
    (folder / "engine.plan").write_bytes(MAGIC + len(head).to_bytes(4, "little") + head + model.SerializeToString())
    if stripped:
        (folder / "model.onnx").rename(folder / "plan.onnx")
        target["weights"] = "plan.onnx"
    else:
        for name in ("model.onnx", "model.onnx.data"):
            (folder / name).unlink(missing_ok=True)
    if plugins:
        (folder / "libkvpack_tensorrt.so").write_bytes(b"kvpack's plugins")
    config = {key: value for key, value in artefact.config.items() if key not in ("files", "digest")}
    config["target"] = {
        "backend": backend,
        "versions": {backend.replace("-", "_"): "11.4.0.7"},
        "sm": list(sm),
        "plan": "engine.plan",
        "plugins": "libkvpack_tensorrt.so" if plugins else None,
        "profiles": [{"name": "decode" if most == 1 else f"prefill-{most}"} for _, most in tokens],
        "in_place": True,
    } | target
    write_config(folder, config)
    return folder


def _dims(shape: Sequence[int | str]) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in shape]


def _ranges(artefact: Artefact, least: int, most: int, batch: tuple[int, int], picks: int) -> dict[str, Any]:
    """Smallest, usual and largest sizes (and values) of every input."""
    block = artefact.geometry.block if artefact.geometry else 0
    ends = []
    for capacity, b, s, p, e in (
        (min(CAPACITY_STEP, artefact.max_length), batch[0], least, 1, 0),
        (artefact.max_length, batch[1], most, picks, most + block),
    ):
        sizes = state_sizes(capacity, artefact.geometry, b) | {"sequence": s, "picks": p, "encode": e}
        ends.append({spec.name: spec.dims(sizes) for spec in artefact.inputs})
    values = {spec.name: [[0], [1], [artefact.max_length]] for spec in artefact.inputs if spec.role in ON_HOST}
    return {"shapes": {name: [ends[0][name], ends[0][name], ends[1][name]] for name in ends[0]}, "values": values}


# -- the module

Mode = Enum("Mode", ["INPUT", "OUTPUT"])
Location = Enum("Location", ["DEVICE", "HOST"])
DataType = Enum("DataType", list(DTYPES.values()))
Severity = Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])
Strategy = Enum("Strategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])
Specialization = Enum("Specialization", ["LAZY", "EAGER", "NONE"])


class ILogger:
    def __init__(self) -> None:
        self.ready = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class FakeTensorRT:
    """The module: put it into sys.modules. fail: what the next launch fails with."""

    ILogger = ILogger
    ExecutionContextAllocationStrategy = Strategy

    def __init__(self, gpu: Gpu, version: str = "11.4.0.7", rtx: bool = False) -> None:
        self.gpu, self.rtx = gpu, rtx
        self.Refitter, self.OnnxParserRefitter = Refitter, OnnxParserRefitter
        if rtx:
            self.DynamicShapesKernelSpecializationStrategy = Specialization
        self.caches: list[Cache] = []
        self.__version__ = version
        self.libraries: list[str] = []
        self.profiles: list[int] = []  # of every launch
        self.fail = ""
        self.registry: list[str] = []

    def Runtime(self, logger: ILogger) -> Runtime:  # noqa: N802 - as TensorRT calls it
        assert logger.ready, "ILogger.__init__ was not called"
        return Runtime(self, logger)


class Runtime:
    def __init__(self, module: FakeTensorRT, logger: Any) -> None:
        self.module, self.logger = module, logger
        self.engine_host_code_allowed = False

    def get_plugin_registry(self) -> Registry:
        return Registry(self.module, self.logger)

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Plan | None:
        data = bytes(serialized_engine)
        if not data.startswith(MAGIC):
            return self.error("Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed")
        size = int.from_bytes(data[4:8], "little")
        about = json.loads(data[8 : 8 + size])
        if about["plugins"] and not self.module.registry:
            return self.error("Could not find plugin creator DenseAttention version 1 namespace kvpack")
        return Plan(self.module, self.logger, about, data[8 + size :])

    def error(self, message: str) -> None:
        self.logger.log(Severity.ERROR, message)


class Refitter:
    def __init__(self, engine: Plan, logger: Any) -> None:
        self.engine, self.given = engine, ""

    def refit_cuda_engine(self) -> bool:
        self.engine.has_weights = bool(self.given)
        return self.engine.has_weights


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: Any) -> None:
        self.refitter, self.logger = refitter, logger

    def refit_from_file(self, model: str) -> bool:
        if len(onnx.load(model).graph.initializer) < 2:
            self.logger.log(Severity.ERROR, "weights are missing")
            return False
        self.refitter.given = model
        return True


class Registry:
    def __init__(self, module: FakeTensorRT, logger: Any) -> None:
        self.module, self.logger = module, logger

    def load_library(self, plugin_path: str) -> object | None:
        if not Path(plugin_path).is_file() or plugin_path in self.module.libraries:
            self.logger.log(Severity.ERROR, f"Unable to load library: {plugin_path}")
            return None
        self.module.libraries.append(plugin_path)
        self.module.registry.append("kvpack")
        return object()

    @property
    def all_creators_recursive(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(plugin_namespace=name) for name in self.module.registry]


class Config:
    """An IRuntimeConfig of TensorRT."""

    strategy: Strategy | None = None

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy


class RtxConfig(Config):
    """An IRuntimeConfig of TensorRT-RTX."""

    dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
    cache: Cache | None = None

    def __init__(self, module: FakeTensorRT) -> None:
        self.module = module

    def create_runtime_cache(self) -> Cache:
        self.module.caches.append(Cache())
        return self.module.caches[-1]

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Cache:
    """An IRuntimeCache."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def serialize(self) -> bytes:
        return json.dumps(self.kernels).encode()

    def deserialize(self, blob: bytes) -> bool:
        self.kernels = json.loads(blob)
        return True


class Plan:
    """An ICudaEngine."""

    device_memory_size_v2 = 1 << 30

    def __init__(self, module: FakeTensorRT, logger: Any, about: Mapping[str, Any], model: bytes) -> None:
        self.module, self.logger, self.about = module, logger, about
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.tensors = about["inputs"] | about["outputs"]
        self.roles = about["roles"]
        self.host = about["host"]
        self.has_weights = not about["stripped"]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.about["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.about["inputs"] else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[DTYPES[self.tensors[name][0]]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return self.tensors[name][1:]

    def get_tensor_location(self, name: str) -> Location:
        return Location.HOST if name in self.host else Location.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return self.about["profiles"][profile_index]["shapes"][name]

    def get_tensor_profile_values(self, index: int, name: str) -> list[list[int]]:
        assert name in self.host, "not an input shape binding"
        return self.about["profiles"][index]["values"][name]

    def create_runtime_config(self) -> Config:
        return RtxConfig(self.module) if self.module.rtx else Config()

    def create_execution_context(self, config: Config) -> Context:
        assert config.strategy is Strategy.USER_MANAGED
        if isinstance(config, RtxConfig):
            assert config.cache is not None, "kernels would be compiled anew for every context"
            config.cache.kernels.append(config.dynamic_shapes_kernel_specialization_strategy.name)
        return Context(self)


@dataclass
class Settings:
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)


class Context:
    """An IExecutionContext whose memory is the user's."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.gpu = plan, plan.module.gpu
        self.profile = 0
        self.set_ = Settings()
        self.memory = (0, 0)
        self.version = 0  # grows with every change, which spoils what was captured
        self.ran: Any = None  # shapes and values of the last launch
        self.sized: Any = None  # ... of the last update of the size of its memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle in self.gpu.queues
        if not 0 <= profile_index < self.plan.num_optimization_profiles:
            return self.error(f"no profile {profile_index}")
        self.profile, self.set_.shapes, self.version = profile_index, {}, self.version + 1
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self.plan.about["inputs"] or not isinstance(shape, tuple):
            return self.error(f"{name} is no input")
        declared = self.plan.get_tensor_shape(name)
        low, _, high = self.plan.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(declared) or any(d not in (-1, s) for d, s in zip(declared, shape, strict=True)):
            return self.error(f"{name} {shape} is not {declared}")
        if not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return self.error(f"Supplied dimensions {shape} of {name} are outside profile {self.profile}")
        self.set_.shapes[name] = shape
        self.version += 1
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.plan.tensors or memory % ALIGNMENT:
            return self.error(f"{name} at {memory:#x}: no such tensor, or not aligned to {ALIGNMENT} bytes")
        self.set_.addresses[name] = memory
        self.version += 1
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        assert not self.infer_shapes(), f"the shape of {name} is not known yet"
        return _shape_of(self.plan, name, self.set_, self.values())

    def infer_shapes(self) -> list[str]:
        missing = [name for name in self.plan.about["inputs"] if name not in self.set_.shapes]
        missing += [name for name in self.plan.host if not self.set_.addresses.get(name)]
        if not missing:
            for name, value in self.values().items():
                low, _, high = self.plan.get_tensor_profile_values(self.profile, name)
                if not low[0] <= value <= high[0]:
                    raise RuntimeError(f"the value {value} of {name} is outside profile {self.profile}")
        return missing

    def values(self) -> dict[str, int]:
        """Of the inputs that the host reads."""
        found = {}
        for name in self.plan.host:
            address = self.set_.addresses[name]
            assert self.gpu.on_host(address, 4), f"{name} is not in the host's memory"
            found[name] = ctypes.c_int32.from_address(address).value
        return found

    def update_device_memory_size_for_shapes(self) -> int:
        assert not self.infer_shapes(), "the size of the memory was asked for before all shapes were set"
        self.sized = dict(self.set_.shapes), self.values()
        self.version += 1
        return self._needed()

    def _needed(self) -> int:
        return 512 + 8 * prod(self.set_.shapes[self.plan.roles["tokens"]])

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        self.memory = memory, size
        self.version += 1

    def execute_async_v3(self, stream_handle: int) -> bool:
        plan, gpu = self.plan, self.gpu
        module = plan.module
        if missing := self.infer_shapes():
            return self.error(f"not set: {missing}")
        if nowhere := [name for name in plan.tensors if not self.set_.addresses.get(name)]:
            return self.error(f"Address is not set for {nowhere}")
        state = dict(self.set_.shapes), self.values()
        if gpu.capturing is not None:
            assert self.ran == state, "a capture of shapes that this context has not run yet"
        if self.sized != state:
            return self.error("the memory was not sized for these shapes")
        if self.memory[1] < self._needed():
            return self.error(f"{self.memory[1]} bytes of memory are less than {self._needed()}")
        for out, source in plan.about["aliases"].items():
            same = self.set_.addresses[out] == self.set_.addresses[source]
            if same != plan.about["in_place"]:
                return self.error(f"{out} and {source} must {'' if plan.about['in_place'] else 'not '}be in one place")
        if not plan.has_weights:
            return self.error("the engine has no weights")
        if module.fail:
            reason, module.fail = module.fail, ""
            return self.error(reason)
        if gpu.capturing is None:
            self.ran = state
            module.profiles.append(self.profile)
        settings = Settings(dict(self.set_.shapes), dict(self.set_.addresses))
        memory, version, values, own = self.memory, self.version, self.values(), weakref.ref(self)
        captured = gpu.capturing is not None

        def work() -> None:
            if captured:
                assert own() is not None and own().version == version, "the context of a graph was touched or dropped"
            ctypes.memset(gpu.at(*memory), 170, memory[1])
            _compute(plan, gpu, settings, values)

        gpu.enqueue(stream_handle, work)
        return True

    def error(self, message: str) -> bool:
        self.plan.logger.log(Severity.ERROR, message)
        return False


def _compute(plan: Plan, gpu: Gpu, settings: Settings, values: Mapping[str, int]) -> None:
    """Run the graph over the memory at these addresses."""
    binding = plan.session.io_binding()
    for name, (dtype, *_) in plan.about["inputs"].items():
        if name in values:
            array = np.array(values[name], np.int32)
        else:
            array = _view(gpu, settings.addresses[name], dtype, settings.shapes[name])
        binding.bind_ortvalue_input(name, _value(array, dtype))
    sizes = {name: _shape_of(plan, name, settings, values) for name in plan.about["outputs"]}
    for name, shape in sizes.items():
        dtype = plan.about["outputs"][name][0]
        binding.bind_ortvalue_output(name, _value(_view(gpu, settings.addresses[name], dtype, shape), dtype))
    plan.session.run_with_iobinding(binding)


def _shape_of(plan: Plan, name: str, settings: Settings, values: Mapping[str, int]) -> tuple[int, ...]:
    if name in plan.about["aliases"]:
        return settings.shapes[plan.about["aliases"][name]]
    if name == "logits":
        return (*settings.shapes[plan.roles["logit_index"]], plan.tensors[name][-1])
    return settings.shapes[plan.roles["tokens"]][0], values[plan.roles["select_width"]]  # of a layer that observes


def _view(gpu: Gpu, address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    carrier = np.dtype({"bfloat16": "uint16"}.get(dtype, dtype))
    nbytes = prod(shape) * carrier.itemsize
    memory = (ctypes.c_ubyte * nbytes).from_address(gpu.at(address, nbytes))
    return np.frombuffer(memory, carrier).reshape(shape) if nbytes else np.empty(shape, carrier)


def _value(array: np.ndarray, dtype: str) -> Any:
    if array.dtype.name == dtype:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_TYPES[dtype])
