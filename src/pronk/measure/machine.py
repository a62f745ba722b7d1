"""The machine that figures come from: without it they mean nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, system, Python, and the load when it was asked."""
    return {
        "cpu": _value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": _memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load": load(),
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """Of the last minute: how many processes wanted to run at once. None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _memory() -> int | None:
    kib = _value("/proc/meminfo", "MemTotal")
    return int(kib.split()[0]) * 1024 if kib else None


def _value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
