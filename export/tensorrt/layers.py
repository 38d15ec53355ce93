"""What a plan's layers do with the cache, by the text that TensorRT describes an engine with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 3
_LAYER = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), (?P<rest>.*)")
_TENSOR = re.compile(r"\{ Name: ([^,{}]+),")
_BINDING = re.compile(
    r"Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: \[(?P<shape>[^\]]*)\](?P<rest>.*)"
)
_SHAPES = re.compile(r"MinShape: \[([^\]]*)\], OptShape: \[([^\]]*)\], MaxShape: \[([^\]]*)\]")
_PROFILE = re.compile(r" \[profile \d+\]")


@dataclass(frozen=True)
class Layer:
    """A layer of a plan and the tensors it reads and writes, without the profile that TensorRT adds to their names."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def plugin(self) -> bool:
        return "plugin" in self.kind.lower()


def parse(text: str) -> list[Layer]:
    """The layers of a description in lines; anything else in it is passed over."""
    found = []
    for line in text.splitlines():
        match = _LAYER.match(line.strip())
        if match and "Outputs: [" in match["rest"]:
            read, written = match["rest"].split("Outputs: [", 1)
            read = read.split("Constants: [", 1)[0]
            sides = [tuple(_PROFILE.sub("", name) for name in _TENSOR.findall(side)) for side in (read, written)]
            found.append(Layer(match["name"], match["kind"], *sides))
    return found


def tensors(text: str) -> list[dict[str, Any]]:
    """The inputs and outputs of a description: name, mode, dtype, shape, and of inputs the three shapes that each
    profile allows."""
    found = []
    for line in text.splitlines():
        match = _BINDING.match(line.strip())
        if match:
            told = {"name": match["name"], "mode": match["mode"].lower(), "dtype": match["dtype"]}
            ranges = [[_dims(dims) for dims in three] for three in _SHAPES.findall(match["rest"])]
            found.append({**told, "shape": _dims(match["shape"]), "profiles": ranges})
    return found


def _dims(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def kinds(layers: Sequence[Layer]) -> dict[str, int]:
    """How many layers there are of each kind, the most frequent first."""
    return dict(Counter(layer.kind for layer in layers).most_common())


def states(layers: Sequence[Layer], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """Per state, by input and output name: whether plugins alone touch it, how many other layers do, and SHOWN of them.

    Only a plugin has an output that is an alias of its input; any other layer that writes a state makes a new one.
    """
    found = []
    for state, output in aliases.items():
        touching = [layer for layer in layers if {state, output} & {*layer.inputs, *layer.outputs}]
        others = sorted({layer.name for layer in touching if not layer.plugin})
        in_place = bool(touching) and not others
        told = {"in_place": in_place, "other_layers": len(others), "some": others[:SHOWN]}
        found.append({"input": state, "output": output, **told})
    return found
