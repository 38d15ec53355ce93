"""A stand-in for the package `tensorrt`, which cannot be installed without NVIDIA's index: it records what it is told.

Its parser reads graphs with onnx and gives every network the graph's inputs and outputs. `said` is what the builder
says at its end, as TensorRT describes an engine.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

__version__ = "11.4.0.1"
PLAN = b"a plan"
DTYPES = {1: "FLOAT", 3: "INT8", 6: "INT32", 7: "INT64", 10: "HALF", 16: "BF16"}
calls: list[tuple[Any, ...]] = []  # in the order they came
said: list[str] = []
nodes: list[onnx.NodeProto] = []  # of the graph that was parsed last


class _Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = _Severity


class IProgressMonitor:
    pass


BuilderFlag = IntEnum("BuilderFlag", ["VERSION_COMPATIBLE", "STRIP_PLAN"])
PreviewFeature = IntEnum("PreviewFeature", ["ALIASED_PLUGIN_IO_10_03"])
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", ["STRONGLY_TYPED"], start=0)
HardwareCompatibilityLevel = IntEnum("HardwareCompatibilityLevel", ["NONE", "AMPERE_PLUS"])
ProfilingVerbosity = IntEnum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "DETAILED"])
LayerInformationFormat = IntEnum("LayerInformationFormat", ["ONELINE", "JSON"])


class _Registry:
    def load_library(self, path: str) -> None:
        calls.append(("load_library", Path(path).name, Path(path).is_file()))


class _Network:
    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, number: int) -> Any:
        return self.inputs[number]

    def get_output(self, number: int) -> Any:
        return self.outputs[number]


class OnnxParser:
    num_errors = 0

    def __init__(self, network: _Network, logger: ILogger) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        calls.append(("parse", Path(path).name))
        model = onnx.load(path)  # with its weights
        nodes[:] = model.graph.node
        for values, tensors in ((model.graph.input, self.network.inputs), (model.graph.output, self.network.outputs)):
            for value in values:
                kind = value.type.tensor_type
                shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
                dtype = SimpleNamespace(name=DTYPES[kind.elem_type])
                tensors.append(SimpleNamespace(name=value.name, dtype=dtype, shape=shape, is_shape_tensor=not shape))
        return True


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[list[int], ...]] = {}

    def set_shape(self, name: str, least: list[int], usual: list[int], most: list[int]) -> None:
        self.shapes[name] = least, usual, most

    set_shape_input = set_shape


class _Config:
    def __init__(self) -> None:
        self.profiles: list[_Profile] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("profiles", "progress_monitor"):
            calls.append((name, value))
        object.__setattr__(self, name, value)

    def set_flag(self, flag: BuilderFlag) -> None:
        calls.append(("flag", flag))

    def set_preview_feature(self, feature: PreviewFeature, on: bool) -> None:
        calls.append(("preview", feature, on))

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> bytes:
        calls.append(("timing cache", bytes(data)))
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"timings")


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def get_plugin_registry(self) -> _Registry:
        return _Registry()

    def create_network(self, flags: int) -> _Network:
        calls.append(("network", flags))
        return _Network()

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        config.progress_monitor.phase_start("Building engine", None, 2)
        assert config.progress_monitor.step_complete("Building engine", 0)
        config.progress_monitor.phase_finish("Building engine")
        calls.append(("build", [profile.shapes for profile in config.profiles]))
        for message in said:
            self.logger.log(ILogger.ERROR if message.startswith("Error") else ILogger.VERBOSE, message)
        return None if said and said[-1].startswith("Error") else PLAN


class Runtime:
    """Opens the plan of this module, of which it says the last thing said."""

    def __init__(self, logger: ILogger) -> None:
        pass

    def get_plugin_registry(self) -> _Registry:
        return _Registry()

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        assert plan == PLAN
        inspector = SimpleNamespace(get_engine_information=lambda form: said[-1])
        return SimpleNamespace(create_engine_inspector=lambda: inspector)
