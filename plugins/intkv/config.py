"""The public definition of the integer baselines: bits, what shares a scale, and how much of the cache remains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, TypeVar

import numpy as np

from plugins.config import MethodConfig
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.layer import LayerSpec

BITS = (2, 3, 4, 8)
Config = TypeVar("Config", bound="IntKVConfig")


@dataclass(frozen=True)
class Side:
    """How keys or values are stored.

    bits: of a code. tokens: neighbouring tokens that share their scales. scales: of such tokens and one KV head; each
    is that of head_dim / scales channels.
    """

    bits: int
    tokens: int
    scales: int


@dataclass(frozen=True)
class IntKVConfig(MethodConfig):
    """Asymmetric integer KV cache: x is read as code * scale + zero, codes whole numbers from 0 to 2^bits - 1.

    The methods are presets: subclasses with defaults of their own.

    zero is the least of the values that share it and scale their range / (2^bits - 1); both are stored in the dtype of
    the cache's exact rows, and codes are made from what is stored. Where all values are equal, codes are 0.

    head_dim: D, values of one head's key or value.
    k_bits, v_bits: 2, 3, 4 or 8 bits per value.
    k_axis: keys share a scale per "token" (as values always do), or per "channel" over the `block` tokens of a block
        (KIVI, arXiv:2402.02750).
    group: channels that share a scale where it is a token's; 0: the whole head.
    rotation: the head is first multiplied by a Hadamard matrix, which spreads outlying channels over all of them
        (QuaRot, arXiv:2404.00456); block-diagonal where D is no power of two.
    mean: a fitted mean [Hkv, D] is taken out before that; Qwen2.5's key bias makes it essential.
    key_space: "pre_rope" stores keys before the rotary embedding, "post_rope" after it.
    full_layers: layers that keep an uncompressed cache.
    sinks, window, block: the exact part of the cache, in tokens; see `plugins.geometry.Geometry`.

    Raises UserError when a field is out of range.
    """

    head_dim: int
    k_bits: int = 4
    v_bits: int = 4
    k_axis: str = "token"
    group: int = 0
    rotation: bool = True
    mean: bool = True
    key_space: str = "pre_rope"
    full_layers: tuple[int, ...] = ()
    sinks: int = 4
    window: int = 128
    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 1:
            raise UserError(f"head_dim={self.head_dim} must be positive")
        for name in ("k_bits", "v_bits"):
            bits = getattr(self, name)
            if bits not in BITS:
                raise UserError(f"{name}={bits} must be one of {', '.join(map(str, BITS))}")
            if self.head_dim * bits % 8:
                raise UserError(f"{name}={bits} does not fill whole bytes with head_dim={self.head_dim}: use 8")
        if self.k_axis not in ("token", "channel"):
            raise UserError(f"k_axis={self.k_axis} must be token or channel")
        if self.group < 0 or (self.group and self.head_dim % self.group):
            raise UserError(f"group={self.group} must be 0 or divide head_dim={self.head_dim}")
        if self.key_space not in ("pre_rope", "post_rope"):
            raise UserError(f"key_space={self.key_space} must be pre_rope or post_rope")

    def side(self, name: str) -> Side:
        """How side "k" or "v" is stored."""
        if name == "k" and self.k_axis == "channel":
            return Side(self.k_bits, self.block, self.head_dim)
        scales = self.head_dim // self.group if self.group else 1
        return Side(self.k_bits if name == "k" else self.v_bits, 1, scales)

    def layer_ratio(self) -> float:
        """Codes, and scales and zeros of 16 bits each."""
        sides = [self.side(name) for name in ("k", "v")]
        bits = sum(side.bits + 32 * side.scales / (side.tokens * self.head_dim) for side in sides)
        return bits / 32

    def geometry(self) -> Geometry:
        stride = self.block if self.k_axis == "channel" else 0
        return Geometry(sinks=self.sinks, window=self.window, block=self.block, stride=stride)

    @classmethod
    def for_layers(cls: type[Config], specs: Sequence[LayerSpec]) -> Config:
        """The preset for a model with these layers; groups that do not divide its head_dim are made smaller."""
        head_dim = next((s.head_dim for s in specs if s.window == 0), specs[0].head_dim)
        return cls(head_dim, group=gcd(cls.group, head_dim) if cls.group else 0)

    def summary(self) -> str:
        """One line: "K 4 bits per token, V 4 bits per token, mean and rotation, pre_rope"."""
        part = f" in groups of {self.group}" if self.group else ""
        key = f"channel of {self.block} tokens" if self.k_axis == "channel" else f"token{part}"
        before = " and ".join(name for name in ("mean", "rotation") if getattr(self, name)) or "no mean or rotation"
        sides = f"K {self.k_bits} bits per {key}, V {self.v_bits} bits per token{part}"
        return f"{sides}, {before}, {self.key_space}"


@dataclass(frozen=True)
class Int8Config(IntKVConfig):
    """8 bits, in the strong form."""

    METHOD: ClassVar[str] = "int8"

    k_bits: int = 8
    v_bits: int = 8


@dataclass(frozen=True)
class Int4Config(IntKVConfig):
    """4 bits, in the strong form."""

    METHOD: ClassVar[str] = "int4"


@dataclass(frozen=True)
class Int3Config(IntKVConfig):
    """3 bits, in the strong form."""

    METHOD: ClassVar[str] = "int3"

    k_bits: int = 3
    v_bits: int = 3


@dataclass(frozen=True)
class KIVI2Config(IntKVConfig):
    """KIVI (arXiv:2402.02750) with 2 bits, its group size of 32 and residual length of 128."""

    METHOD: ClassVar[str] = "kivi2"

    k_bits: int = 2
    v_bits: int = 2
    k_axis: str = "channel"
    group: int = 32
    rotation: bool = False
    mean: bool = False
    key_space: str = "post_rope"


def hadamard(dim: int) -> np.ndarray:
    """The orthogonal symmetric matrix of `rotation`: float32 [dim, dim].

    Sylvester's Hadamard matrix of the largest power of two that divides dim, once or repeated on the diagonal.
    """
    size = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(dim // size), matrix / np.sqrt(size)).astype(np.float32)
