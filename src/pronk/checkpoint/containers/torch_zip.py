"""torch's .pth and .bin archives, without torch: a zip of one pickle and of raw storages that the pickle refers to.

The pickle is interpreted, never run (unpickle.py), and the storages are mapped, never copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import unpickle, zip_directory
from pronk.checkpoint.containers.mapped import MappedFile, first_bytes
from pronk.checkpoint.containers.zip_directory import Entry
from pronk.checkpoint.tensors import CODE_DTYPES, LazyTensor, plain_dtype
from pronk.errors import BadFile, short

# A number that torch before 1.6 pickled at the beginning of each file.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"

_STORAGES = {
    "torch.FloatStorage": ("F32", 4),
    "torch.HalfStorage": ("F16", 2),
    "torch.BFloat16Storage": ("BF16", 2),
    "torch.DoubleStorage": ("F64", 8),
    "torch.LongStorage": ("I64", 8),
    "torch.IntStorage": ("I32", 4),
    "torch.ShortStorage": ("I16", 2),
    "torch.CharStorage": ("I8", 1),
    "torch.ByteStorage": ("U8", 1),
    "torch.BoolStorage": ("BOOL", 1),
    "torch.storage.UntypedStorage": ("U8", 1),
}
_MAX_RANK = 8
_LONGEST_NAME = 256


def detect(path: Path) -> bool:
    """Whether the file begins as torch's archives do, those of before 1.6 (which `read` refuses) included."""
    start = first_bytes(path, len(_LEGACY_MAGIC))
    return start.startswith(zip_directory.MAGIC) or start == _LEGACY_MAGIC


