"""The GGUF container, versions 2 and 3: metadata and tensor descriptions of one file, which is taken to be hostile.

Layout: "GGUF", version, counts of tensors and of metadata pairs; the pairs; the tensor descriptions; then, from the
next multiple of `general.alignment`, the tensors' data. Every length is held against what is left of the file before it
is used. What the metadata means is gguf.py's business.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES, to_little_endian
from pronk.checkpoint.containers.mapped import MappedFile
from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.errors import BadFile, Unsupported

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# The numbers of metadata types, as numpy and struct spell them ("u4" and "I" are both a 32-bit unsigned integer).
NUMBER_TYPES = {
    0: ("u1", "B"),
    1: ("i1", "b"),
    2: ("u2", "H"),
    3: ("i2", "h"),
    4: ("u4", "I"),
    5: ("i4", "i"),
    6: ("f4", "f"),
    7: ("u1", "B"),  # bool
    10: ("u8", "Q"),
    11: ("i8", "q"),
    12: ("f8", "d"),
}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10

# ggml's tensor types by number. Those in neither PLAIN_DTYPES nor BLOCK_TYPES are known so as to be refused by name.
TENSOR_TYPES = dict(
    enumerate(
        """F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S
        IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4
        IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0""".split()
    )
)

# general.file_type, which llama.cpp numbers otherwise.
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip

_LONGEST_TEXT = 16 << 20
_LONGEST_KEY = 65535
_LONGEST_NAME = 64
_SMALLEST_PAIR = 8 + 1 + 4 + 1  # key length, key, type, value
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, number of axes, one axis, type, offset


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # row-major: the file counts its axes from the fastest
    dtype: str
    described_at: int  # byte of the description
    start: int  # byte of the data
    nbytes: int  # 0 for types that pronk cannot read


@dataclass(frozen=True)
class GgufFile:
    path: Path
    byteorder: Literal["little", "big"]  # of every number in the file
    metadata: Mapping[str, Any]
    offsets: Mapping[str, int]  # where each metadata key stands
    tensors: Mapping[str, TensorInfo]
    file: MappedFile

    def numbers(self, info: TensorInfo) -> NDArray[Any]:
        """A tensor of a plain type: a read-only view of the memory map where it can be."""
        return self.file.array(info.start, info.shape, PLAIN_DTYPES[info.dtype], self.byteorder)

    def blocks(self, info: TensorInfo) -> NDArray[np.uint8]:
        """A tensor of a block type, uint8 [rows, bytes a row], little-endian whatever the file is."""
        rows = math.prod(info.shape[:-1])
        stored = self.file.array(info.start, (rows, info.nbytes // rows), np.dtype(np.uint8))
        return stored if self.byteorder == "little" else to_little_endian(info.dtype, stored)


def open_file(path: Path, budget: Budget | None = None) -> GgufFile:
    """Map a file and read its header. Raises BadFile, or Unsupported for a version that pronk does not know."""
    budget = budget or Budget()
    budget.spend(path, "files", 1)
    file = MappedFile(path)
    if (magic := file.bytes(0, 4)) != MAGIC:
        raise BadFile(path, f"{magic!r} is not {MAGIC!r}", field="magic", offset=0)
    # Versions are small numbers: where the first two bytes are zero, they are the high ones.
    byteorder: Literal["little", "big"] = "big" if file.bytes(4, 2) == b"\0\0" else "little"
    cursor = _Cursor(file, "<" if byteorder == "little" else ">", budget)
    version = cursor.number(UINT32, "version")
    if version not in (2, 3):
        raise Unsupported(f"{path}: GGUF version {version} is not supported; versions 2 and 3 are")
    tensor_count = cursor.count(_SMALLEST_TENSOR, "tensor count")
    budget.spend(path, "tensors", tensor_count, field="tensor count", offset=cursor.pos - 8)
    pair_count = cursor.count(_SMALLEST_PAIR, "metadata count")
    budget.spend(path, "metadata pairs", pair_count, field="metadata count", offset=cursor.pos - 8)

    metadata: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    for _ in range(pair_count):
        at = cursor.pos
        key = cursor.string("metadata key", 1, _LONGEST_KEY)
        if key in metadata:
            raise BadFile(path, "stands in the file twice", field=f"metadata {key!r:.80}", offset=at)
        metadata[key] = cursor.value(f"metadata {key!r:.80}")
        offsets[key] = at

    budget.spend(path, "bytes of headers", cursor.pos)
    described = [_describe(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        field, at = "metadata 'general.alignment'", offsets["general.alignment"]
        raise BadFile(path, f"{alignment!r:.40} is no power of two", field=field, offset=at)
    tensors = _place(path, described, -(-cursor.pos // alignment) * alignment, alignment, file.size)
    return GgufFile(path, byteorder, metadata, offsets, tensors, file)


class _Cursor:
    """Walks the header, holding every length against what is left of it."""

    def __init__(self, file: MappedFile, order: str, budget: Budget) -> None:
        self.budget = budget
        self.size = min(file.size, budget.left("bytes of headers"))
        self.path, self.file, self.order, self.pos = file.path, file, order, len(MAGIC)
        self.data = file.array(0, (self.size,), np.dtype(np.uint8)).data

    def need(self, nbytes: int, field: str) -> None:
        if nbytes > self.size - self.pos:
            problem = f"needs {nbytes} bytes where {self.size - self.pos} are left for the header"
            raise BadFile(self.path, problem, field=field, offset=self.pos)

    def number(self, kind: int, field: str) -> Any:
        numpy_name, struct_name = NUMBER_TYPES[kind]
        self.need(int(numpy_name[1]), field)
        (value,) = struct.unpack_from(self.order + struct_name, self.data, self.pos)
        if kind == BOOL and value > 1:
            raise BadFile(self.path, f"{value} is neither 0 nor 1", field=field, offset=self.pos)
        self.pos += int(numpy_name[1])
        return bool(value) if kind == BOOL else value

    def count(self, smallest: int, field: str) -> int:
        """How many things follow, each of at least `smallest` bytes."""
        at, value = self.pos, int(self.number(UINT64, field))
        if value * smallest > self.size - self.pos:
            raise BadFile(self.path, f"{value} cannot fit in what is left for the header", field=field, offset=at)
        return value

    def string(self, field: str, shortest: int = 0, longest: int = _LONGEST_TEXT) -> str:
        """The limits are in bytes."""
        at, length = self.pos, self.count(1, f"{field} length")
        if not shortest <= length <= longest:
            problem = f"has {length} bytes where {shortest} to {longest} may stand"
            raise BadFile(self.path, problem, field=field, offset=at)
        try:
            value = self.file.bytes(self.pos, length).decode()
        except UnicodeDecodeError as error:
            raise BadFile(self.path, "is not UTF-8", field=field, offset=self.pos + error.start) from None
        self.pos += length
        return value

    def value(self, field: str) -> Any:
        at, kind = self.pos, self.number(UINT32, f"{field} type")
        if kind in NUMBER_TYPES:
            return self.number(kind, field)
        if kind == STRING:
            return self.string(field)
        if kind == ARRAY:
            return self.array(field)
        raise BadFile(self.path, f"unknown type {kind}", field=field, offset=at)

    def array(self, field: str) -> list[Any]:
        at, kind = self.pos, self.number(UINT32, f"{field} element type")
        if kind == STRING:
            return self.strings(self.elements(8, field), field)
        if kind not in NUMBER_TYPES:
            what = "an array of arrays" if kind == ARRAY else f"unknown element type {kind}"
            raise BadFile(self.path, what, field=field, offset=at)
        numpy_name = NUMBER_TYPES[kind][0]
        length = self.elements(int(numpy_name[1]), field)
        numbers = np.frombuffer(self.data, self.order + numpy_name, length, self.pos) if length else np.empty(0)
        if kind == BOOL:
            if length and numbers.max() > 1:
                first = self.pos + int(np.argmax(numbers > 1))
                raise BadFile(self.path, "a bool that is neither 0 nor 1", field=field, offset=first)
            numbers = numbers.astype(bool)
        self.pos += length * int(numpy_name[1])
        values: list[Any] = numbers.tolist()
        return values

    def elements(self, width: int, field: str) -> int:
        length = self.count(width, f"{field} length")
        self.budget.spend(self.path, "metadata array elements", length, field=field, offset=self.pos - 8)
        return length

    def strings(self, count: int, field: str) -> list[str]:
        """As `count` calls of `string`, without their overhead: vocabularies have 100,000 of these."""
        data, text, pos, size = self.data, self.file.bytes, self.pos, self.size
        length_at = struct.Struct(self.order + "Q").unpack_from
        values = []
        for index in range(count):
            start = pos + 8
            end = start + length_at(data, pos)[0] if start <= size else start
            if end > size:
                raise BadFile(self.path, "runs over the end of the header", field=f"{field} [{index}]", offset=pos)
            try:
                values.append(text(start, end - start).decode())
            except UnicodeDecodeError:
                raise BadFile(self.path, "is not UTF-8", field=f"{field} [{index}]", offset=start) from None
            pos = end
        self.pos = pos
        return values


def _describe(cursor: _Cursor) -> TensorInfo:
    """One tensor's description; `start` still counts from the beginning of the data."""
    path, at = cursor.path, cursor.pos
    name = cursor.string("tensor name", 1, _LONGEST_NAME)
    field = f"tensor {name!r}"

    def fail(problem: str) -> BadFile:
        return BadFile(path, problem, field=field, offset=at)

    axes = cursor.number(UINT32, f"{field} axes")
    if not 1 <= axes <= 4:
        raise fail(f"{axes} axes where 1 to 4 may be")
    lengths = [int(cursor.number(UINT64, f"{field} shape")) for _ in range(axes)]
    if not all(lengths):
        raise fail("an axis of length 0")
    kind = cursor.number(UINT32, f"{field} type")
    if kind not in TENSOR_TYPES:
        raise fail(f"unknown type {kind}")
    dtype, start = TENSOR_TYPES[kind], int(cursor.number(UINT64, f"{field} offset"))
    if dtype in BLOCK_TYPES and lengths[0] % (elements := BLOCK_TYPES[dtype].elements):
        raise fail(f"rows of {lengths[0]} are no multiple of {dtype}'s {elements}")
    return TensorInfo(name, tuple(reversed(lengths)), dtype, at, start, nbytes(lengths, dtype))


