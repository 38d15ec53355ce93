"""Opening a TensorRT plan: its package, its plugins, its weights, and whether it is what config.json says."""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from plugins.errors import UserError
from runtime.artefact import REBUILD, Artefact
from runtime.device import Streams, device
from runtime.external import check_external_data

# backend -> the names that its Python module goes by, and what it is called
MODULES = {
    "tensorrt": (("tensorrt",), "TensorRT"),
    "tensorrt-rtx": (("tensorrt_rtx", "tensorrt_rtx_bindings"), "TensorRT-RTX"),
}
ANY_GPU = "current"  # in "sm": built for the GPU of the machine that built it, of which only TensorRT knows more
AMPERE_PLUS = "8.0+"
DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
}  # fmt: skip
NAMESPACE = "kvpack"  # of the plugins
MESSAGES = 8  # of TensorRT's errors, how many are kept for the next sentence
log = logging.getLogger("kvpack")

Range = tuple[tuple[int, ...], tuple[int, ...]]  # smallest and largest sizes, or values


class Loaded(NamedTuple):
    """A plan and what it came with. runtime: with `_logger`'s logger. plan: an ICudaEngine. name: "TensorRT 11.4"."""

    module: Any
    runtime: Any
    plan: Any
    memory: Streams
    name: str


def package(backend: str) -> tuple[Any, str]:
    """The Python module of a backend, and what it is called. Raises UserError."""
    names, title = MODULES[backend]
    for name in names:
        try:
            return import_module(name), title
        except ModuleNotFoundError as error:
            if error.name != name:
                raise UserError(f"{title} needs the package {error.name}: {install(backend)}.") from None
        except (ImportError, OSError) as error:  # its libraries
            reason = str(error).partition("\n")[0]
            raise UserError(f"{title} is installed but does not load ({reason}): install its libraries.") from None
    raise UserError(f"{title} is not installed: {install(backend)}.")


def install(backend: str) -> str:
    return f"pip install 'kvpack[{backend}]'"


def load(artefact: Artefact, library: str | Path | bool | None) -> Loaded:
    """The artefact's plan; library as for `Engine.open`. Raises UserError."""
    target = artefact.config["target"]
    backend = target["backend"]
    path, plugins = artefact.path / _file(artefact, target.get("plan")), _plugins(artefact, library)
    module, title = package(backend)
    memory = device()
    capability = memory.capability()
    wanted = [AMPERE_PLUS] if target.get("hardware_compatible") else target.get("sm", [ANY_GPU])
    if not _runs_on(wanted, capability):
        raise UserError(
            f"{artefact.path} was built for GPUs of SM {', '.join(wanted)} and this one is of SM {capability}: "
            f"{REBUILD} for it."
        )
    logger = _logger(module)
    runtime = module.Runtime(logger)
    if plugins is not None and not _register(runtime.get_plugin_registry(), plugins):
        raise UserError(f"{title} cannot load the plugins of {plugins} ({logger.told()}): {REBUILD}.")
    logger.told()  # of a registry that has them already
    if target.get("version_compatible"):
        runtime.engine_host_code_allowed = True  # such a plan brings its runtime with it, and its hash was checked
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        plan = runtime.deserialize_cuda_engine(data)
    if plan is None:
        versions = sorted(target.get("versions", {}).items())
        built = ", ".join(f"{name} {number}" for name, number in versions if name.startswith("tensorrt"))
        raise UserError(
            f"{path} cannot be loaded ({logger.told() or f'{title} does not say why'}); it was built with {built} for "
            f"SM {', '.join(wanted)}, and here are {title} {module.__version__} and SM {capability}: install that "
            f"version, or {REBUILD}."
        )
    if target.get("weights") is not None:
        _refit(module, plan, logger, artefact, target["weights"])
    _check_contract(artefact, path, plan)
    version = ".".join(module.__version__.split(".")[:2])
    return Loaded(module, runtime, plan, memory, f"{title} {version}")


@dataclass(frozen=True)
class Profile:
    """What one optimisation profile of a plan takes. shapes: by input. values: of inputs that the host reads."""

    index: int
    shapes: Mapping[str, Range]
    values: Mapping[str, Range]

    def holds(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int] | None = None) -> bool:
        return not self.outside(shapes, values or {})

    def outside(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, int]) -> list[str]:
        """What of these is not in the ranges, for people."""
        wrong = []
        for ranges, given in ((self.shapes, shapes), (self.values, {n: (v,) for n, v in values.items()})):
            for name, sizes in given.items():
                low, high = ranges.get(name, (sizes, sizes))
                if not all(a <= x <= b for a, x, b in zip(low, sizes, high, strict=True)):
                    wrong.append(f"{name} {list(sizes)} is not between {list(low)} and {list(high)}")
        return wrong


