"""A store of examples: their tokens and loss masks one behind another, in memory or in a file that is mapped into it.

Of each text its ids, in 16 bits where the vocabulary allows it, and then its loss mask, 8 tokens a byte. Behind all of
them lie their lengths, a digest of each example, where each stands in its source, and what there is to tell of it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pronk.train.data.examples import Example, Judged, Pair, content

_MAGIC = b"pronktk1"
_PARTS = ("texts", "lengths", "margins", "labels", "digests", "places", "told")
_END = 8 * len(_PARTS) + 32 + len(_MAGIC)  # bytes: the parts' sizes, the SHA-256 of all that stands before, the magic
_END_OF_NAME = b"\0"
_NARROW = 1 << 16  # tokens of a vocabulary whose ids have 16 bits
_LET_GO = 1 << 25  # bytes of a file that are read before its pages are no longer held: others have use for the memory
_PAGE = 1 << 16  # that a system maps at least where one byte is read


class Writer:
    """Writes a store into a file that stands at its beginning."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        self._file, self._narrow = file, vocab_size <= _NARROW
        self._sha = hashlib.sha256()
        self._written = 0
        self._lengths, self._margins = array("i"), array("d")
        self._labels, self._digests, self._places = bytearray(), bytearray(), bytearray()

    def add(self, example: Example | Pair | Judged, place: str) -> None:
        for text in example.answers.values():
            self._put(text.ids.astype("<u2" if self._narrow else "<i4").tobytes())
            self._put(np.packbits(text.loss_mask).tobytes())
            self._lengths.append(len(text))
        if isinstance(example, Pair):
            self._margins.append(example.margin)
        if isinstance(example, Judged):
            self._labels.append(example.good)
        self._digests += hashlib.sha256(content(example)).digest()
        self._places += place.encode("utf-8", "surrogateescape") + _END_OF_NAME

    def end(self, told: Mapping[str, Any]) -> None:
        """`told`: JSON, with whatever is to be known of the whole."""
        sizes = [self._written]
        lengths, margins = np.array(self._lengths, "<i4"), np.array(self._margins, "<f8")
        said = json.dumps({**told, "narrow": self._narrow}).encode()
        for part in (lengths.tobytes(), margins.tobytes(), self._labels, self._digests, self._places, said):
            sizes.append(len(part))
            self._put(part)
        self._put(np.array(sizes, "<u8").tobytes())
        self._file.write(self._sha.digest() + _MAGIC)

    def _put(self, raw: bytes | bytearray) -> None:
        self._file.write(raw)
        self._sha.update(raw)
        self._written += len(raw)


def whole(file: BinaryIO) -> bool:
    """Whether it ends as a store does, and its bytes are those that were written."""
    size = file.seek(0, 2)
    if size < _END:
        return False
    file.seek(0)
    found, left = hashlib.sha256(), size - 32 - len(_MAGIC)
    while left and (piece := file.read(min(left, 1 << 18))):
        found.update(piece)
        left -= len(piece)
    return file.read() == found.digest() + _MAGIC


