"""From an engine's ONNX model to the graph that TensorRT's parser reads."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from plugins.graph import DOMAIN

VERSION = "1"  # of the plugins
SHAPE_INPUTS = ("live", "select_width")  # numbers that the host reads


def write_graph(model: Path, out: Path, plugins: bool) -> None:
    """Write the graph of a plan to `out`, beside the model whose weights it shares.

    plugins: whether the nodes of the domain kvpack stay, as plugins. Otherwise their bodies take their place.
    """
    loaded = ir.load(model)
    if plugins:
        as_plugins(loaded)
    else:
        inline(loaded)
    ir.save(loaded, out)


def as_plugins(model: ir.Model) -> None:
    """Nodes of the domain kvpack without bodies, with the attributes by which the parser finds their plugins.

    Numbers of the host become shape inputs of one element.
    """
    graph = model.graph
    vectors: dict[str, ir.Value] = {}
    for value in graph.inputs:
        if value.name in SHAPE_INPUTS:
            axes = ir.Value(name=f"{value.name}.axes", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]),
                            const_value=ir.tensor([0], ir.DataType.INT64, name=f"{value.name}.axes"))  # fmt: skip
            graph.register_initializer(axes)
            node = ir.Node("", "Unsqueeze", [value, axes], name=f"{value.name}.vector")
            vectors[value.name] = node.outputs[0]
            node.outputs[0].name, node.outputs[0].type = f"{value.name}.vector", value.type
            node.outputs[0].shape = ir.Shape([1])
    for node in graph:
        if node.domain != DOMAIN:
            continue
        places = [place for place, value in enumerate(node.inputs) if value is not None and value.name in vectors]
        for place in places:
            node.replace_input_with(place, vectors[node.inputs[place].name])
        node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", DOMAIN)
        node.attributes["plugin_version"] = ir.AttrString("plugin_version", VERSION)
        if places:
            name = "tensorrt_plugin_shape_input_indices"
            node.attributes[name] = ir.AttrInt64s(name, places)
        node.overload = ""
    graph.insert_before(graph[0], [vector.producer() for vector in vectors.values()])
    model.functions.clear()


def inline(model: ir.Model) -> None:
    """The bodies of all functions in the place of their nodes: TensorRT's parser knows neither overloads nor optional
    inputs of functions."""
    from onnx_ir.passes.common import InlinePass

    for function in model.functions.values():
        for number, node in enumerate(function):
            node.name = f"{function.name}/{node.op_type}_{number}"  # by which errors and layers are told
    InlinePass()(model)
    model.opset_imports.pop(DOMAIN, None)