def read(path: Path, budget: Budget | None = None) -> dict[str, LazyTensor]:
    """Every tensor of a mapping from names to tensors, which is what a state_dict is. Raises BadFile."""
    budget = budget or Budget()
    budget.spend(path, "files", 1)
    file = MappedFile(path)
    if file.bytes(0, len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
        raise BadFile(path, "written by torch before 1.6; save it anew with torch.save in a current version")
    return _Archive(file, budget).tensors()


def read_one(file: MappedFile, budget: Budget) -> LazyTensor:
    """The tensor that was saved alone. Raises BadFile."""
    archive = _Archive(file, budget)
    content = archive.content()
    if type(content) is not _Tensor:
        raise BadFile(file.path, f"holds a {_kind(content)}, not a tensor", field=archive.field)
    return archive.lazy("", content)


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    itemsize: int
    key: str
    numel: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int  # this and the strides in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


class _Archive:
    def __init__(self, file: MappedFile, budget: Budget) -> None:
        self.file, self.budget = file, budget
        self.entries = zip_directory.read(file, budget)
        pickles = [name for name in self.entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise BadFile(file.path, f"a zip archive with {len(pickles)} files named */data.pkl; torch writes one")
        self.pickle = pickles[0]
        self.field = f"zip entry {short(self.pickle)}"
        self.prefix = self.pickle.removesuffix("data.pkl")
        if f"{self.prefix}constants.pkl" in self.entries:
            raise BadFile(file.path, "a TorchScript archive, which is a program; save the model's state_dict instead")
        self.byteorder = self.read_byteorder()

    def read_byteorder(self) -> Literal["little", "big"]:
        entry = self.entries.get(f"{self.prefix}byteorder")
        order = self.file.bytes(entry.offset, min(entry.size, 16)) if entry else b"little"
        if order == b"little":
            return "little"
        if order == b"big":
            return "big"
        raise BadFile(self.file.path, f"neither little nor big: {order!r}", field=f"zip entry '{self.prefix}byteorder'")

    def content(self) -> Any:
        """What the pickle describes."""
        entry, path = self.entries[self.pickle], self.file.path
        functions = {
            "collections.OrderedDict": _ordered_dict,
            "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
            "torch._utils._rebuild_parameter": _rebuild_parameter,
        }
        try:
            if entry.size > unpickle.MAX_BYTES:
                raise unpickle.PickleError(f"{entry.size} bytes, more than the {unpickle.MAX_BYTES} allowed", 0)
            self.budget.spend(path, "bytes of headers", entry.size)
            data = self.file.bytes(entry.offset, entry.size)
            content, steps = unpickle.load(data, frozenset(_STORAGES), functions, self.storage)
        except unpickle.PickleError as error:
            raise BadFile(path, error.problem, field=self.field, offset=entry.offset + error.offset) from None
        self.budget.spend(path, "pickle instructions", steps)
        return content

    def tensors(self) -> dict[str, LazyTensor]:
        content, path, field = self.content(), self.file.path, self.field
        if type(content) is not dict:
            raise BadFile(path, f"holds a {_kind(content)}, not a mapping of names to tensors", field=field)
        for key, value in content.items():
            if type(key) is not str or len(key) > _LONGEST_NAME or type(value) is not _Tensor:
                problem = f"maps {short(key)} to a {_kind(value)}; pronk reads names of tensors only"
                raise BadFile(path, problem, field=field)
        self.budget.spend(path, "tensors", len(content))
        return {key: self.lazy(key, tensor) for key, tensor in content.items()}

    def storage(self, identity: Any) -> _Storage:
        """What a persistent id stands for: ("storage", type, key of the entry, device, number of elements)."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise ValueError("a persistent id that names no storage")
        _, kind, key, _, numel = identity
        if type(kind) is not unpickle.Name or kind.dotted not in _STORAGES:
            raise ValueError("a storage without a type")
        if type(key) is not str or len(key) > _LONGEST_NAME or not _is_count(numel):
            raise ValueError("a storage whose key or size is of the wrong type")
        dtype, itemsize = _STORAGES[kind.dotted]
        entry = self.entries.get(f"{self.prefix}data/{key}")
        if entry is None:
            raise ValueError(f"storage {short(key)} is not in the archive")
        if entry.size != numel * itemsize:
            raise ValueError(
                f"storage {short(key)} has {entry.size} bytes, and {numel} elements of {dtype} are claimed"
            )
        return _Storage(dtype, itemsize, key, numel, entry)

    def lazy(self, name: str, tensor: _Tensor) -> LazyTensor:
        nbytes = math.prod(tensor.shape) * tensor.storage.itemsize
        read = partial(self.read_numbers, name, tensor)
        in_codes = tensor.storage.dtype in CODE_DTYPES
        read_codes = partial(self.read_tensor, tensor, np.dtype(np.uint8)) if in_codes else None
        place = (self.file.path, self.start(tensor)) if tensor.contiguous else None
        return LazyTensor(name, tensor.shape, tensor.storage.dtype, nbytes, read, read_codes, place)

    def start(self, tensor: _Tensor) -> int:
        return tensor.storage.entry.offset + tensor.offset * tensor.storage.itemsize

    def read_numbers(self, name: str, tensor: _Tensor) -> NDArray[Any]:
        return self.read_tensor(tensor, plain_dtype(self.file.path, name, tensor.storage.dtype))

    def read_tensor(self, tensor: _Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
        start = self.start(tensor)
        if tensor.contiguous or 0 in tensor.shape:
            return self.file.array(start, tensor.shape, dtype, self.byteorder)
        flat = self.file.array(start, (tensor.extent,), dtype, self.byteorder)
        strides = [stride * tensor.storage.itemsize for stride in tensor.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False))


def _kind(value: object) -> str:
    return type(value).__name__.lstrip("_")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _ordered_dict(*arguments: Any) -> dict[str, Any]:
    if arguments:
        raise ValueError("an OrderedDict made from something")
    return {}


def _rebuild_parameter(*arguments: Any) -> _Tensor:
    """Arguments: tensor, requires_grad, hooks."""
    if len(arguments) != 3 or type(arguments[0]) is not _Tensor:
        raise ValueError("a parameter that is no tensor")
    return arguments[0]


def _rebuild_tensor(*arguments: Any) -> _Tensor:
    """Arguments: storage, offset, shape, strides, requires_grad, hooks and, from 2.0 on, flags of lazy operations."""
    if not 6 <= len(arguments) <= 7 or type(arguments[0]) is not _Storage:
        raise ValueError("a tensor without a storage")
    if len(arguments) == 7 and arguments[6]:
        raise ValueError("a tensor that is a lazy conjugate or negative")
    storage, offset, shape, strides = arguments[:4]
    for sizes in (shape, strides):
        if type(sizes) is not tuple or len(sizes) > _MAX_RANK or not all(map(_is_count, sizes)):
            raise ValueError("a tensor whose shape or strides are not a few whole numbers")
    if len(shape) != len(strides) or not _is_count(offset):
        raise ValueError("a tensor whose shape, strides and offset do not fit each other")
    tensor = _Tensor(storage, offset, shape, strides)
    # The second condition: a stride of 0 would make any number of elements of one.
    if offset + tensor.extent > storage.numel or math.prod(shape) > storage.numel:
        raise ValueError(
            f"a tensor of shape {shape}, strides {strides}, offset {offset} in storage {short(storage.key)} "
            f"of {storage.numel} elements"
        )
    return tensor