def profiles_of(plan: Any) -> list[Profile]:
    inputs = [name for name in names_of(plan) if plan.get_tensor_mode(name).name == "INPUT"]
    found = []
    for index in range(plan.num_optimization_profiles):
        shapes, values = {}, {}
        for name in inputs:
            shape = tuple(plan.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                low, _, high = plan.get_tensor_profile_shape(name, index)
                shapes[name] = tuple(low), tuple(high)
            else:
                shapes[name] = shape, shape
            if plan.get_tensor_location(name).name == "HOST":
                bounds = plan.get_tensor_profile_values(index, name)
                if bounds:  # there are none where they were not set
                    values[name] = tuple(bounds[0]), tuple(bounds[2])
        found.append(Profile(index, shapes, values))
    return found


def names_of(plan: Any) -> list[str]:
    """Of all inputs and outputs."""
    return [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]


def _logger(module: Any) -> Any:
    """An ILogger of the module with a method `told`, which returns the errors reported since its last call."""
    levels = {"INFO": logging.DEBUG, "VERBOSE": logging.DEBUG, "WARNING": logging.INFO}

    class Logger(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: deque[str] = deque(maxlen=MESSAGES)

        def log(self, severity: Any, msg: str) -> None:
            if severity.name in levels:
                log.log(levels[severity.name], "%s", msg)
            else:
                self.messages.append(" ".join(msg.split()))

        def told(self) -> str:
            told = "; ".join(dict.fromkeys(self.messages))
            self.messages.clear()
            return told

    return Logger()


def _plugins(artefact: Artefact, library: str | Path | bool | None) -> Path | None:
    """The file of plugins that the plan needs: its own, or the one that was asked for. Raises UserError."""
    own = artefact.config["target"].get("plugins")
    if own is None:
        if library:
            raise UserError(f"{artefact.path} is a plan without plugins, so --library {library} has no use: drop it.")
        return None
    if library is False:
        raise UserError(f"{artefact.path} is a plan of plugins, which cannot run without: drop --library none.")
    if library not in (None, True):
        if not Path(library).is_file():
            raise UserError(f"there is no library {library}: build one with `python -m plugins build`.")
        return Path(library).absolute()
    return (artefact.path / _file(artefact, own)).absolute()


def _register(registry: Any, library: Path) -> bool:
    """Whether the registry has kvpack's plugins: those of the library, or, as it refuses a second time, others'."""
    if registry.load_library(str(library)) is not None:
        return True
    return any(creator.plugin_namespace == NAMESPACE for creator in registry.all_creators_recursive)


def _refit(module: Any, plan: Any, logger: Any, artefact: Artefact, name: str) -> None:
    """Give a plan that was built without weights those of the engine's graph. Raises UserError."""
    path = artefact.path / _file(artefact, name)
    check_external_data(path, {name: entry["bytes"] for name, entry in artefact.config["files"].items()}, REBUILD)
    refitter = module.Refitter(plan, logger)
    parser = module.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(path)) or not refitter.refit_cuda_engine():
        raise UserError(
            f"the plan of {artefact.path} does not take the weights of {path} ({logger.told()}): {REBUILD}."
        )


def _file(artefact: Artefact, name: Any) -> str:
    """A file of the target that config.json lists, so that its hash was checked. Raises UserError."""
    if name not in artefact.config["files"]:
        raise UserError(
            f"{artefact.path / 'config.json'} has the target file {name!r} and does not list it: {REBUILD}."
        )
    return name


def _runs_on(wanted: Sequence[str], capability: str) -> bool:
    """Whether a plan for these SMs runs on a GPU: "8.9" on such a GPU, "8.0+" on newer ones as well."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    return any(
        sm in (ANY_GPU, capability) or (sm.endswith("+") and number(sm[:-1]) <= number(capability)) for sm in wanted
    )


def _check_contract(artefact: Artefact, path: Path, plan: Any) -> None:
    """Names, dtypes and fixed sizes of the plan's tensors against config.json. Raises UserError."""
    there = set(names_of(plan))
    for specs, mode in ((artefact.inputs, "INPUT"), (artefact.outputs, "OUTPUT")):
        for spec in specs:
            if spec.name not in there:
                if mode == "INPUT" and spec.role != "state":
                    continue  # nothing reads it
                raise UserError(f"{path} and config.json disagree about the tensor {spec.name!r}: {REBUILD}.")
            there.remove(spec.name)
            dtype, shape = plan.get_tensor_dtype(spec.name).name, tuple(plan.get_tensor_shape(spec.name))
            if plan.get_tensor_mode(spec.name).name != mode or not spec.agrees(DTYPES.get(dtype), shape):
                raise UserError(
                    f"{path} has {spec.name!r} as {DTYPES.get(dtype, dtype)} {list(shape)} and config.json as "
                    f"{spec.dtype} {list(spec.shape)}: {REBUILD}."
                )
    if there:
        raise UserError(f"{path} and config.json disagree about the tensor {min(there)!r}: {REBUILD}.")
