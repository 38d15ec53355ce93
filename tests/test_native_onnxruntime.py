"""The ops that ONNX Runtime loads, compiled for its CPU provider: every signature, with the kernels stood in for."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import debian
import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import ort_headers
import pytest
from engines import make_engine
from native import ROOT, emulated

from export.passes import _attribute
from plugins.cache import cache_folder
from plugins.contract import ONNX_TYPES, state_sizes
from plugins.deltakv import onnx_body as deltakv
from plugins.deltakv.config import DeltaKVConfig
from plugins.dense import onnx_body as dense
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.graph import Body, NodePlan
from plugins.intkv import onnx_body as intkv
from plugins.intkv.config import Int4Config, KIVI2Config
from plugins.layer import LayerSpec
from plugins.native import library
from plugins.vqkv import onnx_body as vqkv
from plugins.vqkv.config import VQKVConfig
from runtime import Engine
from runtime.canary import log_softmax

HEADS, DIM, BATCH, CAPACITY, LIMIT = 2, 32, 2, 96, 200
NUMBERS = {ir.DataType.FLOAT16: 0, ir.DataType.BFLOAT16: 1}
TABLE_NAMES = {
    "vqkv": [f"{side}_{name}" for side in "kv" for name in vqkv.TABLES],
    "deltakv": ["center", "compress", "decompress", "gate", "up", "down"],
    "intkv": ["center"],
    "dense": [],
}


def build(real_dense: bool = False) -> Path:
    """The ops over the recorder of calls; real_dense: with the emulated kernels of the dense op."""
    try:
        headers = ort_headers.find()
    except debian.Unavailable as error:
        pytest.skip(str(error))
    sources = [ROOT / "src" / "onnxruntime.cc", Path(__file__).parent / "recorder.cc"]
    kernels = [emulated().path] if real_dense else []
    parts = [*sources, *(ROOT / "src").glob("*.h"), ROOT / "kvpack.h"]
    digest = hashlib.sha256(b"".join([*(p.read_bytes() for p in parts), str(kernels).encode()])).hexdigest()[:16]
    out = cache_folder() / "emulated" / f"libort-{digest}.so"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-DKVPACK_EMULATE"]
            flags += [f"-I{ROOT}", f"-I{headers}", "-fvisibility=hidden", *(["-DREAL_DENSE"] if real_dense else [])]
            subprocess.run(
                ["g++", *flags, *sources, *kernels, "-Wl,-rpath," + str(out.parent), "-o", f"{work}/o.so"], check=True
            )
            os.replace(f"{work}/o.so", out)
    return out


@pytest.fixture(scope="module")
def path() -> Path:
    return build()


def layer(window: int = 0, rope: bool = True, **changes: Any) -> LayerSpec:
    spec = {"layer": 0, "num_heads": 6, "num_kv_heads": HEADS, "head_dim": DIM, "scale": 0.25, "softcap": 30.0}
    spec |= {"window": window, "rope": 0 if rope else None, "rotary_dim": 16 if rope else 0}
    return LayerSpec(**(spec | changes))


GEOMETRY = Geometry(sinks=2, window=8, block=16)
SHAPE = {"sinks": 2, "window": 8, "block": 16}
VQ = {"head_dim": DIM, "k_groups": 8, "v_groups": 8, "k_stages": (8, 4), "v_stages": (8,), **SHAPE}
DELTA = {"head_dim": DIM, "kv_heads": HEADS, "stride": 5, "neighbors": 2, "full_layers": (0,), **SHAPE}
CODED = DELTA | {"latents": "24x4+8x8"}


def plans(state: ir.DataType) -> dict[str, tuple[NodePlan, Geometry | None]]:
    def vq(**changes: Any) -> tuple[NodePlan, Geometry]:
        config = VQKVConfig(**(VQ | {"k_entries": 16, "v_entries": 16} | changes))
        return vqkv.plan(layer(), config, state), config.geometry()

    def delta(spec: LayerSpec, limit: int = LIMIT, **config: Any) -> tuple[NodePlan, Geometry]:
        made = DeltaKVConfig(**config)
        return deltakv.plan(spec, made, state, limit), made.geometry()

    def integers(config: Any, spec: LayerSpec) -> tuple[NodePlan, Geometry]:
        return intkv.plan(spec, config, state), config.geometry()

    swiglu = {"compressor": "swiglu", "hidden": 8}
    tiles = {"key_space": "post_rope", "k_stages": (8, 8, 2), "k_entries": 256, "v_entries": 256, "layout": "tiles"}
    return {
        "dense": (dense.plan(layer(), state), None),
        "dense, no RoPE": (dense.plan(layer(rope=False), state), None),
        "dense, sliding window": (dense.plan(layer(window=7), state), None),
        "dense, observing": (dense.plan(layer(), state, GEOMETRY), GEOMETRY),
        "vqkv": vq(),
        "vqkv, tables of a layer, after RoPE": vq(tables="layer", key_space="post_rope"),
        "vqkv, tiles": vq(**tiles),
        "deltakv, 16-bit latents": delta(layer(), **DELTA, latents="24x16"),
        "deltakv, 16-bit latents, wide indices": delta(layer(), 1 << 20, **DELTA, latents="24x16"),
        "deltakv, codes": delta(layer(), **CODED),
        "deltakv, codes, no RoPE": delta(layer(rope=False), **CODED),
        "deltakv, codes, wide indices, selecting": delta(layer(), 1 << 20, **CODED, select_fraction=0.5),
        "deltakv, coded references": delta(layer(), **CODED, reference_bits=8, **swiglu),
        "deltakv, everything": delta(layer(), **CODED, reference_bits=8, **swiglu, select_count=20),
        "deltakv, everything, no RoPE": delta(layer(rope=False), **CODED, reference_bits=8, select_count=20),
        "intkv": integers(Int4Config(DIM, **SHAPE), layer()),
        "intkv, no mean, no RoPE": integers(Int4Config(DIM, mean=False, **SHAPE), layer(rope=False)),
        "intkv, scales along tokens": integers(KIVI2Config(DIM, **SHAPE | {"block": 32}), layer()),
    }


class Node:
    """One node in a graph of its own; table n of its op is full of n."""

    def __init__(
        self, path: Path, plan: NodePlan, geometry: Geometry | None, state: ir.DataType, packed: bool = False
    ) -> None:
        self.plan, self.state_type, self.packed = plan, state, packed
        sizes = state_sizes(CAPACITY, geometry, BATCH)
        self.dims = {
            name: [sizes.get(d, d) if isinstance(d, str) else d for d in shape]
            for name, (_, shape) in plan.states.items()
        }
        op = library.OPS[plan.op]
        values: dict[str, ir.Value | None] = {}
        rope = plan.attributes["rotary_dim"] > 0
        self.arrays: dict[str, np.ndarray] = {}
        for name in plan.inputs:
            if name in ("cos", "sin"):
                values[name] = self._input(name, np.zeros((LIMIT, 8), np.float32)) if rope else None
            elif name in TABLE_NAMES[op]:
                number = TABLE_NAMES[op].index(name) + 1
                values[name] = self._input(name, np.full((2, 2), number, np.float32))
            elif name in plan.states:
                dtype = plan.states[name][0]
                values[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([None] * 4))
            elif packed and name in ("k", "v"):
                values[name] = None
            elif name in ("q", "k", "v"):
                values[name] = ir.Value(name=name, type=ir.TensorType(state), shape=ir.Shape([None] * 3))
            else:
                rank = {"live": 0, "select_width": 0, "enc_src": 2, "enc_dst": 2, "selected": 2}.get(name, 1)
                dtype = ir.TensorType(ir.DataType.INT32)
                values[name] = ir.Value(name=name, type=dtype, shape=ir.Shape([None] * rank))
        node = ir.Node(
            "kvpack",
            plan.op,
            list(values.values()),
            [_attribute(name, value) for name, value in plan.attributes.items()],
            num_outputs=len(plan.outputs),
        )
        for value, name in zip(node.outputs, plan.outputs, strict=True):
            held = plan.states.get(name.removesuffix("_out"))
            dtype = ir.DataType.INT32 if name == "selected" else held[0] if held else state
            value.name, value.type = name, ir.TensorType(dtype)
            value.shape = ir.Shape([None] * {"selected": 2, "out": 3}.get(name, 4))
        inputs = [x for x in values.values() if x is not None]
        graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 23, "kvpack": 1}, name="one")
        proto = ir.to_proto(ir.Model(graph, ir_version=10, functions=[plan.function(Body(), "")]))
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(path))
        options.log_severity_level = 4
        self.session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _input(self, name: str, array: np.ndarray) -> ir.Value:
        self.arrays[name] = array
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None] * array.ndim))

    def run(
        self, length: int, encode: int, in_place: bool = True, changed: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """One step; returns the outputs, states as their bits. changed: other inputs than the usual ones."""
        plan, spec = self.plan, self.plan.attributes
        arrays = dict(self.arrays)
        half = self.state_type.numpy()
        heads = {"q": spec["num_heads"], "k": HEADS, "v": HEADS}
        full = {name: np.full((BATCH, length, n * DIM), "qkv".index(name) + 1, half) for name, n in heads.items()}
        arrays |= {"q": np.concatenate(list(full.values()), axis=2)} if self.packed else full
        arrays |= changed or {}
        host = {"past_len": [40, 30], "new_len": [length, 1], "live": 64, "select_len": [5, 4], "select_width": 6}
        arrays |= {name: np.array(value, np.int32) for name, value in host.items() if name in plan.inputs}
        for name in ("enc_src", "enc_dst"):
            arrays |= {name: np.zeros((BATCH, encode), np.int32)} if name in plan.inputs else {}
        if "selected" in plan.inputs:
            arrays["selected"] = np.full((BATCH, 6), 9, np.int32)
        results = {"out": np.full((BATCH, length, spec["num_heads"] * DIM), 1, half)}
        if "selected" in plan.outputs:
            results["selected"] = np.zeros((BATCH, 6), np.int32)
        for name, (dtype, _) in plan.states.items():
            arrays[name] = np.full(self.dims[name], 3, dtype.numpy())
            results[f"{name}_out"] = arrays[name] if in_place else np.zeros(self.dims[name], dtype.numpy())
        binding = self.session.io_binding()
        for bind, found in ((binding.bind_ortvalue_input, arrays), (binding.bind_ortvalue_output, results)):
            for name, array in found.items():
                bind(name, value(array))
        self.session.run_with_iobinding(binding)
        self.given = arrays
        return results


def value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_TYPES["bfloat16"])
    return ort.OrtValue.ortvalue_from_numpy(array)


def recorded(path: Path) -> list[dict[str, Any]]:
    tell = ctypes.CDLL(str(path)).recorded
    tell.restype = ctypes.c_char_p
    return [json.loads(line) for line in tell().decode().splitlines()]


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("state", NUMBERS, ids=lambda state: state.name)
@pytest.mark.parametrize("name", list(plans(ir.DataType.FLOAT16)))
def test_a_node_of_every_kind_reaches_its_kernel_with_what_it_holds(
    path: Path, name: str, state: ir.DataType, packed: bool
) -> None:
    plan, geometry = plans(state)[name]
    node = Node(path, plan, geometry, state, packed)
    row = (6 + 2 * HEADS) * DIM if packed else 0  # 0: as wide as they are
    recorded(path)
    op, attributes = library.OPS[plan.op], plan.attributes
    for length, encode in ((20, 32), (1, 0), (1, 16)):
        results = node.run(length, encode)
        calls = recorded(path)
        prepared = [call for call in calls if call["op"] == "prepare"]
        assert len(prepared) == (op in ("vqkv", "deltakv") and length == 20)  # once, in the first step
        (call,) = [call for call in calls if call["op"] != "prepare"]
        assert call["op"] == op and call["dtype"] == NUMBERS[state]
        assert (call["batch"], call["length"], call["past"], call["new"]) == (BATCH, length, 40, length)
        assert (call["q_row"], call["kv_row"]) == (row, row)
        for number, each in enumerate("qkv", 1):
            assert call[each] == [int(np.array(number, state.numpy()).view(np.uint16))] * 2
        assert call["live"] == 64 and call["encode"] == (0 if op == "dense" else encode)
        assert call["workspace"] == 640 and call["aligned"]
        rope = attributes["rotary_dim"] > 0
        assert (call["rope"], call["rope_rows"]) == (rope, LIMIT if rope else 0)
        for key, wanted in attributes.items():
            key, wanted = told(key, wanted)
            assert call.get(key, wanted) == wanted, key
        for field, wanted in sizes(node, op, name).items():
            assert call[field] == wanted, field
        if "firsts" in call:
            names = TABLE_NAMES[op]
            assert call["firsts"] == [n if name in plan.inputs else -1 for n, name in enumerate(names, 1)]
        assert not results["out"].astype(np.float32).any()
        for held in plan.states:  # marked by the kernel, where the caller put it
            assert results[f"{held}_out"].reshape(-1).view(np.int8)[0] == 77
            assert results[f"{held}_out"] is node.given[held]
        if "selected" in results:
            assert results["selected"].tolist() == [[5] * 6, [4] * 6]


def told(key: str, wanted: Any) -> tuple[str, Any]:
    """An attribute as the recorder tells it."""
    renamed = {"key_space": ("pre_rope", "pre_rope"), "layout": ("layout", "tiles"), "k_axis": ("k_channel", "channel")}
    if key in renamed:
        return renamed[key][0], int(wanted == renamed[key][1])
    if key in ("scale", "softcap"):
        return key, int(wanted * 1e6)
    return key, list(wanted) if isinstance(wanted, tuple) else wanted


def sizes(node: Node, op: str, name: str) -> dict[str, int]:
    dims, plan = node.dims, node.plan
    if op == "dense":
        observed = "selected" in plan.outputs
        return {"rows": dims["state_k"][2], "observed": observed, "select_width": 6 if observed else 0}
    if op == "vqkv":
        return {"code_rows": dims["codes_k"][2] * (16 if "tiles" in name else 1), "prepared": 5}
    if op == "intkv":
        scales, center = dims["scales_k"][2], 1 if "center" in plan.inputs else -1
        return {"code_rows": dims["codes_k"][2], "scale_rows": scales, "center": center}
    chosen = "selected" in plan.inputs
    return {
        "code_rows": dims["latents"][2], "ref_rows": dims["references"][2], "index_bytes": 4 if "wide" in name else 2,
        "selected": 9 if chosen else -1, "select_len": 5 if chosen else -1, "select_width": 6 if chosen else 0,
        "scales": "scales" in plan.states, "reference_scales": "reference_scales" in plan.states, "prepared": 5,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dense", "vqkv", "deltakv, everything", "intkv"])
def test_a_state_that_is_not_bound_in_place_is_copied_first(path: Path, name: str) -> None:
    plan, geometry = plans(ir.DataType.FLOAT16)[name]
    node = Node(path, plan, geometry, ir.DataType.FLOAT16)
    results = node.run(5, 0, in_place=False)
    for held in plan.states:
        before, after = node.given[held], results[f"{held}_out"]
        assert (before.astype(np.float32) == 3).all()
        assert after.reshape(-1).view(np.int8)[0] == 77 and (after.reshape(-1)[1:].astype(np.float32) == 3).all()


def test_what_a_kernel_says_is_what_the_run_says(path: Path) -> None:
    plan, geometry = plans(ir.DataType.FLOAT16)["vqkv"]
    node = Node(path, plan, geometry, ir.DataType.FLOAT16)
    with pytest.raises(Exception, match="13 tokens bring no luck"):
        node.run(13, 0)
    node.run(12, 0)


def test_q_k_and_v_of_other_sizes_are_told(path: Path) -> None:
    plan, geometry = plans(ir.DataType.FLOAT16)["dense"]
    words = r"sizes 192, 64 and 64, or all three in q of size 320, and was given \[2, 5, 192\], none and none"
    query = np.ones((BATCH, 5, 6 * DIM), np.float16)
    with pytest.raises(Exception, match=words):
        Node(path, plan, geometry, ir.DataType.FLOAT16, packed=True).run(5, 0, changed={"q": query})
    with pytest.raises(Exception, match=r"\[2, 5, 64\] and \[2, 5, 192\]"):
        Node(path, plan, geometry, ir.DataType.FLOAT16).run(5, 0, changed={"v": query})


def one_node(path: Path, op: str, state: ir.DataType, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    """A session of one node, without a function body."""
    values = [ir.Value(name=name, type=ir.TensorType(state)) for name in inputs]
    made = [_attribute(name, value) for name, value in attributes.items()]
    node = ir.Node("kvpack", op, values, made, num_outputs=len(outputs))
    for value, name in zip(node.outputs, outputs, strict=True):
        value.name, value.type = name, ir.TensorType(state)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23, "kvpack": 1}, name="one")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(path))
    options.log_severity_level = 4
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def shapes_of(session: Any, **arrays: np.ndarray) -> list[list[int]]:
    """Of the outputs of a run."""
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, value(array))
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    return [out.shape() for out in binding.get_outputs()]


@pytest.mark.parametrize("state", NUMBERS, ids=lambda state: state.name)
def test_what_lies_between_attentions_reaches_its_kernel(path: Path, state: ir.DataType) -> None:
    half = state.numpy()
    norm = one_node(path, "AddRMSNormalization", state, ["x", "y", "weight"], ["sum", "out"], epsilon=0.25)
    x = np.ones((2, 3, 24), half)
    recorded(path)
    found = shapes_of(norm, x=x, y=x, weight=np.ones(24, half))
    (call,) = recorded(path)
    wanted = {"op": "add_rms_norm", "dtype": NUMBERS[state], "rows": 6, "columns": 24, "epsilon": 250000, "end": 0}
    assert call == wanted and found == [[2, 3, 24]] * 2
    with pytest.raises(Exception, match="x and y of one shape and a weight of their last dimension"):
        shapes_of(norm, x=x, y=x[:1], weight=np.ones(24, half))
    for number, activation in enumerate(("silu", "gelu_tanh", "gelu")):
        gate = one_node(path, "GatedActivation", state, ["x"], ["out"], activation=activation)
        found = shapes_of(gate, x=x)
        (call,) = recorded(path)
        wanted = {"op": "gated_activation", "dtype": NUMBERS[state], "activation": number, "rows": 6, "columns": 12}
        assert call == wanted | {"end": 0} and found == [[2, 3, 12]]
    with pytest.raises(Exception, match="does not know the activation relu"):
        one_node(path, "GatedActivation", state, ["x"], ["out"], activation="relu")
    with pytest.raises(Exception, match="an even last dimension"):
        shapes_of(gate, x=np.ones((2, 3), half))


def test_a_layer_without_a_kernel_does_not_load(path: Path) -> None:
    plan = dense.plan(layer(head_dim=24, rotary_dim=8), ir.DataType.FLOAT16)
    with pytest.raises(Exception, match="head_dim 24 is odd"):
        Node(path, plan, None, ir.DataType.FLOAT16)


# -- which library, and whether it will do


def config(op: str = "DenseAttention", head_dim: int = 64, **changes: Any) -> dict[str, Any]:
    plan = dense.plan(layer(head_dim=head_dim), ir.DataType.FLOAT16)
    return {"dtype": "fp16", "kv_dtype": "fp16", "nodes": [{"op": op, "attributes": plan.attributes}]} | changes


def test_the_library_is_the_named_one_then_the_variables_then_the_built_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPACK_CACHE", str(tmp_path))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    with pytest.raises(UserError, match="no native library was built: run `python -m plugins build`"):
        library.find()
    built = library.default_path()
    built.parent.mkdir()
    built.write_bytes(path.read_bytes())
    assert library.find() == built and library.choose(config()) == (built, "")
    other = tmp_path / "other.so"
    monkeypatch.setenv(library.VARIABLE, str(other))
    with pytest.raises(UserError, match=r"there is no native library .*other\.so"):
        library.find()
    other.write_bytes(path.read_bytes())
    assert library.find() == other and library.find(built) == built
    monkeypatch.setenv(library.VARIABLE, "none")
    assert library.choose(config()) == (None, "native kernels were not wanted")
    assert library.find(str(other)) == other
    assert library.choose(config(), False) == (None, "native kernels were not wanted")


def test_the_built_library_is_found_only_as_long_as_its_sources_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library.default_path()
    (tmp_path / "src").mkdir()
    for file in [library.ROOT / "kvpack.h", *(library.ROOT / "src").glob("*.*")]:
        (tmp_path / file.relative_to(library.ROOT)).write_bytes(file.read_bytes())
    monkeypatch.setattr(library, "ROOT", tmp_path)
    assert library.default_path() == before
    with open(tmp_path / "src" / "step.cu", "a") as source:
        source.write("\n")
    assert library.default_path() != before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp32"}, "dtype fp32 with a cache in fp16: build it with --dtype bf16"),
        ({"kv_dtype": "bf16"}, "dtype fp16 with a cache in bf16"),
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32 with a cache in fp32"),
        ({"nodes": [{"op": "OtherAttention", "attributes": {}}]}, "OtherAttention of this engine (it is unknown"),
        (config(head_dim=40), "DenseAttention of this engine (head_dim 40 is odd)"),
    ],
)
def test_an_engine_that_the_library_cannot_run_is_told_why(path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        library.choose(config() | changes, path)
    assert words in str(caught.value)


def test_an_engine_of_an_older_build_is_told_so(path: Path) -> None:
    old = config()
    del old["nodes"]
    with pytest.raises(UserError, match="does not tell its attentions: build it again"):
        library.choose(old, path)


def test_a_library_without_operators_and_a_file_that_is_none_are_told(tmp_path: Path) -> None:
    source, out = tmp_path / "x.cc", tmp_path / "x.so"
    ops = [f"int kvpack_{op}_supported(void *, void *) {{ return 0; }}" for op in library.OPS.values()]
    source.write_text('extern "C" { int kvpack_abi() { return 2; } const char *kvpack_last_error() { return ""; }\n'
                      + "\n".join(sorted(set(ops))) + "}\n")  # fmt: skip
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", out], check=True)
    with pytest.raises(UserError, match="was compiled without ONNX Runtime's headers"):
        library.choose(config(), out)
    with pytest.raises(UserError, match="is not a kvpack library"):
        library.choose(config(), source)


# -- an engine with real kernels


def logits(engine: Engine, rows: Sequence[np.ndarray], prompts: Sequence[int], steps: int) -> np.ndarray:
    with engine.session(batch=len(rows)) as session:
        found = [session.prefill([row[:n].tolist() for row, n in zip(rows, prompts, strict=True)])[:, 0]]
        for step in range(steps):
            found.append(session.decode([int(row[n + step]) for row, n in zip(rows, prompts, strict=True)]))
    return np.stack(found, axis=1)


def test_an_engine_with_the_dense_kernels_equals_its_function_bodies(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 1, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_engine(tmp_path / "e", "llama", None, {"dtype": "fp16", "kv_dtype": "fp16"}, **changes)
    rows = [np.random.default_rng(seed).integers(3, 250, 40) for seed in range(2)]
    with Engine.open(tmp_path / "e", threads=1) as engine:
        wanted = logits(engine, rows, (17, 3), 4)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(build(real_dense=True)))
        model = tmp_path / "e" / "model.onnx"
        engine.backend.inference = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        found = logits(engine, rows, (17, 3), 4)
    true, got = log_softmax(wanted), log_softmax(found)
    assert float((np.exp(true) * (true - got)).sum(-1).max()) < 1e-5
    assert (wanted.argmax(-1) == found.argmax(-1)).mean() > 0.9
