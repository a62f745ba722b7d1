"""What both ways of downloading share: where files go, what their bytes hash to, what is said meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronk.errors import DownloadFailed
from pronk.system import expanded, human_size
from pronk.terminal import shown

_CHUNK = 1 << 20


def home() -> Path:
    """`PRONK_HOME`, or pronk's folder in the user's cache directory."""
    if chosen := os.environ.get("PRONK_HOME"):
        return expanded(chosen).absolute()
    import platformdirs

    return platformdirs.user_cache_path("pronk", appauthor=False)


def digest(path: Path, hasher: Any) -> str:
    """Hexadecimal digest of a file's content, on top of what `hasher` has already seen."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return str(hasher.hexdigest())


def public(name: str) -> str:
    """A model's or a file's name, for everybody to see: of a path its last part; what is no path, as it is."""
    path = Path(name).expanduser()
    local = name.startswith(("/", "~", ".", "\\")) or path.is_absolute() or path.exists() or "\\" in name
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2] or "." if local else name


def say(line: str, progress: bool = True) -> None:
    if progress:
        print(shown(line), file=sys.stderr, flush=True)


def check_space(name: str, folder: Path, need: int, variable: str) -> None:
    """`variable`: of the environment, which moves the folder elsewhere. Raises DownloadFailed."""
    if (free := shutil.disk_usage(folder).free) < need:
        raise DownloadFailed(
            f"{name}: {human_size(need)} of free disk space are needed in {folder} and {human_size(free)} are there; "
            f"make room, or set {variable} to a folder elsewhere"
        )


@contextmanager
def locked(name: str, folder: Path, progress: bool) -> Iterator[None]:
    """One process at a time downloads into a folder, which is made."""
    import filelock

    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"{name}: another process is downloading it; waiting", progress)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(name: str, folder: Path) -> Iterator[None]:
    """What the disk refuses, with the way out."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full; make room" if full else f"{error.strerror or error}; make it writable"
        raise DownloadFailed(f"{name}: {folder}: {what}, or set PRONK_HOME to a folder elsewhere") from error
