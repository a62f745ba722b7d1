"""A reader of torch.distributed's checkpoints that runs nothing from them.

Their `.metadata` is a pickle, and torch runs what pickles ask for. Here it is interpreted (containers/unpickle.py), and
where it says that tensors lie is checked against the files before it is believed. The bytes of each are what torch.save
makes of one tensor, and are read as models' weights are. Which parts a process needs is left to torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from pronk.checkpoint.budget import Budget, Item
from pronk.checkpoint.containers import torch_zip, unpickle
from pronk.checkpoint.containers.mapped import MappedFile
from pronk.checkpoint.containers.unpickle import Name, Record
from pronk.errors import BadFile, short
from pronk.torch_engine.backend import to_torch

T = TypeVar("T")

# A tensor takes 110 of them, and each further piece of it 60: room for all of a model of 70 billion weights, written by
# 20 processes. Each makes an object of some 100 bytes at most.
_MOST_STEPS = 4_000_000
_MOST_RANK = 8
_OF_A_PIECE: Mapping[Item, int] = {"zip entries": 16, "bytes of headers": 1 << 12, "pickle instructions": 1 << 12}
_FILE = re.compile(r"__\d{1,6}_\d{1,6}\.distcp")  # as torch calls what a process writes

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = {str(dtype): dtype for dtype in _TYPES.values()}
_DCP = "torch.distributed.checkpoint"
_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _INDEX, _META = (
    f"{_DCP}.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    )
)  # fmt: skip
_STORAGE_INFO = f"{_DCP}.filesystem._StorageInfo"
_CLASSES = frozenset({_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _INDEX, _META, _STORAGE_INFO})


class Reader(FileSystemReader):
    """Of the checkpoint in `folder`. Raises ValueError where it is damaged.

    `shapes`: of each tensor, with its type. `unsigned`: names of those in which a number below 0 is damage, as infinity
    and NaN are in all.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(folder)
        found: dict[str, TensorStorageMetadata] = self._metadata.state_dict_metadata  # type: ignore[assignment]
        self.shapes = {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}
        self.unsigned: frozenset[str] = frozenset()

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece: _Piece = self.storage_data[item.storage_index]
            tensor = self._read(item.storage_index.fqn, piece)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
            piece.file.let_go()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, piece: _Piece) -> Tensor:
        dtype = self.shapes[name][1]
        with _told(f"{piece.file.path.name}: {short(name)}", piece.offset):
            found = torch_zip.read_one(piece.file.part(piece.offset, piece.nbytes), Budget(_OF_A_PIECE))
            if found.shape != piece.shape or _TYPES.get(found.dtype) != dtype:
                raise ValueError(f"{short(name)} is stored as {found.dtype}, shape {found.shape}; .metadata differs")
            if found.read_blocks:  # codes
                tensor = to_torch(found.read_blocks(), torch.device("cpu"), torch.uint8).view(dtype)
            else:
                tensor = to_torch(found.read(), torch.device("cpu"), dtype)
        if tensor.numel():
            least, most = (float(end) for end in tensor.aminmax())
            if not (math.isfinite(least) and math.isfinite(most)) or (least < 0 and name in self.unsigned):
                raise ValueError(f"{short(name)} holds a number that it cannot hold")
        return tensor


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor, or all of it, in `nbytes` of a file from `offset` on."""

    file: MappedFile
    offset: int
    nbytes: int
    shape: tuple[int, ...]


def _read_metadata(folder: Path) -> Metadata:
    with _told("its .metadata"):
        file = MappedFile(folder / ".metadata")
        data = file.bytes(0, min(file.size, unpickle.MAX_BYTES + 1))
    try:
        content, _ = unpickle.load(data, frozenset(_DTYPES), _FUNCTIONS, classes=_CLASSES, most=_MOST_STEPS)
    except unpickle.PickleError as error:
        raise ValueError(f"its .metadata, at byte {error.offset}: {error.problem}") from None
    described = _state(content, _METADATA)
    places = _places(folder, _of_type(dict, described, "storage_data"))
    tensors, pieces = {}, {}
    for name, entry in _of_type(dict, described, "state_dict_metadata").items():
        tensors[name] = tensor = _tensor(name, entry)
        for chunk in tensor.chunks:
            place = places.get((name, chunk.offsets))
            nbytes = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            if place is None or place[2] < nbytes:
                _refuse(f"has no place for {short(name)}, {tuple(chunk.sizes)} from {tuple(chunk.offsets)} on")
            pieces[MetadataIndex(name, chunk.offsets)] = _Piece(*place, chunk.sizes)
    return Metadata(tensors, storage_data=pieces)  # type: ignore[arg-type]


def _places(folder: Path, storage: dict[Any, Any]) -> dict[tuple[str, Size], tuple[MappedFile, int, int]]:
    """By name of a tensor and where in it a piece begins: the file, and which bytes of it."""
    found: dict[tuple[str, Size], tuple[MappedFile, int, int]] = {}
    files: dict[str, MappedFile] = {}
    for key, value in storage.items():
        index, place = _state(key, _INDEX), _state(value, _STORAGE_INFO)
        name, path = _of_type(str, index, "fqn"), _of_type(str, place, "relative_path")
        start, nbytes = _of_type(int, place, "offset"), _of_type(int, place, "length")
        if not _FILE.fullmatch(path):
            _refuse(f"puts {short(name)} into {short(path)}, and no process calls its file so")
        if path not in files:
            with _told(path):
                files[path] = MappedFile(folder / path)
        if start < 0 or nbytes < 0 or start + nbytes > files[path].size:
            _refuse(f"puts {short(name)} beyond the {files[path].size} bytes of {path}")
        piece = name, _of_type(Size, index, "offset")
        if piece in found or place.get("transform_descriptors") is not None:
            _refuse(f"has {short(name)} twice, or in a form of its own")
        found[piece] = files[path], start, nbytes
    return found


def _tensor(name: Any, entry: Any) -> TensorStorageMetadata:
    """Cut into rows, if at all, as sharding.py cuts."""
    if type(name) is not str:
        _refuse("has a tensor without a name")
    state = _state(entry, _TENSOR)
    shape = _of_type(Size, state, "size")
    properties = _state(state.get("properties"), _PROPERTIES, tuple)
    dtype = _DTYPES.get(properties[0].dotted) if properties and type(properties[0]) is Name else None
    if dtype is None:
        _refuse(f"gives {short(name)} no type of numbers")
    chunks = []
    for chunk in _of_type(list, state, "chunks"):
        fields = _state(chunk, _CHUNK)
        offsets, sizes = _of_type(Size, fields, "offsets"), _of_type(Size, fields, "sizes")
        if 0 not in sizes:  # of a process that got no rows
            chunks.append(ChunkStorageMetadata(offsets, sizes))
    rows = 0  # a number alone counts as one
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        here = (rows, *[0] * len(shape))[: len(shape)]
        if chunk.offsets != here or len(chunk.sizes) != len(shape) or chunk.sizes[1:] != shape[1:]:
            break
        rows += chunk.sizes[0] if shape else 1
    else:
        if rows == (shape[0] if shape else 1):
            return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    _refuse(f"does not cut {short(name)}, {tuple(shape)}, into rows that follow each other")


def _state(value: Any, of: str, kind: type[dict[str, Any] | tuple[Any, ...]] = dict) -> Any:
    """Of a record."""
    if type(value) is not Record or value.of != of or type(value.state) is not kind:
        _refuse(f"has something else where a {of.rpartition('.')[2]} should be")
    return value.state


def _of_type(kind: type[T], fields: Mapping[Any, Any], name: str) -> T:
    value = fields.get(name)
    if type(value) is not kind:
        _refuse(f"has a {name} that is no {kind.__name__}")
    return value


def _size(*arguments: Any) -> Size:
    numbers = arguments[0] if len(arguments) == 1 else None
    if type(numbers) is not tuple or len(numbers) > _MOST_RANK:
        raise ValueError("a size that is no few numbers")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a size of what is no number, or too large")
    return Size(numbers)


# What else objects are made with, which nothing depends on: the folder that was written to, and layouts in memory.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    **dict.fromkeys((f"{_DCP}.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout"), lambda *_: None),
    "builtins.getattr": lambda *_: None,  # as which Python 3.11.0 to 3.11.3 pickles a member of an enumeration
    **{
        f"{module}.{name}": lambda *_: None
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


def _refuse(problem: str) -> NoReturn:
    raise ValueError(f"its .metadata {problem}")


@contextmanager
def _told(what: str, start: int = 0) -> Iterator[None]:
    """An error of a file as one that other processes can be told."""
    try:
        yield
    except BadFile as error:
        where = f", at byte {start + error.offset}" if error.offset is not None else ""
        raise ValueError(f"{what}{where}: {error.problem}") from None
