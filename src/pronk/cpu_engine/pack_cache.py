"""The pack cache: a large model's packed weights, in a file that later starts map into memory instead of packing again.

Processes that run one model then share the system's copy of it. A file's name follows from the model's digest, from the
sizes and times of the model's files, from the formats, and from the library that packed it; its end says what its bytes
add up to. What does not agree is packed anew. Files that were not used for the longest time make room for others.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pronk import _native, system
from pronk.checkpoint.digest import digest
from pronk.checkpoint.hub.local import home
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.cpu_engine import weights
from pronk.cpu_engine.slots import Slot
from pronk.errors import BadFile

LEAST = 1 << 28  # bytes of packed weights; fewer are packed about as soon as they are found and checked
MOST = 32 << 30  # of all files together
_MAGIC = b"pronkpk1"
_END = len(_MAGIC) + 8  # bytes: and the checksum, little-endian
_SUFFIX = ".packed"
_ROOT = 0  # whose files are trusted beside one's own: a checksum says that a file is whole, not who made it
_IS_THERE = hasattr(os, "posix_fallocate") and hasattr(mmap, "MAP_POPULATE")  # on Linux


def folder() -> Path:
    return home() / "packed"


def pack(
    model: _native.Model, checkpoint: Checkpoint, slots: list[Slot], nbytes: int, progress: Progress | None
) -> Path | None:
    """As weights.pack, out of a file or into one where that is worth it and can be. Gives the file that is new."""
    file = file_of(checkpoint, slots, nbytes)
    if file and (memory := opened(file, nbytes, model.threads)) is not None:
        model.mount(memory)
        weights.pack(model, checkpoint, slots, progress, mounted=True)
    elif file and make_room(nbytes) and _pack_into(file, model, checkpoint, slots, nbytes, progress):
        return file if file.exists() else None
    else:
        weights.pack(model, checkpoint, slots, progress)
    return None


def _pack_into(
    file: Path, model: _native.Model, checkpoint: Checkpoint, slots: list[Slot], nbytes: int, progress: Progress | None
) -> bool:
    """False where the disk does not take it, and nothing was done."""
    lent = packed = False
    try:
        with system.replacing(file) as fresh:
            memory = created(fresh, nbytes)
            model.lend(memory[:nbytes])
            lent = True
            weights.pack(model, checkpoint, slots, progress)
            packed = True
            if file_of(checkpoint, slots, nbytes) != file:
                raise OSError("the model's files changed meanwhile")
            memory[nbytes:] = np.frombuffer(_end(memory[:nbytes], model.threads), np.uint8)
    except OSError:
        if lent and not packed:
            raise
    return packed


def file_of(checkpoint: Checkpoint, slots: Sequence[Slot], nbytes: int) -> Path | None:
    """Where so many bytes of this model as its files have it are kept, or may be; None where they should not."""
    if not _IS_THERE or not LEAST <= nbytes <= MOST or not checkpoint.files:
        return None
    found = hashlib.sha256(Path(_native.__file__ or "").read_bytes())
    try:
        found.update(digest(checkpoint).encode())
        for file in checkpoint.files:
            status = file.stat()
            found.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
    except (BadFile, OSError):
        return None  # whoever reads the weights will say so
    for slot in slots:
        found.update(f"{slot.role} {slot.layer} {slot.format.name}\n".encode())
    name = found.hexdigest()[:32]
    file = folder() / f"{name}{_SUFFIX}"
    return file if _ours(file) else file.with_name(f"{name}-{os.geteuid()}{_SUFFIX}")


def _ours(file: Path) -> bool:
    """Or nobody's yet."""
    try:
        return file.stat().st_uid in (os.geteuid(), _ROOT)
    except OSError:
        return True


def _at_once(path: str, flags: int) -> int:
    """A pipe of that name is no reason to wait for who writes."""
    return os.open(path, flags | os.O_NONBLOCK)


def opened(file: Path, nbytes: int, threads: int) -> NDArray[np.uint8] | None:
    """What is in it, to be read alone; None where it is not there, is another user's, or is not what it was."""
    try:
        with open(file, "rb", opener=_at_once) as handle:
            status = os.fstat(handle.fileno())
            if status.st_size != nbytes + _END or status.st_uid not in (os.geteuid(), _ROOT):
                return None
            shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = np.frombuffer(mmap.mmap(handle.fileno(), 0, shared, mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):  # which a file is that was emptied meanwhile
        return None
    if memory[nbytes:].tobytes() != _end(memory[:nbytes], threads):
        return None
    with suppress(OSError):
        os.utime(file)  # it was used
    return memory[:nbytes]


def created(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """A file's bytes, all zero, to be filled. Raises OSError where the disk has no room for them."""
    with path.open("x+b") as handle:
        os.posix_fallocate(handle.fileno(), 0, nbytes + _END)  # a map of what has no place on the disk ends the process
        return np.frombuffer(mmap.mmap(handle.fileno(), 0), np.uint8)


def make_room(nbytes: int) -> bool:
    """For a file of so many bytes; the disk must keep as many free."""
    return system.make_room(folder(), _SUFFIX, nbytes, MOST, 2 * nbytes)


def _end(memory: NDArray[np.uint8], threads: int) -> bytes:
    return _MAGIC + int(_native.checksum(memory, threads)).to_bytes(8, "little")
