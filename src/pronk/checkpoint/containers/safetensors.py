"""The safetensors container: a length, a JSON header of that length, and the tensors' bytes without gap or overlap.

Format: https://github.com/huggingface/safetensors#format. Nothing in the header is believed before it is held against
the size of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronk import strict_json
from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers.mapped import MappedFile, first_bytes
from pronk.checkpoint.tensors import CODE_DTYPES, PLAIN_DTYPES, LazyTensor, plain_dtype
from pronk.checkpoint.writers.numbers import write_array
from pronk.errors import BadFile, short

# Every type of the format, in bits an element; pronk reads those in tensors.py.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_MAX_RANK = 8
_LONGEST_NAME = 256


def detect(path: Path) -> bool:
    """Whether the file begins as a safetensors file does, whatever its name and however broken the rest."""
    start = first_bytes(path, 10)
    return start[8:9] == b"{" and start[9:10] in (b'"', b"}", b" ", b"\n")


def read(path: Path, budget: Budget | None = None) -> dict[str, LazyTensor]:
    """Every tensor in the file, under its own name. Raises BadFile."""
    budget = budget or Budget()
    budget.spend(path, "files", 1)
    file = MappedFile(path)
    if file.size < 8:
        raise BadFile(path, f"has {file.size} bytes, too few for a safetensors header", field="header length", offset=0)
    (length,) = struct.unpack("<Q", file.bytes(0, 8))
    if length > min(file.size - 8, strict_json.MAX_BYTES):
        problem = f"{length} does not fit a file of {file.size} bytes"
        if length <= file.size - 8:
            problem = f"{length} is more than the {strict_json.MAX_BYTES} allowed"
        raise BadFile(path, problem, field="header length", offset=0)
    budget.spend(path, "bytes of JSON headers", length)
    header = strict_json.parse(file.bytes(8, length), path, offset=8)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFile(path, "must map names to strings", field="__metadata__", offset=8)

    budget.spend(path, "tensors", len(header))
    tensors, ranges = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _check_entry(path, name, entry)
        start = 8 + length + begin
        read_tensor = partial(_read, file, name, dtype, shape, start)
        read_codes = partial(file.array, start, shape, np.dtype(np.uint8)) if dtype in CODE_DTYPES else None
        tensors[name] = LazyTensor(name, shape, dtype, end - begin, read_tensor, read_codes)
        ranges.append((begin, end, name))

    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            problem = "overlaps the tensor before it" if begin < position else f"leaves {begin - position} bytes unused"
            raise BadFile(path, problem, field=f"tensor {short(name)}", offset=8 + length + begin)
        position = end
    if position != file.size - 8 - length:
        problem = f"the tensors take {position} bytes and the file has {file.size - 8 - length} for them"
        raise BadFile(path, problem, offset=8 + length)
    return tensors


def write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """A small file, all of it at hand: float32, float16 or bfloat16 arrays under their names."""
    types = {dtype: name for name, dtype in PLAIN_DTYPES.items()}
    head, begins = lay_out({name: (types[array.dtype], array.shape) for name, array in arrays.items()})
    with path.open("xb") as file:
        file.write(head)
        for name, array in arrays.items():
            file.seek(begins[name])
            write_array(file, array)


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Of tensors that are each a type and a shape: what a file of them begins with, and where in it each has its place.

    The widest come first, so that all are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda tensor: -_BITS[tensor[1][0]]):
        begins[name] = end
        end += nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _BITS[dtype] // 8


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, and where the data begins and ends, counted from the end of the header."""

    def fail(problem: str) -> NoReturn:
        raise BadFile(path, problem, field=f"tensor {short(name)}", offset=8)

    if len(name) > _LONGEST_NAME:
        fail(f"a name of {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        fail("must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        fail(f"unknown dtype {short(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(map(_is_size, shape)):
        fail(f"shape {short(shape)} is no list of up to {_MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        fail(f"data_offsets {short(offsets)} are no two byte offsets")
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        fail(f"shape {shape} of {dtype} does not take the {end - begin} bytes that data_offsets {offsets} give it")
    if begin % max(1, _BITS[dtype] // 8):
        fail(f"begins at byte {begin} of the data, which is unaligned for {dtype}")
    return dtype, tuple(shape), begin, end


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _read(file: MappedFile, name: str, dtype: str, shape: tuple[int, ...], start: int) -> NDArray[Any]:
    return file.array(start, shape, plain_dtype(file.path, name, dtype))
