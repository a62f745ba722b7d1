"""A file's bytes, mapped into memory and handed out as arrays."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadFile


def first_bytes(path: Path, count: int) -> bytes:
    """Up to `count` bytes from the beginning of a file; none of anything else, such as a folder or a pipe."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(count)


_mapped: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def let_go() -> None:
    """Give the pages of all mapped files back. They stay in the system's cache, and are read again when touched, but no
    longer count as this process's memory."""
    for file in list(_mapped):
        file.let_go()


class MappedFile:
    """Read-only. Whoever asks for a part of it has checked that the part lies inside `size`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():  # a pipe would block for ever
            raise BadFile(path, "is not a regular file" if path.exists() else "is absent")
        self.path, self._start = path, 0
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise BadFile(path, "is empty")
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadFile(path, f"cannot be read: {error.strerror}") from None
        _mapped.add(self)

    def let_go(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)

    def part(self, offset: int, size: int) -> MappedFile:
        """A stretch of the file as if it were a file: what is asked for there, and errors, count from its beginning."""
        part = copy(self)
        part._start, part.size = self._start + offset, size
        return part

    def bytes(self, offset: int, nbytes: int) -> bytes:
        return self._map[self._start + offset : self._start + offset + nbytes]

    def array(
        self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], byteorder: str = "little"
    ) -> NDArray[Any]:
        """A view of the map; a copy where the bytes are unaligned or in the other order. Raises BadFile."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        at = self._start + offset
        if self._map.size() < at + nbytes:  # touching a page that is gone would kill the process
            raise BadFile(self.path, f"has shrunk to {self._map.size()} bytes since it was opened", offset=offset)
        if count == 0:
            return np.empty(shape, dtype)
        words = np.frombuffer(self._map, f"u{dtype.itemsize}", count, at)
        if byteorder != sys.byteorder:
            words = words.byteswap()
        elif at % dtype.itemsize:
            words = words.copy()
        return words.view(dtype).reshape(shape)
