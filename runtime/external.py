"""Where a model.onnx keeps its weights, read from the raw protobuf: nothing outside the engine may be opened."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

from plugins.errors import UserError

# Message -> field number -> message in that field, as far as tensors can be reached (onnx.proto3).
FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
LENGTH_DELIMITED = 2


def check_external_data(path: Path, sizes: Mapping[str, int], mend: str) -> None:
    """Every external tensor of the model must lie inside a file of `sizes` (name -> bytes). Raises UserError."""
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for entries in _external(data, 0, len(data), "model"):
                name = entries.get("location", "")
                if name not in sizes:
                    raise UserError(f"{path} takes weights from {name!r}, which is no file of the engine: {mend}.")
                start, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
                if start < 0 or length < 0 or start + length > sizes[name]:
                    raise UserError(f"{path} takes weights from beyond the end of {name!r}: {mend}.")
        except (IndexError, ValueError, RecursionError):
            raise UserError(f"{path} is not an ONNX model: {mend}.") from None


def _external(data: mmap.mmap, at: int, end: int, kind: str) -> Iterator[dict[str, str]]:
    """The external_data entries of each tensor below a message."""
    entries: dict[str, str] = {}
    for number, start, stop in _fields(data, at, end):
        child = FIELDS[kind].get(number)
        if child == "entry":
            pair = {field: data[first:last].decode() for field, first, last in _fields(data, start, stop)}
            if pair.get(1, "") in entries:
                raise ValueError("key given twice")
            entries[pair.get(1, "")] = pair.get(2, "")
        elif child:
            yield from _external(data, start, stop, child)
    if entries:
        yield entries


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, stop) of the length-delimited fields of a message; the others are skipped."""
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == LENGTH_DELIMITED:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("field beyond its message")
            yield tag >> 3, at, at + size
            at += size
        elif wire == 0:
            at = _varint(data, at)[1]
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("unknown wire type")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
