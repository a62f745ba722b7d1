"""What side-by-side programs share: sides in turns, medians with their spread, the machine, one JSON file a program.

A ratio is taken round by round, from two runs a moment apart, so that a machine that slows down slows both sides.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pronk.measure import machine as own_machine
from pronk.system import processors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, list[float]]:
    """What each side measured in each round: A B, then B A, and so on, so that nobody always goes first."""
    for _ in range(warmup):
        for side in sides.values():
            side()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            gc.collect()
            taken[name].append(sides[name]())
        note(f"round {number + 1} of {rounds}: " + ", ".join(f"{n} {v[-1]:.3f}" for n, v in taken.items()))
    return taken


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def machine(*packages: str) -> dict[str, Any]:
    """Processor and the best kernels that it can run, for its name may be that of others too; cores, memory, the load
    at the start, and the versions of Python and of `packages`."""
    from pronk import _native  # the torch engine is measured where this was not built, too

    found = own_machine.machine()
    return {
        **{key: found[key] for key in ("cpu", "cores", "system", "python")},
        "isa": _native.isas()[0],
        "memory_gb": round((found["memory_bytes"] or 0) / 1e9, 1),
        "load_1min": found["load"] or 0.0,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def warn_if_busy() -> None:
    """Others at work take turns with both sides, and not fairly."""
    busy = own_machine.load() or 0.0
    if busy > 0.5:
        say(f"this machine is busy (load {busy:.1f} on {processors()} cores): the numbers will not be worth much")


def commit() -> str:
    """The commit that was measured, and whether src/ differed from it."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        return name + ("+changes" if _git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def steal_s() -> float:
    """Seconds of processor time that the host gave to others since it started, all cores together."""
    try:
        cpu = (
            Path("/proc/stat").read_text().split("\n", 1)[0].split()
        )  # cpu user nice system idle iowait irq softirq steal
    except OSError:
        return 0.0
    return int(cpu[8]) / os.sysconf("SC_CLK_TCK")


def save(program: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program}.json"
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"program": program, "when": when, "commit": commit(), **results}, indent=1) + "\n")
    return path


def before(program: str, results: Mapping[str, Any], folder: Path = RESULTS) -> dict[str, Any]:
    """What `save` wrote before, where it was measured on the same processor and with the same settings; else {}, which
    is said, for it is about to be overwritten."""
    path = folder / f"{program}.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    of, own = found["machine"], results["machine"]
    if found["settings"] != results["settings"] or any(of.get(key) != own.get(key) for key in ("cpu", "isa")):
        say(f"{path.name} is from another processor or other settings: it is begun anew")
        return {}
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right; also valid Markdown."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
