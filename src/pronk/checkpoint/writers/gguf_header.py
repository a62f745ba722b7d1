"""What a GGUF file begins with, version 3, little-endian: its pairs of metadata and the places of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pronk.checkpoint.containers.gguf_file import (
    ARRAY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    NUMBER_TYPES,
    STRING,
    TENSOR_TYPES,
    nbytes,
)

_VERSION = 3
_TYPE_NUMBERS = {name: number for number, name in TENSOR_TYPES.items()}

Pair = tuple[str, int, Any]  # key, type, value; a list makes it an array of that type


def header(pairs: Sequence[Pair], tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[bytes, int]:
    """All before the data, and how many bytes these take. `tensors`: shape and type of each, in the file's order."""
    head = struct.pack("<4sIQQ", MAGIC, _VERSION, len(tensors), len(pairs))
    head += b"".join(map(_pack_pair, pairs))
    offset = 0
    for name, (shape, kind) in tensors.items():
        head += _pack_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", _TYPE_NUMBERS[kind], offset)
        offset += -(-nbytes(shape, kind) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return head, offset


def printable(name: str) -> str:
    """A path's bytes may be no UTF-8."""
    return name.encode(errors="replace").decode()


def _pack_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pack_pair(pair: Pair) -> bytes:
    key, kind, value = pair
    if isinstance(value, list):
        packed = struct.pack("<IIQ", ARRAY, kind, len(value)) + _pack_values(kind, value)
    else:
        packed = struct.pack("<I", kind) + _pack_values(kind, [value])
    return _pack_string(key) + packed


def _pack_values(kind: int, values: list[Any]) -> bytes:
    if kind == STRING:
        return b"".join(map(_pack_string, values))
    return np.asarray(values, "<" + NUMBER_TYPES[kind][0]).tobytes()
