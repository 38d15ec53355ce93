"""Fewer and larger nodes: products of one input become one product, and what lies between products one op.

Patterns are those of a traced transformers model; where one does not match, the nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from plugins.elementwise import ADD_NORM, GATED, add_norm, gated
from plugins.graph import DOMAIN
from plugins.layer import LayerSpec

SWAP = (0, 2, 1, 3)  # [B, S, H, D] to [B, H, S, D] and back


def fuse(model: ir.Model, attentions: Sequence[tuple[ir.Node, LayerSpec]]) -> None:
    """attentions: the nodes that take q, k and v and give out, all [B, S, heads * D]. Afterwards a node whose q, k and
    v are one product has them in one tensor [B, S, (Hq + 2 H) D] as its only input."""
    graph = model.graph
    for node, spec in attentions:
        _fold_reshapes(node, spec)
        _pack_attention(graph, node, spec)
    functions = Functions(model)
    for node in list(graph):
        if node.op_type == "Mul":
            _fuse_gate(graph, node, functions)
        elif node.op_type == "RMSNormalization":
            _fuse_norm(graph, node, functions)
    _sweep(graph)


class Functions:
    """The bodies of a model's nodes, one for each set of attributes."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.overloads: dict[tuple[object, ...], str] = {}

    def overload(self, op: str, attributes: tuple[object, ...], make: Callable[[str], ir.Function]) -> str:
        """The overload of `op` whose body make(overload) is; made where there is none of these attributes."""
        key = (op, *attributes)
        if key not in self.overloads:
            others = any(name == op for name, *_ in self.overloads)
            self.overloads[key] = f"v{len(self.overloads)}" if others else ""
            function = make(self.overloads[key])
            self.model.functions[function.identifier()] = function
        return self.overloads[key]


