"""The TensorRT plugins, without TensorRT: driven by tests/trt_harness.cc, their kernels run by the CPU emulator."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from ctypes import POINTER, byref, c_int32
from pathlib import Path
from typing import Any

import pytest
import test_native_deltakv as deltakv
import test_native_dense as dense
import test_native_intkv as intkv
import test_native_vqkv as vqkv
import torch
import trt_headers
from native import ROOT, emulated, follow
from trt_plugins import (
    BF16,
    ELEMENTWISE,
    FIELD_CHAR,
    FIELD_FLOAT,
    FIELD_INT,
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    Field,
    Harness,
    Plugin,
    check_elementwise,
    compiled,
    field,
)

from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.layer import LayerSpec
from plugins.native import build
from plugins.native.abi import Library
from plugins.native.layer import NativeLayer


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


@pytest.fixture(scope="module")
def harness(library: Library) -> Harness:
    return Harness(compiled(library.path))


def packed(layer: NativeLayer, count: int, seed: int) -> torch.Tensor:
    spec = layer.spec
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    drawn = torch.randn(layer.batch, count, width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(layer.dtype)


TILES = {"layout": "tiles", "key_space": "post_rope", "k_entries": 256, "v_entries": 256}
OBSERVED = Geometry(sinks=2, window=8, block=16)


def dense_layer(library: Library, spec: LayerSpec, observes: Geometry | None = None, dtype: Any = torch.float16) -> Any:
    layer = dense.Bench(library, spec, dtype, [0, 0], 128, observes).layer
    for state in layer.states.values():
        state.zero_()
    return layer


LAYERS: dict[str, Callable[[Library], NativeLayer]] = {
    "dense": lambda library: dense_layer(library, dense.spec(64, 2, 3), dtype=torch.bfloat16),
    "dense, no RoPE": lambda library: dense_layer(library, dense.spec(64, 1, 1, rotary=0)),
    "dense, sliding window": lambda library: dense_layer(library, dense.spec(64, 1, 2, window=40)),
    "dense, observing": lambda library: dense_layer(library, dense.spec(64, 2, 2), OBSERVED),
    "vqkv": lambda library: vqkv.Case().native(library, 2),
    "vqkv, shared tables, no RoPE": lambda library: vqkv.CASES["no rope, shared tables"].native(library, 2),
    "vqkv, tiles": lambda library: vqkv.Case(128, 2, config=TILES).native(library, 2),
    "deltakv": lambda library: deltakv.pair(library, torch.float16).native,
    "deltakv, 16 bits": lambda library: deltakv.pair(library, torch.bfloat16, latents="40x16", rotary_dim=0).native,
    "deltakv, wide indices": lambda library: deltakv.pair(library, torch.float16, limit=1 << 18).native,
    "deltakv, swiglu, selecting": lambda library: (
        deltakv.pair(library, torch.float16, compressor="swiglu", hidden=72, select_count=16).native
    ),
    "intkv": lambda library: intkv.Case().native(library, 2),
    "intkv, scales along tokens": lambda library: intkv.Case(config=intkv.KIVI | {"block": 32}).native(library, 2),
}
NEW = [[40, 23], [1, 1], [9, 14], [1, 0], [1, 1]]


@pytest.mark.parametrize("name", LAYERS)
def test_a_plugin_computes_what_the_library_does(harness: Harness, library: Library, name: str) -> None:
    wanted, found = LAYERS[name](library), LAYERS[name](library)
    plugin = found.launch = Plugin(harness, found)
    for seed, new in enumerate(NEW):
        q = packed(found, max(new), seed)
        assert torch.equal(found.step(q, new=new), wanted.step(q, new=new))
        for state, tensor in wanted.states.items():
            last = tensor.shape[2] - (found.spec.window == 0)  # but the trash row
            assert torch.equal(found.states[state][:, :, :last], tensor[:, :, :last]), state
        if "selected" in found.plan.outputs:
            assert torch.equal(found.selected, wanted.selected)
        states = {f"{state}_out": state for state in found.states}
        assert plugin.described == {output: states.get(output) for output in found.plan.outputs}


def test_a_plugin_equals_the_dense_reference(harness: Harness, library: Library) -> None:
    layer, dtype, lengths = dense.DECODE["head-96"]
    bench = dense.Bench(library, layer, dtype, [*lengths, 40], capacity=320)
    bench.layer.launch = Plugin(harness, bench.layer)
    bench.check([1] * len(lengths) + [0], 1)
    bench.check([20, 3, 0, 1], 20)


def test_a_plugin_equals_the_vqkv_reference(harness: Harness, library: Library) -> None:
    case = vqkv.Case(dtype=torch.bfloat16)
    native, references = case.native(library, 2), [case.reference() for _ in range(2)]
    native.launch = Plugin(harness, native)
    worst = follow(
        *(native, references, [[60, 33], [1, 1], [21, 40], [1, 1]]),
        lambda length, generator: case.tokens(2, length, generator),
        lambda member: vqkv.codes_of(native, case, member),
    )
    assert worst < vqkv.BARS[case.dtype]


@pytest.mark.parametrize("name", ["dense", "vqkv", "deltakv", "intkv"])
def test_a_state_of_its_own_address_is_copied_and_q_k_and_v_may_lie_apart(
    harness: Harness, library: Library, name: str
) -> None:
    wanted, found = LAYERS[name](library), LAYERS[name](library)
    found.launch = Plugin(harness, found, in_place=False)
    heads = [found.spec.num_heads * found.spec.head_dim] + [found.spec.num_kv_heads * found.spec.head_dim] * 2
    for seed, count in enumerate((30, 1)):
        before = dict(found.states)
        old = {state: tensor.clone() for state, tensor in before.items()}
        apart = [x.contiguous() for x in packed(found, count, seed).split(heads, dim=-1)]
        assert torch.equal(found.step(*apart), wanted.step(*apart))
        for state, tensor in before.items():
            assert found.states[state] is not tensor and torch.equal(tensor, old[state])


@pytest.mark.parametrize("name", ["vqkv", "deltakv"])
def test_tables_at_another_address_are_prepared_again(harness: Harness, library: Library, name: str) -> None:
    wanted, found = LAYERS[name](library), LAYERS[name](library)
    found.launch = Plugin(harness, found)
    right = found.tables
    found.tables = {key: torch.zeros_like(table) for key, table in right.items()}
    for seed, count in enumerate((3, 1, 40, 1)):  # the first two neither read nor write codes
        q = packed(found, count, seed)
        assert torch.equal(found.step(q), wanted.step(q))
        if seed == 1:
            found.tables = right


def test_the_plugins_compile_with_nvcc_and_need_no_symbol_of_tensorrt(tmp_path: Path) -> None:
    try:
        nvcc, headers = build.find_nvcc(), trt_headers.find()
    except (UserError, trt_headers.Unavailable) as error:
        pytest.skip(str(error))
    made, kernels = build._compile_one(nvcc, ROOT / "src" / "tensorrt.cc", (90,), tmp_path, "-O0", headers)
    assert not kernels
    symbols = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True).stdout.splitlines()
    missing = {line.split("U ", 1)[1] for line in symbols if " U " in line}
    assert not [name for name in missing if "nvinfer1" in name or name.startswith("get")]
    shown = {line.split(" T ")[1] for line in symbols if " T " in line}
    assert {"getCreators", "setLoggerFinder"} <= shown


@pytest.mark.parametrize("name", LAYERS)
def test_the_types_and_formats_that_a_plugin_takes(harness: Harness, library: Library, name: str) -> None:
    layer = LAYERS[name](library)
    plugin = layer.launch = Plugin(harness, layer)
    layer.step(packed(layer, 2, 0))
    inputs, outputs = plugin.inputs, plugin.outputs

    def supported(at: int, linear: int = 1) -> bool:
        rest = inputs, len(inputs), outputs, len(outputs)
        return bool(harness.handle.trt_supports(plugin.plugin, at, linear, *rest))

    for at, tensor in enumerate([*inputs, *outputs]):
        assert supported(at)
        if tensor.rank < 0:  # a null input
            continue
        assert not supported(at, linear=0)
        right = tensor.type
        free = {HALF, BF16} if at == 0 else {INT8, INT32} if at == plugin.index else {right}
        for other in (FLOAT, HALF, INT8, INT32, BF16, INT64):
            tensor.type = other
            assert supported(at) == (other in free), (at, other)
        tensor.type = right


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_lies_between_attentions(harness: Harness, dtype: torch.dtype) -> None:
    check_elementwise(harness, dtype, "cpu", rows=3, size=64)


# -- what must be refused


def test_the_creators_tell_the_attributes_of_their_ops(harness: Harness, library: Library) -> None:
    plans = [make(library).plan for make in LAYERS.values()]
    wanted = {plan.op: plan.attributes for plan in plans} | ELEMENTWISE
    assert set(harness.creators) == set(wanted)
    kinds = {int: FIELD_INT, tuple: FIELD_INT, float: FIELD_FLOAT, str: FIELD_CHAR}
    for op, creator in harness.creators.items():
        assert harness.handle.trt_namespace(creator) == b"kvpack"
        count = c_int32()
        fields = ctypes.cast(harness.handle.trt_field_names(creator, byref(count)), POINTER(Field))
        told = {fields[n].name.decode(): fields[n].type for n in range(count.value)}
        assert told == {name: kinds[type(value)] for name, value in wanted[op].items()}


def test_fields_that_are_not_the_ops_are_refused_with_a_reason(harness: Harness, library: Library) -> None:
    attributes = LAYERS["vqkv"](library).plan.attributes

    def reason(fields: list[Field]) -> str:
        assert harness.create("VQKVAttention", fields) is None
        return harness.said()

    def changed(which: str, **changes: Any) -> list[Field]:
        fields = {key: field(key, value) for key, value in attributes.items()}
        for key, value in changes.items():
            setattr(fields[which], key, value)
        return list(fields.values())

    all_of = changed("sets")
    assert reason([]) == "kvpack: the field num_heads is missing"
    assert "are fields that the op does not have, or twice" in reason([*all_of, field("more", 1)])
    assert "are fields that the op does not have, or twice" in reason([*all_of, field("sets", 1)])
    for name in attributes:
        wrong = f"the field {name} has another type or length"
        assert wrong in reason(changed(name, data=None))
        assert wrong in reason(changed(name, type=99))
        for length in (-1, 0, 65, 1 << 30):
            assert wrong in reason(changed(name, length=length))
    assert "a field has no name" in reason(changed("sets", name=None))
    for name, value, said in (
        ("layout", "columns", "layout is none that kvpack knows"),
        ("head_dim", 65, "head_dim 65 is not 64, 96, 128 or 256"),
        ("num_heads", 1 << 30, "q, k and v are too large"),
        ("k_entries", 512, "k_entries=512: the kernels take 2 to 256 codewords"),
    ):
        assert said in reason([field(*each) for each in (attributes | {name: value}).items()])


def test_tensors_that_do_not_fit_are_refused_with_a_reason(harness: Harness, library: Library) -> None:
    layer = LAYERS["dense, observing"](library)
    plugin = layer.launch = Plugin(harness, layer)
    layer.step(packed(layer, 2, 0))
    handle, inputs, outputs = harness.handle, plugin.inputs, plugin.outputs
    rest = inputs, len(inputs), outputs, len(outputs)
    aliases = (c_int32 * len(outputs))()
    assert handle.trt_describe(plugin.plugin, inputs, len(inputs), None, 0, outputs, aliases) == -1
    assert "needs the shape input select_width" in harness.said()
    assert handle.trt_workspace(plugin.plugin, inputs, len(inputs) - 2, outputs, len(outputs)) == -1
    assert "has 10 inputs beside shape inputs and 4 outputs, not 8 and 4" in harness.said()
    inputs[3].dims[0] = 3
    assert handle.trt_enqueue(plugin.context, *rest, None, None) != 0
    assert "takes as many sequences in state_k as in q, 2, and was given [3, 2, 129, 64]" in harness.said()
    inputs[3].dims[0] = 2
    inputs[0].dims[2] -= 8
    assert handle.trt_enqueue(plugin.context, *rest, None, None) != 0
    assert "takes q, k and v [batch, length, size]" in harness.said()
    inputs[0].type = FLOAT
    assert handle.trt_workspace(plugin.plugin, *rest) == -1
    assert "fp16 and bf16 alone" in harness.said()


def test_fields_and_shapes_that_were_tampered_with_do_no_harm(library: Library, tmp_path: Path) -> None:
    checked = ["-g", "-DKVPACK_FUZZ", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() {}\n")
    if subprocess.run(["g++", *checked, probe, "-o", tmp_path / "probe"], capture_output=True, check=False).returncode:
        pytest.skip("g++ has no sanitizers here")
    lines = []
    attributes = {make(library).plan.op: make(library).plan.attributes for make in LAYERS.values()} | ELEMENTWISE
    for op, values in attributes.items():
        lines.append(f"op {op}")
        for name, value in values.items():
            kind = "s" if isinstance(value, str) else "f" if isinstance(value, float) else "i"
            lines.append(" ".join([kind, name, *map(str, value if isinstance(value, tuple) else [value])]))
    nodes = tmp_path / "nodes.txt"
    nodes.write_text("\n".join(lines))
    environment = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1"}
    command = [compiled(library.path, *checked, program=True), nodes, "40000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made, refused = (int(word) for word in done.stdout.replace(",", "").split() if word.isdigit())
    assert made > 5000 and refused > 10000