class Store(Sequence[Any]):
    """Examples, pairs of them or judged ones, made anew each time that one is asked for. `raw`: bytes that a Writer
    wrote."""

    def __init__(self, raw: memoryview | mmap.mmap) -> None:
        sizes = np.frombuffer(raw, "<u8", len(_PARTS), len(raw) - _END).astype(int).tolist()
        begins = dict(zip(_PARTS, np.cumsum([0, *sizes]).tolist(), strict=False))
        part = dict(zip(_PARTS, sizes, strict=True))

        def read(name: str) -> bytes:
            return bytes(raw[begins[name] : begins[name] + part[name]])

        self._read = read
        self.told: dict[str, Any] = json.loads(read("told"))
        self._raw, self._type = raw, np.dtype("<u2" if self.told["narrow"] else "<i4")
        self._each = np.frombuffer(read("lengths"), "<i4")  # of texts, of which a pair has two
        sizes_of_texts = self._each.astype(np.int64) * self._type.itemsize + (self._each + 7) // 8
        self._begins = np.concatenate([[0], np.cumsum(sizes_of_texts)])
        self._margins = np.frombuffer(read("margins"), "<f8")
        self._labels = np.frombuffer(read("labels"), np.bool_)
        self._are_pairs = len(self._margins) > 0
        self.by_identity = self._are_pairs or len(self._labels) > 0  # are told apart so: who uses them holds each once
        self.places = Places(read("places"))
        self._seen = 0

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = range(len(self))[index]
        if self._are_pairs:
            return Pair(self._text(2 * at), self._text(2 * at + 1), float(self._margins[at]))
        return Judged(self._text(at), bool(self._labels[at])) if len(self._labels) else self._text(at)

    @property
    def digests(self) -> NDArray[np.void]:
        """[N] of 32 bytes: the same of exact copies, and of nothing else."""
        return np.frombuffer(self._read("digests"), "V32")

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self._each.reshape(-1, 2).sum(1) if self._are_pairs else self._each

    def _text(self, number: int) -> Example:
        length, begin = int(self._each[number]), int(self._begins[number])
        ids = np.frombuffer(self._raw, self._type, length, begin).astype(np.int32)
        bits = np.frombuffer(self._raw, np.uint8, (length + 7) // 8, begin + length * self._type.itemsize)
        self._let_go(len(bits) + length * self._type.itemsize)
        return Example(ids, np.unpackbits(bits, count=length).view(np.bool_))

    def _let_go(self, nbytes: int) -> None:
        """Now and then, of all that was read: it is in the file, and where memory suffices the system has it still."""
        self._seen += max(nbytes, _PAGE)
        if self._seen > _LET_GO and isinstance(self._raw, mmap.mmap):
            self._seen = 0
            if hasattr(mmap, "MADV_DONTNEED"):
                self._raw.madvise(mmap.MADV_DONTNEED)


class Places(Sequence[str]):
    """Where each example stands: "line 12"."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._ends = np.flatnonzero(np.frombuffer(raw, np.uint8) == 0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = range(len(self))[index]
        begin = int(self._ends[at - 1]) + 1 if at else 0
        return self._raw[begin : int(self._ends[at])].decode("utf-8", "surrogateescape")


class Picked(Sequence[Any]):
    """Of several sequences, one behind another, what stands at `indices`; None: all of it. `made`: of each item what is
    given of it, with the number of its sequence."""

    def __init__(
        self,
        parts: Sequence[Sequence[Any]],
        indices: NDArray[np.int64] | None = None,
        made: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self._parts, self._indices, self._made = parts, indices, made
        self._begins = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._begins[-1]) if self._indices is None else len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = range(len(self))[index]
        place = at if self._indices is None else int(self._indices[at])
        part = int(np.searchsorted(self._begins, place, "right")) - 1
        found = self._parts[part][place - int(self._begins[part])]
        return self._made(part, found) if self._made else found

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int32]:
        found = np.concatenate([np.asarray(lengths(part), np.int32) for part in self._parts])
        return found if self._indices is None else found[self._indices]


def lengths(examples: Sequence[Any]) -> list[int]:
    """Tokens of each, without reading them where that can be."""
    known = getattr(examples, "lengths", None)
    return [len(example) for example in examples] if known is None else known.tolist()


def digests(examples: Iterable[Any]) -> NDArray[np.void]:
    """As a store has them."""
    if isinstance(examples, Store):
        return examples.digests
    return np.frombuffer(b"".join(hashlib.sha256(content(example)).digest() for example in examples), "V32")


def prompts(examples: Iterable[Judged]) -> NDArray[np.void]:
    """[N] of 32 bytes: the same of what begins alike up to the first token that is learned."""
    begins = (one.example.ids[: int(one.example.loss_mask.argmax())].astype("<i4") for one in examples)
    return np.frombuffer(b"".join(hashlib.sha256(ids.tobytes()).digest() for ids in begins), "V32")


def mapped(file: BinaryIO) -> mmap.mmap:
    """Its bytes, which stay where the file is deleted meanwhile."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