@dataclass
class _Product:
    """value = x @ weight + bias, with constant weight [K, N] and bias [N]."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def _fold_reshapes(node: ir.Node, spec: LayerSpec) -> None:
    """Let the attention read and give [B, S, heads * D] without a detour over other shapes."""
    for place, value in enumerate(node.inputs):
        source = value
        while _made_by(source, "Reshape"):
            source = source.producer().inputs[0]
        width = (spec.num_kv_heads if place else spec.num_heads) * spec.head_dim
        if _is_rows(source, width):
            node.replace_input_with(place, source)
            continue
        if not _swaps(source):
            continue
        normed = source.producer().inputs[0]  # of a normalised head, swapped there and back
        if _made_by(normed, "RMSNormalization") and _swaps(normed.producer().inputs[0]):
            norm = normed.producer()
            normed.shape = source.shape
            norm.replace_input_with(0, norm.inputs[0].producer().inputs[0])
            source.replace_all_uses_with(normed)
    last = node.outputs[0]
    while len(last.uses()) == 1 and last.consumers()[0].op_type == "Reshape" and last.uses()[0].idx == 0:
        last = last.consumers()[0].outputs[0]
    if last is not node.outputs[0] and _is_rows(last, spec.num_heads * spec.head_dim):
        last.replace_all_uses_with(node.outputs[0])


def _pack_attention(graph: ir.Graph, node: ir.Node, spec: LayerSpec) -> None:
    q, k, v = node.inputs
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    whole = _sliced(node.inputs, sizes)
    if whole is None:
        ends = [_before_norms(value) for value in node.inputs]
        whole = _packed(graph, ends)
        if whole is None:
            return
        if ends != [q, k, v]:  # keys and queries are normalised in between
            split = ir.Node("", "Split", [whole, _constant(graph, sizes)], [ir.AttrInt64("axis", -1)], num_outputs=3)
            graph.insert_after(whole.producer(), split)
            for end, part in zip(ends, split.outputs, strict=True):
                part.shape, part.type = end.shape, end.type
                end.replace_all_uses_with(part)
            return
    for place, value in enumerate((whole, None, None)):
        node.replace_input_with(place, value)


def _fuse_gate(graph: ir.Graph, node: ir.Node, functions: Functions) -> None:
    for opened, up in (node.inputs, node.inputs[::-1]):
        activation, gate = _activated(opened)
        if gate is None or gate is up:
            continue
        split = gate.producer()
        halves = split is not None and split.op_type == "Split" and list(split.outputs) == [gate, up]
        if halves and split.attributes["axis"].as_int() in (-1, len(gate.shape) - 1):
            whole = split.inputs[0]
        else:
            whole = _packed(graph, (gate, up))
        if whole is None:
            continue
        overload = functions.overload(GATED, (activation,), partial(gated, activation))
        new = ir.Node(DOMAIN, GATED, [whole], [ir.AttrString("activation", activation)], overload=overload)
        _replace(graph, node, new, {node.outputs[0]: new.outputs[0]})
        return


def _fuse_norm(graph: ir.Graph, node: ir.Node, functions: Functions) -> None:
    total, weight = node.inputs
    if not _made_by(total, "Add") or weight.const_value is None or weight.dtype != total.dtype:
        return
    add = total.producer()
    shapes = [list(x.shape) for x in add.inputs if x.shape is not None and x.const_value is None]
    axis, stash = node.attributes["axis"].as_int(), node.attributes["stash_type"].as_int()
    if len(shapes) != 2 or shapes[0] != shapes[1] or axis not in (-1, len(shapes[0]) - 1) or stash != 1:
        return
    epsilon = node.attributes["epsilon"]
    overload = functions.overload(ADD_NORM, (epsilon.value,), partial(add_norm, epsilon.as_float()))
    new = ir.Node(DOMAIN, ADD_NORM, [*add.inputs, weight], [epsilon], overload=overload, num_outputs=2)
    _replace(graph, add, new, {total: new.outputs[0], node.outputs[0]: new.outputs[1]})


def _replace(graph: ir.Graph, place: ir.Node, new: ir.Node, values: dict[ir.Value, ir.Value]) -> None:
    """`new` where `place` is; its outputs take the names and the uses of the old values."""
    graph.insert_before(place, new)
    for old, value in values.items():
        value.name, value.type, value.shape = f"{old.name}_fused", old.type, old.shape
        old.replace_all_uses_with(value)


def _packed(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Value | None:
    """The products that `values` are, side by side as one product; None where they are not products of one input."""
    products = [_product(value) for value in values]
    if any(p is None or p.x is not products[0].x for p in products) or len(set(values)) < len(values):
        return None
    biases = [p.bias for p in products if p.bias is not None]
    if len(biases) not in (0, len(products)):
        return None
    weight = _joined(graph, [p.weight for p in products], 1)
    nodes = [ir.Node("", "MatMul", [products[0].x, weight])]
    if biases:
        nodes.append(ir.Node("", "Add", [nodes[0].outputs[0], _joined(graph, biases, 0)]))
    first = min((v.producer() for v in values), key=list(graph).index)
    graph.insert_before(first, nodes)
    out = nodes[-1].outputs[0]
    for n in nodes:
        n.outputs[0].name = f"{weight.name}_{n.op_type}"
        n.outputs[0].type, n.outputs[0].shape = values[0].type, ir.Shape([*values[0].shape[:-1], weight.shape[1]])
    return out


def _product(value: ir.Value) -> _Product | None:
    node, bias = value.producer(), None
    if _made_by(value, "Add"):
        sides = [x for x in node.inputs if x.const_value is None]
        if len(sides) != 1:
            return None
        bias = next(x for x in node.inputs if x.const_value is not None)
        node = sides[0].producer()
        if len(bias.shape) != 1 or len(sides[0].uses()) != 1:
            return None
    if node is None or node.op_type != "MatMul":
        return None
    x, weight = node.inputs
    if weight.const_value is None or len(weight.shape) != 2 or len(weight.uses()) != 1:
        return None
    return _Product(x, weight, bias)


def _joined(graph: ir.Graph, values: Sequence[ir.Value], axis: int) -> ir.Value:
    """Constants side by side, put together when they are written."""
    tensors = [value.const_value for value in values]
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    name = "+".join(value.name for value in values)
    tensor = ir.LazyTensor(
        lambda: ir.tensor(np.concatenate([t.numpy() for t in tensors], axis), dtype=tensors[0].dtype, name=name),
        dtype=tensors[0].dtype, shape=ir.Shape(shape), name=name,
    )  # fmt: skip
    return initializer(graph, name, tensor)


def _constant(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    name = "split_" + "_".join(map(str, numbers))
    if name in graph.initializers:
        return graph.initializers[name]
    return initializer(graph, name, ir.tensor(np.array(numbers, np.int64), name=name))


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A constant of the graph."""
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _sliced(values: Sequence[ir.Value], sizes: Sequence[int]) -> ir.Value | None:
    """What `values` are consecutive slices of, of these sizes along the last axis, if there is nothing else in it."""
    if not all(_made_by(value, "Slice") for value in values):
        return None
    whole, begin = values[0].producer().inputs[0], 0
    for value, size in zip(values, sizes, strict=True):
        source, *rest = value.producer().inputs
        numbers = [None if x is None or x.const_value is None else x.const_value.numpy().tolist() for x in rest]
        if len(numbers) < 3 or None in numbers:
            return None
        (start,), (end,), (axis,), *step = numbers
        if source is not whole or (start, min(end, whole.shape[-1])) != (begin, begin + size):
            return None
        if axis not in (-1, len(whole.shape) - 1) or step not in ([], [[1]]):
            return None
        begin += size
    return whole if whole.shape[-1] == begin else None


def _activated(value: ir.Value) -> tuple[str, ir.Value | None]:
    """The activation that made `value` and what it was applied to."""
    node = value.producer()
    if node is not None and node.op_type == "Gelu":
        approximate = node.attributes.get("approximate")
        return ("gelu_tanh" if approximate and approximate.as_string() == "tanh" else "gelu"), node.inputs[0]
    if node is not None and node.op_type == "Mul":
        for gate, sigmoid in (node.inputs, node.inputs[::-1]):
            if _made_by(sigmoid, "Sigmoid") and sigmoid.producer().inputs[0] is gate:
                return "silu", gate
    return "", None


def _before_norms(value: ir.Value) -> ir.Value:
    while _made_by(value, "Reshape") or _made_by(value, "RMSNormalization"):
        value = value.producer().inputs[0]
    return value


def _made_by(value: ir.Value | None, op_type: str) -> bool:
    node = value.producer() if value is not None else None
    return node is not None and node.domain == "" and node.op_type == op_type


def _swaps(value: ir.Value) -> bool:
    return _made_by(value, "Transpose") and tuple(value.producer().attributes["perm"].as_ints()) == SWAP


def _is_rows(value: ir.Value, width: int) -> bool:
    """Whether `value` is [B, S, width]."""
    return value.shape is not None and len(value.shape) == 3 and value.shape[-1] == width


def _sweep(graph: ir.Graph) -> None:
    """Remove what nothing reads."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
