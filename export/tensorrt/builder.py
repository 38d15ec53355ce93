"""Parse a graph, build its plan, tell what is in it. Runs in a process of its own, see `export.tensorrt.process`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from plugins.contract import TensorSpec
from plugins.errors import UserError
from plugins.files import write_whole
from plugins.geometry import Geometry
from runtime.plan import DTYPES

from . import layers
from .options import Profile, shapes
from .packages import PACKAGES, Package

Step = Callable[[str, int, int], None]  # phase, steps ended, steps in all (0: it ended)


class PlanError(RuntimeError):
    """TensorRT gave no plan; the sentence holds what it said."""


def build(request: Mapping[str, Any], step: Step = lambda *_: None) -> dict[str, Any]:
    """Write the plan that a request describes and return what is known of it, as JSON.

    request: backend; graph, plan: files; inputs, outputs: the tensor contract (`TensorSpec.to_json`); geometry, limit
    and profiles, as config.json has them; sm: compute capabilities; flags: names of BuilderFlag; hardware_compatible;
    library: a plugin library or null; timing_cache: a file or null.
    Returns version, tensors (of the plan, see `layers.tensors`), layers (kinds and how many), states (see
    `layers.states`), memory (bytes, as TensorRT tells), warnings, seconds and bytes.
    Raises UserError for a graph or an option that the package refuses, PlanError when it fails.
    """
    package = PACKAGES[request["backend"]]
    trt, began = package.load(), time.monotonic()
    log = Log()
    builder = trt.Builder(log.logger(trt))
    if request["library"]:
        builder.get_plugin_registry().load_library(request["library"])
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt, network, log, request["graph"])
    specs = [TensorSpec.from_json(entry) for entry in (*request["inputs"], *request["outputs"])]
    _check_tensors(network, specs)
    config = builder.create_builder_config()
    _configure(trt, package, config, request)
    _add_profiles(builder, network, config, specs, request)
    monitor = _monitor(trt, step)  # kept until the plan is made
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise PlanError(f"{package.name} {trt.__version__} made no plan: {log.reason()}")
    size = Path(request["plan"]).write_bytes(plan)
    if request["timing_cache"]:
        kept = Path(request["timing_cache"])
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, config.get_timing_cache().serialize())  # at once: other builds may read it
    found = layers.parse(log.description)
    aliases = {spec.name: spec.alias for spec in specs if spec.alias}
    return {
        "version": trt.__version__,
        "tensors": layers.tensors(log.description),
        "layers": layers.kinds(found),
        "states": layers.states(found, aliases),
        "memory": log.memory,
        "warnings": list(dict.fromkeys(log.warnings)),
        "seconds": round(time.monotonic() - began, 1),
        "bytes": size,
    }


def inspect(request: Mapping[str, Any]) -> dict[str, Any]:
    """The layers and states of a plan, as `build` returns them, by opening it, which takes a GPU of its kind.

    request: backend, plan, library, aliases (input to output). Raises UserError when it cannot be opened here.
    """
    package = PACKAGES[request["backend"]]
    trt, log = package.load(), Log()
    runtime = trt.Runtime(log.logger(trt))
    if request["library"]:
        runtime.get_plugin_registry().load_library(request["library"])
    engine = runtime.deserialize_cuda_engine(Path(request["plan"]).read_bytes())
    if engine is None:
        raise UserError(f"{request['plan']} cannot be opened on this machine: {log.reason()}")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.ONELINE)
    found = layers.parse(text)
    return {"layers": layers.kinds(found), "states": layers.states(found, request["aliases"])}


class Log:
    """What TensorRT says, as far as it matters."""

    MEMORY = {"Total Weights Memory: ": "weights", "Total Activation Memory: ": "activations"}

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.memory: dict[str, int] = {}
        self.description = ""  # of the finished engine

    def logger(self, trt: ModuleType) -> Any:
        log = self

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                log.take(severity <= trt.ILogger.ERROR, severity == trt.ILogger.WARNING, message)

        return Logger()

    def take(self, is_error: bool, is_warning: bool, message: str) -> None:
        if is_error:
            self.errors.append(message)
        elif is_warning:
            self.warnings.append(message)
        elif message.startswith("Layers:"):
            self.description = message
        else:
            for start, name in self.MEMORY.items():
                if message.startswith(start):
                    self.memory[name] = int(message.removeprefix(start).split()[0])

    def reason(self) -> str:
        return " ".join(self.errors[-1].split()) if self.errors else "it gave no reason"


def _parse(trt: ModuleType, network: Any, log: Log, graph: str) -> None:
    parser = trt.OnnxParser(network, log.logger(trt))
    if parser.parse_from_file(graph):
        return
    told = []
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        told.append(f"the node {error.node_name() or error.node()} ({error.node_operator()}): {error.desc()}")
    raise UserError(f"TensorRT's parser does not take {'; '.join(told) or log.reason()}")


def _tensors(network: Any) -> list[dict[str, Any]]:
    found = [network.get_input(n) for n in range(network.num_inputs)]
    found += [network.get_output(n) for n in range(network.num_outputs)]
    return [{"name": tensor.name, "dtype": tensor.dtype.name, "shape": list(tensor.shape)} for tensor in found]


def _check_tensors(network: Any, specs: Sequence[TensorSpec]) -> None:
    """Raises PlanError unless the network's tensors are the contract's."""
    found = {tensor["name"]: tensor for tensor in _tensors(network)}
    wanted = {spec.name: spec for spec in specs}
    if found.keys() != wanted.keys():
        raise PlanError(f"the network's tensors and the contract's differ by {sorted(found.keys() ^ wanted.keys())}")
    for name, spec in wanted.items():
        tensor = found[name]
        shape = [dim if isinstance(dim, int) else -1 for dim in spec.shape]
        # what an output's dimension is may follow from others'
        fits = len(shape) == len(tensor["shape"]) and all(
            -1 in (a, b) or a == b for a, b in zip(shape, tensor["shape"], strict=True)
        )
        if DTYPES.get(tensor["dtype"]) != spec.dtype or not fits:
            raise PlanError(
                f"{name} is {tensor['dtype']} {tensor['shape']} in the network, not {spec.dtype} {list(spec.shape)}"
            )


def _configure(trt: ModuleType, package: Package, config: Any, request: Mapping[str, Any]) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for flag in request["flags"]:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    if package.plugins:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if request["hardware_compatible"]:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if not package.plugins:
        config.num_compute_capabilities = len(request["sm"])
        for number, name in enumerate(request["sm"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{name.replace('.', '')}"), number)
    if request["timing_cache"]:
        path = Path(request["timing_cache"])
        data = path.read_bytes() if path.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(data), False):  # of another version or GPU
            config.set_timing_cache(config.create_timing_cache(b""), False)


def _add_profiles(
    builder: Any, network: Any, config: Any, specs: Sequence[TensorSpec], request: Mapping[str, Any]
) -> None:
    geometry = Geometry(**request["geometry"]) if request["geometry"] else None
    inputs = {network.get_input(n).name: network.get_input(n) for n in range(network.num_inputs)}
    for number, entry in enumerate(request["profiles"]):
        wanted = Profile(entry["name"], tuple(entry["tokens"]), tuple(entry["batch"]))
        sizes = wanted.sizes(geometry, request["limit"])
        profile = builder.create_optimization_profile()
        for spec in specs:
            if spec.name not in inputs:
                continue
            three = shapes(spec, sizes)
            if spec.shape:
                profile.set_shape(spec.name, *three)
            elif inputs[spec.name].is_shape_tensor:
                profile.set_shape_input(spec.name, *three)
        if config.add_optimization_profile(profile) != number:
            raise PlanError(f"TensorRT does not take the profile {wanted.name} ({sizes})")


def _monitor(trt: ModuleType, step: Step) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.totals: dict[str, int] = {}
            self.lock = threading.Lock()  # phases may run in several threads

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self.lock:
                self.totals[name] = steps
                step(name, 0, steps)

        def step_complete(self, name: str, number: int) -> bool:
            with self.lock:
                step(name, number + 1, self.totals.get(name, 0))
            return True

        def phase_finish(self, name: str) -> None:
            with self.lock:
                step(name, self.totals.pop(name, 0), 0)

    return Monitor()
