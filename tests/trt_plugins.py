"""TensorRT's plugins without TensorRT: tests/trt_harness.cc compiled, and a layer's steps through it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
import trt_headers
from native import ROOT, address, digest, relative

from plugins.cache import cache_folder
from plugins.native import build
from plugins.native.layer import NativeLayer

FLOAT, HALF, INT8, INT32, BF16, INT64 = 0, 1, 2, 3, 7, 8  # nvinfer1::DataType
TYPES = {torch.float32: FLOAT, torch.float16: HALF, torch.int8: INT8, torch.int32: INT32, torch.bfloat16: BF16}
FIELD_FLOAT, FIELD_INT, FIELD_CHAR = 1, 5, 6  # nvinfer1::PluginFieldType
SHAPE_INPUTS = ("live", "select_width")


class Field(ctypes.Structure):
    """nvinfer1::PluginField."""

    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class Given(ctypes.Structure):
    """A tensor as the harness takes it."""

    _fields_ = (("rank", c_int32), ("type", c_int32), ("dims", c_int64 * 8), ("data", c_void_p))


def compiled(kernels: Path, *extra: str, emulated: bool = True, program: bool = False) -> Path:
    """The plugins and the harness, over the library `kernels`: the emulated one, or one for a GPU."""
    try:
        headers = trt_headers.find()
    except trt_headers.Unavailable as error:
        pytest.skip(str(error))
    include = build.cuda_include()
    sources = [ROOT / "src" / "tensorrt.cc", Path(__file__).parent / "trt_harness.cc"]
    name = f"{'fuzz' if program else 'libtrt'}-{digest([*sources, *ROOT.glob('src/*.h'), ROOT / 'kvpack.h', kernels])}"
    out = cache_folder() / "harness" / f"{name}{'' if program else '.so'}"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
        flags += [f"-I{ROOT}", "-isystem", str(headers), "-isystem", str(include), *([] if program else ["-shared"])]
        cuda = [f"-L{include.parent / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        flags += ["-DKVPACK_EMULATE"] if emulated else []
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            command = ["g++", *flags, *extra, *sources, kernels, f"-Wl,-rpath,{kernels.parent}", "-o", f"{work}/out"]
            subprocess.run(command + ([] if emulated else cuda), check=True)
            os.replace(f"{work}/out", out)
    return out


class Harness:
    """The creators by name."""

    def __init__(self, path: Path) -> None:
        handle = self.handle = ctypes.CDLL(str(path))
        for name in ("creator", "create", "clone", "restored", "attach", "field_names"):
            getattr(handle, f"trt_{name}").restype = c_void_p
        for name in ("name", "namespace", "said"):
            getattr(handle, f"trt_{name}").restype = c_char_p
        handle.trt_workspace.restype = c_int64
        creators = [c_void_p(handle.trt_creator(n)) for n in range(handle.trt_count())]
        self.creators = {handle.trt_name(each).decode(): each for each in creators}

    def create(self, op: str, fields: list[Field]) -> int | None:
        return self.handle.trt_create(self.creators[op], (Field * len(fields))(*fields), len(fields))

    def enqueue(self, plugin: c_void_p, inputs: Any, outputs: Any, workspace: torch.Tensor | None = None) -> None:
        """On torch's current stream, where there is a GPU."""
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None
        rest = inputs, len(inputs), outputs, len(outputs), c_void_p(address(workspace)), c_void_p(stream)
        assert self.handle.trt_enqueue(plugin, *rest) == 0, self.said()

    def said(self) -> str:
        return self.handle.trt_said().decode()


def field(name: str, value: Any) -> Field:
    """As TensorRT's parser makes it of a node's attribute."""
    if isinstance(value, str):
        made = Field(name.encode(), None, FIELD_CHAR, len(value))
        kept = ctypes.create_string_buffer(value.encode())
    elif isinstance(value, float):
        made, kept = Field(name.encode(), None, FIELD_FLOAT, 1), ctypes.c_float(value)
    else:
        numbers = list(value) if isinstance(value, tuple) else [value]
        made, kept = Field(name.encode(), None, FIELD_INT, len(numbers)), (c_int32 * len(numbers))(*numbers)
    made.kept, made.data = kept, ctypes.addressof(kept)
    return made


def given(tensor: torch.Tensor | None) -> Given:
    if tensor is None:
        return Given(-1, 77)
    carried = tensor.view(torch.int8) if tensor.dtype == torch.int16 else tensor
    dims = (c_int64 * 8)(*carried.shape)
    return Given(carried.dim(), TYPES[carried.dtype], dims, carried.data_ptr())


