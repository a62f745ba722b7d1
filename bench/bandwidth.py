"""What this machine can read and multiply at best: the ceilings that engines are held against.

    python bench/bandwidth.py [--threads 1 2] [--quick]

read_ceiling.cpp does the measuring and says how; this compiles it for the machine it runs on and keeps the figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import harness

SOURCE = Path(__file__).with_name("read_ceiling.cpp")
BUILD = harness.ROOT / "build" / "bench"


def ceilings(threads: int, quick: bool = False) -> dict[str, Any]:
    """GB/s of reading, and int8, bf16 and f32 GMAC/s (0 where the processor lacks the instruction)."""
    size, seconds, windows = (128, 0.1, 3) if quick else (1024, 1.0, 10)
    return _run(str(threads), str(size), str(seconds), str(windows))


def reading(found: dict[str, Any], quick: bool = False) -> float:
    """GB/s now, at the point of the grid that was the best: for a look before and after something else."""
    best = found["read"]
    size, seconds, windows = (128, 0.1, 2) if quick else (1024, 1.0, 3)
    point = (str(best["streams"]), str(best["prefetch"]), str(int(best["huge"])))
    again = _run(str(found["threads"]), str(size), str(seconds), str(windows), *point)
    return float(again["read"]["gb_s"])


def _run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([_compiled(), *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _compiled() -> str:
    program = BUILD / f"read_ceiling-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        flags = ("-std=c++20", "-O3", "-march=native", "-pthread")
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(program)], check=True)
    return str(program)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="a look of seconds; nothing is kept in results/")
    options = parser.parse_args()
    harness.warn_if_busy()
    machine, stolen = harness.machine(), harness.steal_s()
    found = [ceilings(threads, options.quick) for threads in options.threads]
    results = {"machine": machine, "ceilings": found, "steal_s": harness.steal_s() - stolen}
    path = harness.save("bandwidth", results, BUILD if options.quick else harness.RESULTS)
    rows = [
        [
            str(one["threads"]),
            f"{one['read']['gb_s']:.1f}",
            *(f"{one[t]['gmac_s']:.0f}" for t in ("int8", "bf16", "f32")),
        ]
        for one in found
    ]
    print(harness.table(("threads", "read GB/s", "int8 GMAC/s", "bf16", "f32"), rows))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
