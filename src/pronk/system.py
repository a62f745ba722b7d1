"""What is asked of the system: processors, memory, where things lie, and files that are replaced whole."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from pronk.errors import NotEnoughMemory, PronkError

_CGROUPS = Path("/sys/fs/cgroup")
_M_ARENA_MAX = -8  # of glibc's malloc.h


def check_memory(need: int, what: str, way_out: str, free: int | None = None) -> None:
    """Raise NotEnoughMemory where `need` bytes are more than are free: `free`, if it is known already."""
    free = free_memory() if free is None else free
    if free is not None and need > free:
        raise NotEnoughMemory(f"{what} needs {human_size(need)} of memory, and {human_size(free)} are free", way_out)


def check_disk(path: Path, need: int) -> None:
    """Raise PronkError where the disk that `path` is to be written to has not so many bytes left."""
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        if need > free:
            sizes = f"takes {human_size(need)}, and its disk has {human_size(free)} left"
            raise PronkError(f"{path} {sizes}; make room, or write elsewhere")


def free_memory() -> int | None:
    """What the system and this process's cgroups still give; None where neither tells: outside of Linux."""
    found = [free for free in (_bytes("meminfo", "MemAvailable"), _cgroup()) if free is not None]
    return min(found, default=None)


def held_memory() -> int | None:
    """What this process holds now (VmRSS); None where the system does not say."""
    return _bytes("self/status", "VmRSS")


def whole_memory() -> int | None:
    """What the machine has; None where the system does not say."""
    return _bytes("meminfo", "MemTotal")


def said(file: str, key: str) -> str | None:
    """What a file below /proc says first under `key`; None where there is no such file or key."""
    lines = _read(Path("/proc", file)).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _bytes(file: str, key: str) -> int | None:
    found = said(file, key)
    return int(found.split()[0]) * 1024 if found else None


def _cgroup() -> int | None:
    """The least of the groups on the way to the root, each less what it uses. Cached files can be dropped."""
    found = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():  # "0::/path", and for version 1 "4:memory:/path"
        _, controllers, own = line.split(":", 2)
        if not controllers:
            root, names, files = _CGROUPS, ("memory.max", "memory.current"), "{}active_file"
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / controllers, ("memory.limit_in_bytes", "memory.usage_in_bytes")
            files = "total_{}active_file"  # its groups' included, as in the usage
        else:
            continue
        group = root / own.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                cached = sum(int(stat.get(files.format(kind), 0)) for kind in ("", "in"))
                found.append(max(0, int(limit) - int(used) + cached))
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def human_size(nbytes: float) -> str:
    """1.5 GB, 93.0 MB, 512 B; a kilobyte has 1000 bytes, as on disks."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def peak_memory() -> int | None:
    """The most that this process has held since its start, or since `reset_peak_memory`; None where nobody says."""
    if peak := _bytes("self/status", "VmHWM"):  # Linux's getrusage would count what the parent held before it
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def reset_peak_memory() -> bool:
    """Let the peak begin anew from what is held; False where the system does not let us (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def trim_memory() -> None:
    """Give the system back what is free, where the C library can be told to (glibc).

    Parsing a tokenizer.json of 49,152 tokens leaves 24 MB behind, one of 128,256 leaves 130. The weights, which are
    loaded next, are allocated elsewhere.
    """
    if sys.platform == "linux" and (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        malloc_trim(0)


def share_memory() -> None:
    """Have threads allocate from two places instead of one each (mallopt(3), M_ARENA_MAX).

    glibc's each keep what their largest moment took: a server's grew by 5% over its first 15,000 requests, by 0.4% so.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_ARENA_MAX, 2)


def collect_memory() -> None:
    """Collect garbage, and give it back: what the C library keeps for later would hide what comes next."""
    gc.collect()
    trim_memory()


def processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expanded(path: str | os.PathLike[str]) -> Path:
    """With `~` and `~user` for home directories; a `~user` whom nobody knows stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises where there is no such user


def named(path: Path) -> Path:
    """One whose last part is a name: of a link its own, of `.` and `..` what they lead to."""
    return path.resolve() if path.name in ("", "..") else path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`, of a file or a folder, to write to. It takes its place at the end, and is removed on any
    failure, Ctrl-C included: nobody ever finds half of it. What a process left that was killed is removed by the next
    that writes there. Raises OSError, with the name of `path`.
    """
    _clear_beside(path)
    fresh, old, lock = _beside(path, f"{os.getpid()}.{next(_writes)}")
    held = _hold(lock)
    try:
        yield fresh
        if path.is_dir() and fresh.is_dir():  # one that holds files cannot be replaced in one step
            path.rename(old)
        fresh.replace(path)
    except BaseException as error:
        if old.exists() and not path.exists():
            old.rename(path)
        if isinstance(error, OSError) and error.filename == str(fresh):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        for leftover in (fresh, old):
            _remove(leftover)
        if held is not None:
            os.close(held)
            _remove(lock)


_writes = itertools.count()  # of this process, whose threads may write to one path


def clear_leftovers(folder: Path, suffix: str) -> None:
    """Take away what processes left in a folder that were killed while they were replacing files of such names."""
    for lock in folder.glob(f".*{escape(suffix)}.*.lock"):
        _clear_beside(folder / lock.name[1:].rsplit(".", 3)[0])


def make_room(folder: Path, suffix: str, nbytes: int, most: int, free: int, *, evict: bool = True) -> bool:
    """In a cache of files whose names end in `suffix`, for one of so many bytes: all together have `most`, and the disk
    must keep so many `free`. `evict`: others of the cache, those first that were not used for the longest time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder, suffix)
        sizes = {file: file.lstat().st_size for file in folder.glob(f"*{suffix}")}
        oldest = sorted(sizes, key=lambda file: file.lstat().st_mtime_ns)
        while evict and oldest and sum(sizes.values()) + nbytes > most:
            sizes.pop(oldest[0])
            oldest.pop(0).unlink(missing_ok=True)
        return shutil.disk_usage(folder).free >= free
    except OSError:
        return False


def _beside(path: Path, write: str) -> tuple[Path, Path, Path]:
    """What is written, what stood there before, and the file that its writer keeps locked while it lives. `write`: the
    process's number, and which of its writes it is."""
    new, old, lock = (path.with_name(f".{path.name}.{write}.{kind}") for kind in ("part", "old", "lock"))
    return new, old, lock


def _clear_beside(path: Path) -> None:
    """Take away what processes left beside `path` that are no more. Their locks tell: numbers of processes are used
    again, and mean nothing in another container."""
    for lock in path.parent.glob(f".{escape(path.name)}.*.lock"):
        write = lock.name[len(path.name) + 2 : -len(".lock")]
        held = _hold(lock) if write.replace(".", "", 1).isdecimal() else None
        if held is None:
            continue
        fresh, old, _ = _beside(path, write)
        _clear_beside(fresh)  # which may have been written in the same way
        with suppress(OSError):
            if old.exists() and not path.exists():  # it died between two steps
                old.rename(path)
        for leftover in (fresh, old):
            _remove(leftover)
        os.close(held)
        _remove(lock)


def _hold(lock: Path) -> int | None:
    """A descriptor that keeps `lock` locked until it is closed, or its process dies; None where that cannot be."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError | PermissionError):  # nobody holds it: this disk knows no locks
            _remove(lock)
        return None
    return descriptor


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
