"""What lies between the matrix products of a layer, as ONNX functions: one native kernel each."""

from __future__ import annotations

import onnx_ir as ir

from .graph import Body, named

ADD_NORM, GATED = "AddRMSNormalization", "GatedActivation"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def add_norm(epsilon: float, overload: str) -> ir.Function:
    """x, y [.., C], weight [C] -> sum = x + y and out = RMSNormalization(sum, weight), both [.., C]."""
    b = Body()
    x, y, weight = inputs = named("x", "y", "weight")
    total = b.Add(x, y)
    out = b.RMSNormalization(total, weight, axis=-1, epsilon=epsilon, stash_type=1)
    return b.function(ADD_NORM, overload, inputs, [total, out], ("sum", "out"), ["epsilon"])


def gated(activation: str, overload: str) -> ir.Function:
    """x [.., 2 C], the gate and what it opens -> out [.., C] = activation(first half) * second half."""
    b = Body()
    (x,) = inputs = named("x")
    gate, up = b.several("Split", 2, x, axis=-1, num_outputs=2)
    if activation == "silu":
        opened = b.Mul(gate, b.Sigmoid(gate))
    else:
        opened = b.Gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return b.function(GATED, overload, inputs, [b.Mul(opened, up)], ("out",), ["activation"])