class Plugin:
    """A layer's steps by its plugin: takes the place of `NativeLayer.launch`.

    in_place: whether states' outputs lie where the inputs do. described: of the last step, each output's type and shape
    as the plugin said them, and the input it is an alias of.
    """

    def __init__(self, harness: Harness, layer: NativeLayer, in_place: bool = True) -> None:
        self.harness, self.layer, self.in_place, handle = harness, layer, in_place, harness.handle
        creator = harness.creators[layer.plan.op]
        made = harness.create(layer.plan.op, [field(*each) for each in layer.plan.attributes.items()])
        assert made, harness.said()
        copied = handle.trt_clone(c_void_p(made))
        handle.trt_delete(c_void_p(made))
        restored = handle.trt_restored(c_void_p(copied), creator)  # what a plan holds is enough
        handle.trt_delete(c_void_p(copied))
        self.plugin = c_void_p(restored)
        self.context = c_void_p(handle.trt_attach(self.plugin))

    def __del__(self) -> None:
        for each in (self.plugin, self.context):
            self.harness.handle.trt_delete(each)

    def tensors(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, feeds: Mapping[str, Any]
    ) -> dict[str, torch.Tensor | None]:
        layer = self.layer
        cos, sin = layer.rope or (None, None)
        known = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin} | layer.states | layer.tables | dict(feeds)
        return {name: known[name] for name in layer.plan.inputs if name not in SHAPE_INPUTS}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor, feeds: Any
    ) -> None:
        layer, handle = self.layer, self.harness.handle
        tensors = self.tensors(q, k, v, feeds)
        inputs = (Given * len(tensors))(*map(given, tensors.values()))
        names = layer.plan.outputs
        outputs, aliases = (Given * len(names))(), (c_int32 * len(names))()
        numbers = (c_int64 * 2)(int(feeds["live"]), int(feeds.get("select_width", 0)))
        shapes = 1 + ("select_width" in layer.plan.inputs)
        count = handle.trt_describe(self.plugin, inputs, len(inputs), numbers, shapes, outputs, aliases)
        assert count == len(names), self.harness.said()
        results = {"out": out}
        for name in layer.states:
            state = layer.states[name]
            results[f"{name}_out"] = state if self.in_place else torch.empty_like(state)
        if "selected" in names:
            shape = layer.batch, feeds["select_width"]
            results["selected"] = torch.full(shape, -1, dtype=torch.int32, device=layer.device)
        self.described = {}
        for name, output, alias in zip(names, outputs, aliases, strict=True):
            said = output.type, tuple(output.dims[: output.rank])
            wanted = given(results[name])
            assert said == (wanted.type, tuple(wanted.dims[: wanted.rank])), name
            output.data = results[name].data_ptr()
            self.described[name] = None if alias < 0 else list(tensors)[alias]
        self.inputs, self.outputs = inputs, outputs
        self.index = list(tensors).index("index") if "index" in tensors else -1
        size = handle.trt_workspace(self.plugin, inputs, len(inputs), outputs, len(outputs))
        assert size >= 0, self.harness.said()
        workspace = torch.full((size + 4096,), 77, dtype=torch.int8, device=layer.device)
        self.harness.enqueue(self.context, inputs, outputs, workspace)
        if layer.device == "cpu" or not torch.cuda.is_current_stream_capturing():
            assert (workspace[size:] == 77).all()
        layer.states = {name: results[f"{name}_out"] for name in layer.states}
        layer.selected = results.get("selected")


ELEMENTWISE = {"AddRMSNormalization": {"epsilon": 0.25}, "GatedActivation": {"activation": "gelu_tanh"}}


def run_elementwise(
    harness: Harness, op: str, tensors: list[torch.Tensor], shapes: list[tuple[int, ...]]
) -> list[torch.Tensor]:
    handle = harness.handle
    plugin = c_void_p(harness.create(op, [field(*each) for each in ELEMENTWISE[op].items()]))
    inputs, outputs = (Given * len(tensors))(*map(given, tensors)), (Given * len(shapes))()
    count = handle.trt_describe(plugin, inputs, len(inputs), None, 0, outputs, (c_int32 * len(shapes))())
    assert count == len(shapes)
    assert [tuple(output.dims[: output.rank]) for output in outputs] == shapes
    assert {output.type for output in outputs} == {TYPES[tensors[0].dtype]}
    results = [tensors[0].new_empty(shape) for shape in shapes]
    for output, result in zip(outputs, results, strict=True):
        output.data = result.data_ptr()
    rest = inputs, len(inputs), outputs, len(outputs)
    assert handle.trt_workspace(plugin, *rest) == 0
    harness.enqueue(plugin, inputs, outputs)
    handle.trt_delete(plugin)
    return results


def check_elementwise(harness: Harness, dtype: torch.dtype, device: str, rows: int, size: int) -> None:
    """What lies between attentions, beside torch."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in ((2, rows, size), (2, rows, size), (size,)))
    x, y, weight = (each.to(device, dtype) for each in drawn)
    total, normed = run_elementwise(harness, "AddRMSNormalization", [x, y, weight], [(2, rows, size)] * 2)
    assert torch.equal(total, x + y)
    wide = total.float()
    wanted = (wide / (wide.square().mean(-1, keepdim=True) + 0.25).sqrt()).to(dtype) * weight
    assert relative(normed, wanted) < 1e-2
    (gated,) = run_elementwise(harness, "GatedActivation", [x], [(2, rows, size // 2)])
    gate, up = x.float().chunk(2, dim=-1)
    wanted = torch.nn.functional.gelu(gate, approximate="tanh").to(dtype) * up.to(dtype)
    assert relative(gated, wanted) < 1e-2
