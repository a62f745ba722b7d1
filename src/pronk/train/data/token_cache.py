"""The token cache: what a large file of training data is encoded as, in a file that later runs map into memory.

A file's name follows from the SHA-256 of the data, from the tokenizer, the chat template and the options that change an
encoding, and from the code that encodes; its end says what its bytes add up to. What does not agree is encoded anew.
Files that were not used for the longest time make room for others. The pack cache (cpu_engine/pack_cache.py) is alike.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import pronk
from pronk import system
from pronk.checkpoint.hub.local import digest, home
from pronk.tokenizer.vocabulary import TokenizerSource
from pronk.train.data import plain, store
from pronk.train.data.store import Store

LEAST = 1 << 20  # bytes of data; less is encoded about as soon as it is found and checked
MOST = 32 << 30  # of all files together
_SUFFIX = ".tokens"
_CODE = ("train/data", "train/objectives", "tokenizer")  # of ours: what an encoding follows from
_LIBRARIES = ("tokenizers", "sentencepiece", "jinja2")


def folder() -> Path:
    return home() / "tokens"


@dataclass(frozen=True)
class TokenCache:
    """Of one tokenizer. Where the disk does not take a file, nothing is kept. `note` hears of what is."""

    tokenizer: TokenizerSource
    note: Callable[[str], None] = lambda text: None

    def opened_or_made(self, source: str, asked: Mapping[str, Any], write: Callable[[BinaryIO], bool]) -> Store | None:
        """What `source` is encoded as, out of a file, or into one by `write`, which says whether that is worth keeping.

        `asked`: all else that the encoding follows from. None where this data is not for the cache, or the disk fails.
        """
        data = system.expanded(source)
        files, before = _files(data), _statuses(data)
        if before is None or not LEAST <= sum(size for _, size, _ in before) <= MOST:
            return None
        try:
            file = folder() / f"{self._key(data, files, asked)}{_SUFFIX}"
            if there := opened(file):
                return there
            if not make_room(2 * sum(size for _, size, _ in before), evict=False):
                return None
            found = _made(file, write, lambda: _statuses(data) == before)
            if file.exists():
                size = system.human_size(file.stat().st_size)
                self.note(f"kept {size} of tokens in {file.parent} for later runs (--no-token-cache: none)")
            return found
        except OSError:
            return None

    def _key(self, data: Path, files: list[Path], asked: Mapping[str, Any]) -> str:
        found = hashlib.sha256(_code().encode())
        source = self.tokenizer
        if source.kind != "gguf":  # whose settings hold the vocabulary
            found.update(digest(source.path, hashlib.sha256()).encode())
        _feed(found, [source.kind, source.settings, source.chat_template, asked, plain.is_text(data)])
        for file in files:
            found.update(f"{file.relative_to(data)!s} {digest(file, hashlib.sha256())}\n".encode("utf-8", "replace"))
        return found.hexdigest()[:32]


def _made(file: Path, write: Callable[[BinaryIO], bool], unchanged: Callable[[], bool]) -> Store | None:
    with ExitStack() as held:
        worth, fresh = False, None
        with suppress(_NotKept), system.replacing(file) as part:
            part.touch(mode=0o600, exist_ok=False)  # the data may be nobody else's to read
            fresh = held.enter_context(part.open("r+b"))
            worth = write(fresh)
            fresh.flush()
            if not (worth and unchanged() and make_room(fresh.tell())):
                raise _NotKept
        return Store(store.mapped(fresh)) if worth and fresh else None


class _NotKept(Exception):
    """A file that is not to stay, and may yet be what was asked for."""


def opened(file: Path) -> Store | None:
    """None where it is not there, or is not what it was."""
    try:
        with file.open("rb") as handle:
            if not store.whole(handle):
                return None
            found = Store(store.mapped(handle))
    except (OSError, ValueError):  # which a file is that was emptied meanwhile
        return None
    with suppress(OSError):
        os.utime(file)  # it was used
    return found


def make_room(nbytes: int, *, evict: bool = True) -> bool:
    """For a file of so many bytes; the disk must keep as many free. `evict`: others of the cache, the oldest first."""
    return system.make_room(folder(), _SUFFIX, nbytes, MOST, nbytes, evict=evict) and nbytes <= MOST


def _files(data: Path) -> list[Path]:
    return plain.files(data) if data.is_dir() else [data]


def _statuses(data: Path) -> list[tuple[str, int, int]] | None:
    """Of each file its name, size and time; None where there is none."""
    try:
        found = [(str(file), file.stat()) for file in _files(data)]
    except OSError:
        return None
    if not all(Path(name).is_file() for name, _ in found):
        return None
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


@cache
def _code() -> str:
    root, found = Path(pronk.__file__).parent, hashlib.sha256()
    for room in _CODE:
        for file in sorted((root / room).glob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest() + " ".join(metadata.version(name) for name in _LIBRARIES)


def _feed(found: hashlib._Hash, value: Any) -> None:
    """The same for equal values, and for nothing else."""
    if isinstance(value, Mapping):
        _feed(found, [[key, value[key]] for key in sorted(value)])
    elif isinstance(value, list | tuple):
        found.update(f"[{len(value)}]".encode())
        for one in value:
            _feed(found, one)
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    else:
        found.update(f"{type(value).__name__} {value!r}\n".encode("utf-8", "surrogateescape"))
