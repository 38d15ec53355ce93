"""The tensor contract between an engine's graph and whoever runs it: roles, shapes, state bytes. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from plugins.geometry import Geometry

# Inputs that the host fills at every step, with their dtype and shape; state inputs are free in both.
HOST_INPUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokens": ("int64", ("batch", "sequence")),
    "past_len": ("int32", ("batch",)),
    "new_len": ("int32", ("batch",)),
    "live": ("int32", ()),
    "logit_index": ("int64", ("batch", "picks")),
    "enc_src": ("int32", ("batch", "encode")),
    "enc_dst": ("int32", ("batch", "encode")),
    "select_len": ("int32", ("batch",)),
    "select_width": ("int32", ()),
}
# Outputs that a host may leave unread, one per layer that has it, with their dtype and shape.
OPTIONAL_OUTPUTS: dict[str, tuple[str, tuple[str, ...]]] = {"selected": ("int32", ("batch", "selected"))}
STATE_DTYPES = ("float16", "bfloat16", "float32", "int8", "int16", "int32")
CARRIERS = {"bfloat16": "uint16"}  # what holds the bits of a dtype that numpy does not know
# ONNX's number of each dtype (TensorProto.DataType).
ONNX_TYPES = {
    "float32": 1, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16,
}  # fmt: skip
ROW_SYMBOLS = ("rows", "code_rows", "code_tiles", "ref_rows")
TILE_ROWS = 16  # code rows of a tile
GROWTH = 1.25  # a full cache grows by this factor ...
CAPACITY_STEP = 256  # ... rounded up to this many tokens
LIVE_STEP = 32  # `live` is the longest past rounded up to this many tokens


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output.

    dtype: numpy name, or "bfloat16". shape: integers or symbols ("batch", "sequence", "picks", "encode", "selected" and
    ROW_SYMBOLS).
    alias: for a state input, the output that is written to the same memory; None otherwise.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int | str, ...]
    alias: str | None = None

    @property
    def row_symbol(self) -> str | None:
        """The one of ROW_SYMBOLS by which the tensor grows with the sequence, None when its size is fixed."""
        return next((dim for dim in self.shape if dim in ROW_SYMBOLS), None)

    @property
    def row_axis(self) -> int | None:
        symbol = self.row_symbol
        return None if symbol is None else self.shape.index(symbol)

    @property
    def carrier(self) -> np.dtype:
        """The numpy dtype in which hosts hold the tensor."""
        return np.dtype(CARRIERS.get(self.dtype, self.dtype))

    def agrees(self, dtype: str | None, shape: Sequence[Any]) -> bool:
        """Whether a graph's tensor is such a one. shape: its sizes; what is no number, or negative, is not fixed."""
        if dtype != self.dtype or len(shape) != len(self.shape):
            return False
        pairs = zip(self.shape, shape, strict=True)
        return all(dim in (size, "vocab") for dim, size in pairs if isinstance(size, int) and size >= 0)

    def dims(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every symbol replaced by its size."""
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        return int(np.prod(self.dims(sizes), dtype=np.int64)) * self.carrier.itemsize

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "role": self.role,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "alias": self.alias,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> TensorSpec:
        """Raises TypeError or ValueError when `entry` is not a tensor spec."""
        unknown = set(entry) - {"name", "role", "dtype", "shape", "alias"}
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        name, role, dtype, shape = (entry[key] for key in ("name", "role", "dtype", "shape"))
        alias = entry.get("alias")
        if not all(isinstance(text, str) for text in (name, role, dtype, alias or "")):
            raise TypeError(f"name, role, dtype and alias of {name!r} must be strings")
        if not isinstance(shape, list) or not all(type(dim) in (int, str) for dim in shape):
            raise TypeError(f"the shape of {name!r} must be a list of integers and symbols")
        return cls(name, role, dtype, tuple(shape), alias)


def row_count(symbol: str, stored: int, geometry: Geometry | None) -> int:
    """Rows of `symbol` that hold data once `stored` tokens are in the cache (the trash row not counted)."""
    if symbol == "rows":
        return stored
    if geometry is None:
        raise ValueError(f"{symbol} needs a geometry")
    if symbol == "ref_rows":
        return int(geometry.references(stored))
    return int(geometry.encoded(stored)) // (TILE_ROWS if symbol == "code_tiles" else 1)


def state_sizes(capacity: int, geometry: Geometry | None, batch: int = 1) -> dict[str, int]:
    """Sizes of the symbols that a state shape may contain; the last row of each row symbol is the trash row."""
    sizes = {"batch": batch, "rows": capacity + 1}
    if geometry is not None:
        sizes |= {symbol: row_count(symbol, capacity, geometry) + 1 for symbol in ROW_SYMBOLS if symbol != "rows"}
    return sizes


def bytes_at(specs: Iterable[TensorSpec], capacity: int, geometry: Geometry | None, batch: int = 1) -> int:
    """Bytes of the state tensors among `specs` when allocated for `capacity` tokens per sequence."""
    sizes = state_sizes(capacity, geometry, batch)
    return sum(spec.nbytes(sizes) for spec in specs if spec.role == "state")


def capacity_for(tokens: int, max_length: int, current: int = 0) -> int:
    """Capacity a session holding `current` tokens' worth of rows allocates once it needs `tokens`."""
    if tokens <= current:
        return current
    wanted = max(tokens, int(current * GROWTH))
    return max(tokens, min(-(-wanted // CAPACITY_STEP) * CAPACITY_STEP, max_length))


def dense_bytes(model: Mapping[str, int], tokens: int, itemsize: int = 2) -> int:
    """Bytes of a plain K/V cache of `tokens` tokens; `model` is the "model" entry of config.json."""
    return 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"] * itemsize * tokens


def break_even(
    specs: Iterable[TensorSpec], geometry: Geometry | None, model: Mapping[str, int], fixed_bytes: int
) -> int | None:
    """Shortest length from which fixed plus per-sequence bytes stay at or below a plain fp16 cache; None if never.

    Capacity is taken equal to the length. A block of codes is added at once, so only block boundaries are candidates.
    """
    states = [spec for spec in specs if spec.role == "state"]
    if geometry is None:
        return None

    def gain(blocks: int) -> int:
        tokens = geometry.sinks + geometry.window + blocks * geometry.block
        return dense_bytes(model, tokens) - fixed_bytes - bytes_at(states, tokens, geometry)

    period = geometry.stride // gcd(geometry.stride, geometry.block) if geometry.stride else 1
    slope = gain(period) - gain(0)  # the gain repeats with this added: every period holds as many references
    if slope <= 0:
        return None
    short = 0  # blocks from which the gain stays positive
    for blocks in range(period):
        if gain(blocks) < 0:
            short = max(short, blocks + (-gain(blocks) - 1) // slope * period + 1)
    return geometry.sinks + geometry.window + short * geometry.block
