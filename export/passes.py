"""From the traced graph to the engine's graph, as a list of small passes over one `onnx_ir` model.

Each pass states what it needs and what it leaves, and checks it; an error names the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from plugins.contract import HOST_INPUTS, OPTIONAL_OUTPUTS, TensorSpec
from plugins.graph import DOMAIN, NodePlan
from plugins.layer import LayerSpec

from .fuse import Functions, fuse, initializer
from .trace import OPAQUE

_HOST_NAMES = {"tokens": "input_ids"}


class PassError(RuntimeError):
    """A pass found its pre- or postcondition broken; the sentence names the pass."""


@dataclass
class Assembly:
    """A model on its way to an engine.

    specs, plans and tables are per layer: what the attention is, the node it becomes and the arrays it reads. ropes
    holds (cos, sin) [limit, rotary_dim / 2] by LayerSpec.rope. tiled: whether function bodies may loop, see
    `plugins.graph.Body`. inputs and outputs collect the tensor contract.
    """

    model: ir.Model
    specs: Sequence[LayerSpec]
    plans: Sequence[NodePlan]
    tables: Sequence[Mapping[str, np.ndarray]]
    ropes: Sequence[tuple[np.ndarray, np.ndarray]]
    tiled: bool = True
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @property
    def nodes(self) -> list[dict[str, object]]:
        return described(self.plans)


def described(plans: Sequence[NodePlan]) -> list[dict[str, object]]:
    """Op and attributes of every layer's node, as config.json tells them."""
    return [
        {
            "op": plan.op,
            "attributes": {
                name: list(value) if isinstance(value, tuple) else value for name, value in plan.attributes.items()
            },
        }
        for plan in plans
    ]


def _require(condition: bool, name: str, sentence: str) -> None:
    if not condition:
        raise PassError(f"pass {name}: {sentence}")


def check_trace(a: Assembly) -> None:
    """Needs: a traced graph. Leaves it unchanged, with exactly one opaque attention per layer, in layer order."""
    layers = [n.attributes["layer"].as_int() for n in a.graph if (n.domain, n.op_type) == (DOMAIN, OPAQUE)]
    expected = [spec.layer for spec in a.specs]
    _require(layers == expected, "check_trace", f"the graph has attentions of layers {layers}, expected {expected}")
    _require(len(a.plans) == len(expected), "check_trace", f"{len(a.plans)} plans for {len(expected)} layers")


def fuse_nodes(a: Assembly) -> None:
    """Needs: one opaque attention per layer, of q, k and v. Leaves fewer nodes; an attention whose q, k and v are one
    product has that as its only input."""
    opaque = [n for n in a.graph if (n.domain, n.op_type) == (DOMAIN, OPAQUE)]
    fuse(a.model, list(zip(opaque, a.specs, strict=True)))


def insert_nodes(a: Assembly) -> None:
    """Needs: one opaque attention per layer. Leaves each replaced by its method's node, with tables and state wired.

    An output that is neither "out" nor a state is what later nodes read as an input of that name, the latest one's,
    and an output of the engine that the host may leave unread.
    """
    host = _host_inputs(a)
    shared = [_rope_initializers(a.graph, i, pair) for i, pair in enumerate(a.ropes)]
    functions = Functions(a.model)
    carried: dict[str, ir.Value] = {}  # what the layers so far made for later ones
    opaque = [n for n in a.graph if (n.domain, n.op_type) == (DOMAIN, OPAQUE)]
    for node, spec, plan, tables in zip(opaque, a.specs, a.plans, a.tables, strict=True):
        values: dict[str, ir.Value | None] = dict(zip(("q", "k", "v"), node.inputs, strict=True)) | host
        values |= carried | {"cos": None, "sin": None}
        if spec.rope is not None:
            values |= dict(zip(("cos", "sin"), shared[spec.rope], strict=True))
        for name, array in tables.items():
            values[name] = _initializer(a.graph, f"layer{spec.layer}.{name}", array)
        states = {}
        for name, (dtype, shape) in plan.states.items():
            states[name] = _state_input(a, f"layer{spec.layer}.{name}", dtype, shape)
        values |= states
        missing = [name for name in plan.inputs if name not in values]
        _require(not missing, "insert_nodes", f"{plan.op} of layer {spec.layer} has no value for {missing}")
        packed = values["k"] is None
        attributes = (packed, *sorted(plan.attributes.items()))
        overload = functions.overload(plan.op, attributes, lambda name, p=plan, k=packed: p.body(name, k, a.tiled))
        new = ir.Node(
            DOMAIN,
            plan.op,
            [values[name] for name in plan.inputs],
            [_attribute(name, value) for name, value in plan.attributes.items()],
            overload=overload,
            num_outputs=len(plan.outputs),
            name=f"layer{spec.layer}.attention",
        )
        out = node.outputs[0]
        new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = f"{out.name}_kv", out.type, out.shape
        for output, name in zip(new.outputs[1:], plan.outputs[1:], strict=True):
            state = states.get(name.removesuffix("_out"))
            if state is None:
                _require(name in OPTIONAL_OUTPUTS, "insert_nodes", f"{plan.op} has the unknown output {name!r}")
                dtype, shape = OPTIONAL_OUTPUTS[name]
                output.name, output.shape = f"layer{spec.layer}.{name}", ir.Shape(shape)
                output.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
                a.outputs.append(TensorSpec(output.name, name, dtype, shape))
                carried[name] = output
            else:
                output.name, output.type, output.shape = f"{state.name}_out", state.type, state.shape
                a.outputs.append(TensorSpec(output.name, "state", _numpy(output.dtype), tuple(_dims(state.shape))))
            a.graph.outputs.append(output)
        a.graph.insert_before(node, new)
        out.replace_all_uses_with(new.outputs[0])
        a.graph.remove(node, safe=True)
    a.graph.opset_imports[DOMAIN] = 1


