"""kvpack.h for Python: the same structures in ctypes, and `Library`, which calls a built library's functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from plugins.errors import UserError

ABI = 2
FP16, BF16 = 0, 1
PLAIN, TILES = 0, 1
OK, UNSUPPORTED = 0, 1
MAX_STAGES, MAX_SEGMENTS = 64, 8
OPS = ("dense", "vqkv", "deltakv", "intkv")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
PREPARED = ("vqkv", "deltakv")  # ops that read tables in a form of their own


def _int32(names: str, size: int = 0) -> list[tuple[str, Any]]:
    """Fields of int32, or of `size` of them."""
    return [(name, c_int32 * size if size else c_int32) for name in names.split()]


def _address(names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names.split()]


class Layer(Structure):
    """kvpack_layer."""

    _fields_ = _int32("num_heads num_kv_heads head_dim rotary_dim sliding_window dtype") + [
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Step(Structure):
    """kvpack_step."""

    _fields_ = (
        _int32("batch length live encode")
        + _address("q k v out")
        + _int32("q_row kv_row")
        + _address("past_len new_len enc_src enc_dst cos sin")
        + [("rope_rows", c_int32), ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("stream", c_void_p)]
    )


class Geometry(Structure):
    """kvpack_geometry."""

    _fields_ = _int32("sinks window block")


class Dense(Structure):
    """kvpack_dense."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("rows", c_int32),
        ("geometry", Geometry),
        ("select_len", c_void_p),
        ("select_width", c_int32),
        ("selected", c_void_p),
    ]


class VQKV(Structure):
    """kvpack_vqkv."""

    _fields_ = (
        [("geometry", Geometry)]
        + _int32("pre_rope layout sets k_groups v_groups k_entries v_entries")
        + _int32("k_stage_count v_stage_count")
        + _int32("k_stages v_stages", size=MAX_STAGES)
        + _address("ring_k ring_v codes_k codes_v")
        + [("code_rows", c_int32)]
        + _address("k_books k_encode k_decode k_mean v_books v_encode v_decode v_mean")
        + [("prepared", c_void_p)]
    )


class DeltaKV(Structure):
    """kvpack_deltakv."""

    _fields_ = (
        [("geometry", Geometry)]
        + _int32("stride neighbors reference_bits hidden selects segment_count")
        + _int32("latent_sizes latent_bits", size=MAX_SEGMENTS)
        + [("index_bytes", c_int32)]
        + _address("ring latents scales index references reference_scales")
        + _int32("code_rows ref_rows")
        + _address("selected select_len")
        + [("select_width", c_int32)]
        + _address("center compress decompress gate up down prepared")
    )


class IntKV(Structure):
    """kvpack_intkv."""

    _fields_ = (
        [("geometry", Geometry)]
        + _int32("pre_rope k_bits v_bits k_channel group rotation mean")
        + [
            (n, c_void_p)
            for n in ["ring_k", "ring_v", "codes_k", "codes_v", "scales_k", "zeros_k", "scales_v", "zeros_v"]
        ]
        + _int32("code_rows scale_rows")
        + [("center", c_void_p)]
    )


STRUCTURES: dict[str, type[Structure]] = {"dense": Dense, "vqkv": VQKV, "deltakv": DeltaKV, "intkv": IntKV}


class NativeError(UserError):
    """A function of the library failed; the message is the library's."""


class Library:
    """An open library. Structures hold addresses: keep the arrays or tensors behind them alive during a call."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError when `path` is no such library or was built for another version of kvpack."""
        try:
            self.handle = ctypes.CDLL(str(path))
            self.handle.kvpack_last_error.restype = c_char_p
            found = self.handle.kvpack_abi()
        except (OSError, AttributeError) as error:
            raise UserError(f"{path} is not a kvpack library ({error}): run `python -m plugins build`.") from None
        if found != ABI:
            raise UserError(f"{path} has interface {found}, this kvpack needs {ABI}: run `python -m plugins build`.")
        self.path = Path(path)
        for op in OPS:
            state = POINTER(STRUCTURES[op])
            self._declare(f"{op}_workspace", c_size_t, POINTER(Layer), POINTER(Step), state)
            self._declare(f"{op}_attention", c_int, POINTER(Layer), POINTER(Step), state)
            self._declare(f"{op}_supported", c_int, POINTER(Layer), state)
        for op in PREPARED:
            state = POINTER(STRUCTURES[op])
            self._declare(f"{op}_prepared", c_size_t, POINTER(Layer), state)
            self._declare(f"{op}_prepare", c_int, POINTER(Layer), state, c_void_p, c_void_p)
        rows = (c_int64, c_int32)
        self._declare("add_rms_norm", c_int, c_int32, *rows, c_float, *[c_void_p] * 6)
        self._declare("gated_activation", c_int, c_int32, c_int32, *rows, *[c_void_p] * 3)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self.handle, f"kvpack_{name}", None)
        if function is not None:
            function.restype, function.argtypes = result, arguments

    def reason(self) -> str:
        """Why this thread's last call failed."""
        return self.handle.kvpack_last_error().decode()

    def supported(self, op: str, layer: Layer, state: Structure) -> str:
        """Why the library has no kernels for a layer; "" when it has."""
        return "" if self._call(f"{op}_supported", layer, state) == OK else self.reason()

    def workspace(self, op: str, layer: Layer, step: Step, state: Structure) -> int:
        """Bytes of workspace that a step needs."""
        return int(self._call(f"{op}_workspace", layer, step, state))

    def prepared(self, op: str, layer: Layer, state: Structure) -> int:
        """Bytes of the tables in the kernels' own form; 0 for ops without."""
        return int(self._call(f"{op}_prepared", layer, state)) if op in PREPARED else 0

    def prepare(self, op: str, layer: Layer, state: Structure, prepared: int, stream: int = 0) -> None:
        """Write those tables to the address `prepared`. Raises NativeError."""
        self._check(f"{op}_prepare", layer, state, c_void_p(prepared), c_void_p(stream))

    def attention(self, op: str, layer: Layer, step: Step, state: Structure) -> None:
        """One step of one layer. Raises NativeError."""
        self._check(f"{op}_attention", layer, step, state)

    def add_rms_norm(
        self, dtype: int, rows: int, columns: int, epsilon: float, addresses: Sequence[int], stream: int | None = None
    ) -> None:
        """kvpack_add_rms_norm. addresses: of x, y, weight, sum and out. Raises NativeError."""
        self._check("add_rms_norm", dtype, rows, columns, epsilon, *addresses, stream)

    def gated_activation(
        self, dtype: int, activation: str, rows: int, columns: int, x: int, out: int, stream: int | None = None
    ) -> None:
        """kvpack_gated_activation; activation: of ACTIVATIONS. x, out: addresses. Raises NativeError."""
        self._check("gated_activation", dtype, ACTIVATIONS[activation], rows, columns, x, out, stream)

    def _call(self, name: str, *arguments: Any) -> int:
        return getattr(self.handle, f"kvpack_{name}")(*arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        if self._call(name, *arguments) != OK:
            raise NativeError(self.reason())