def nbytes(shape: Sequence[int], dtype: str) -> int:
    """What a tensor takes in a file; 0 of a type that pronk cannot read."""
    if dtype in BLOCK_TYPES:
        return math.prod(shape) // BLOCK_TYPES[dtype].elements * BLOCK_TYPES[dtype].nbytes
    return math.prod(shape) * PLAIN_DTYPES[dtype].itemsize if dtype in PLAIN_DTYPES else 0


def _place(path: Path, infos: list[TensorInfo], base: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """Turn starts into bytes of the file; every tensor must lie inside it, aligned, and over no other."""
    placed: dict[str, TensorInfo] = {}
    for info in infos:
        field, start = f"tensor {info.name!r}", base + info.start
        if info.name in placed:
            raise BadFile(path, "stands in the file twice", field=field, offset=info.described_at)
        if info.start % alignment:
            problem = f"offset {info.start} is no multiple of {alignment}"
            raise BadFile(path, problem, field=field, offset=info.described_at)
        if start + info.nbytes > size:
            problem = f"ends at byte {start + info.nbytes} of a file of {size}"
            raise BadFile(path, problem, field=field, offset=info.described_at)
        placed[info.name] = replace(info, start=start)
    end, before = 0, ""
    for info in sorted(placed.values(), key=lambda info: info.start):
        if info.start < end:
            problem = f"overlaps tensor {before!r}"
            raise BadFile(path, problem, field=f"tensor {info.name!r}", offset=info.described_at)
        end, before = info.start + info.nbytes, info.name
    return placed