def check_graph(a: Assembly) -> None:
    """Needs: method nodes. Leaves the graph unchanged: nothing opaque, no unused input, state in and out in pairs."""
    left = [n.name for n in a.graph if n.op_type == OPAQUE and n.domain == DOMAIN]
    _require(not left, "check_graph", f"opaque attentions are left: {left}")
    unused = [v.name for v in a.graph.inputs if not v.uses()]
    _require(not unused, "check_graph", f"inputs {unused} are not used")
    states = {s.alias for s in a.inputs if s.role == "state"}
    written = {s.name for s in a.outputs if s.role == "state"}
    _require(states == written, "check_graph", f"state inputs and outputs differ by {states ^ written}")
    known = {(DOMAIN, n.op_type, n.overload) for n in a.graph if n.domain == DOMAIN}
    _require(known == set(a.model.functions), "check_graph", "a node has no function body, or a body no node")


PASSES: tuple[Callable[[Assembly], None], ...] = (check_trace, fuse_nodes, insert_nodes, check_graph)


def assemble(a: Assembly) -> None:
    """Run the passes in order."""
    for step in PASSES:
        step(a)


def _host_inputs(a: Assembly) -> dict[str, ir.Value]:
    """The inputs the host fills: those the trace has already, and those some plan asks for."""
    a.outputs.append(TensorSpec("logits", "logits", "float32", ("batch", "picks", a.graph.outputs[0].shape[2])))
    values: dict[str, ir.Value] = {}
    for role, (dtype, shape) in HOST_INPUTS.items():
        name = _HOST_NAMES.get(role, role)
        value = next((v for v in a.graph.inputs if v.name == name), None)
        if value is None:
            if not any(role in plan.inputs for plan in a.plans):
                continue
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))))
            a.graph.inputs.append(value)
        value.shape = ir.Shape(shape)
        values[role] = value
        a.inputs.append(TensorSpec(name, role, dtype, shape))
    return values


def _state_input(a: Assembly, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    a.graph.inputs.append(value)
    a.inputs.append(TensorSpec(name, "state", _numpy(dtype), tuple(shape), alias=f"{name}_out"))
    return value


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    return initializer(graph, name, ir.tensor(np.ascontiguousarray(array), name=name))


def _rope_initializers(graph: ir.Graph, index: int, pair: tuple[np.ndarray, np.ndarray]) -> list[ir.Value]:
    return [_initializer(graph, f"rope{index}.{n}", x) for n, x in zip(("cos", "sin"), pair, strict=True)]


def _attribute(name: str, value: int | float | str | tuple[int, ...]) -> ir.Attr:
    make = {int: ir.AttrInt64, float: ir.AttrFloat32, str: ir.AttrString, tuple: ir.AttrInt64s}[type(value)]
    return make(name, value)


def _numpy(dtype: ir.DataType) -> str:
    return np.dtype(dtype.numpy()).name


def _dims(shape: ir.Shape) -> list[int | str]:
    return [d if isinstance(d, int) else d.value for d in shape]
