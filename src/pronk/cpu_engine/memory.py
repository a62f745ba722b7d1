"""How much memory is free, asked before it is needed: the system grants more than there is, and kills later."""

from __future__ import annotations

from pathlib import Path

from pronk.errors import NotEnoughMemory

_CGROUPS = Path("/sys/fs/cgroup")


def check(need: int, what: str, way_out: str, free: int | None = None) -> None:
    """Raise NotEnoughMemory where `need` bytes are more than are free: `free`, if it is known already."""
    free = free_bytes() if free is None else free
    if free is not None and need > free:
        raise NotEnoughMemory(f"{what} needs {_size(need)} of memory, and {_size(free)} are free", way_out)


def free_bytes() -> int | None:
    """What the system and this process's cgroups still give; None where neither tells: outside of Linux."""
    found = [free for free in (_system(), _cgroup()) if free is not None]
    return min(found, default=None)


def held() -> int | None:
    """What this process holds now (VmRSS); None where the system does not say."""
    line = next((line for line in _read(Path("/proc/self/status")).splitlines() if line.startswith("VmRSS:")), None)
    return int(line.split()[1]) * 1024 if line else None


def _system() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
