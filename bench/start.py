"""How soon pronk answers, and what it holds: `import pronk`, a process's first token, its memory beside the weights.

    python bench/start.py [--formats auto int8 q8 bf16] [--threads 2] [--rounds 7]

Each run is a process of its own, `pronk generate` as a user types it, on the default model, which the first run has
left in the page cache. The first token is timed from before the process is made to the first byte that it prints.
Memory is the peak of a process that writes 128 tokens, beside its packed weights and the keys and values of what
it has read and written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import harness

from pronk import checkpoint
from pronk.checkpoint.hub import resolve as hub
from pronk.cpu_engine.plan import plan

PROMPT = "Three good reasons to plant a tree:"
GOALS = {"import_ms": 80, "first_token_s": 0.7, "beside_mb": 120}


def import_ms(module: str) -> float:
    """Milliseconds that a fresh interpreter takes for `import module`."""
    script = f"import time; begun = time.perf_counter(); import {module}; print(time.perf_counter() - begun)"
    return float(subprocess.check_output([sys.executable, "-c", script])) * 1e3


def generate(dtype: str, threads: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pronk", "generate", "--quantize", dtype, "--threads", str(threads), *options]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, PROMPT], **pipes)


def first_token_s(dtype: str, threads: int) -> float:
    begun = time.perf_counter()
    with generate(dtype, threads, "-n", "1", "--temperature", "0") as process:
        assert process.stdout
        assert process.stdout.read(1), f"pronk generate --quantize {dtype} printed nothing"
        return time.perf_counter() - begun


def memory_mb(dtype: str, threads: int, new: int = 128) -> dict[str, float]:
    """The peak of a process, and what of it are packed weights, and keys and values."""
    with generate(dtype, threads, "-n", str(new), "--ignore-eos", "--json") as process:
        assert process.stdout
        answer = json.loads(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
    planned = plan(checkpoint.open(hub.resolve(hub.DEFAULT_MODEL)), dtype)
    kv = (answer["prompt_tokens"] + len(answer["tokens"])) * planned.kv_a_token
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak": peak / 1e6, "weights": planned.weights / 1e6, "kv": kv / 1e6}


def report(results: dict[str, Any]) -> str:
    rows = [
        [f"import {name}", f"{taken['median']:.0f} ms ({taken['min']:.0f} to {taken['max']:.0f})", "", ""]
        for name, taken in results["import_ms"].items()
    ]
    for dtype, measured in results["measured"].items():
        taken, memory = measured["first_token_s"], measured["memory_mb"]
        rows.append(
            [
                f"pronk generate -n 1 --quantize {dtype}",
                f"{taken['median']:.2f} s ({taken['min']:.2f} to {taken['max']:.2f})",
                f"{memory['peak']:.0f}",
                f"{memory['peak'] - memory['weights'] - memory['kv']:.0f}",
            ]
        )
    return harness.table(("SmolLM2-135M, CPU engine", "to the first token", "peak, MB", "beside weights and KV"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["auto", "int8", "q8", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "settings": {"model": hub.DEFAULT_MODEL, "threads": options.threads, "rounds": options.rounds},
        "goals": GOALS,
    }
    modules = {name: lambda name=name: import_ms(name) for name in ("pronk", "numpy")}
    results["import_ms"] = {k: harness.spread(v) for k, v in harness.interleave(modules, options.rounds).items()}
    starts = {dtype: lambda dtype=dtype: first_token_s(dtype, options.threads) for dtype in options.formats}
    taken = harness.interleave(starts, options.rounds, note=harness.say)
    results["measured"] = {}
    for dtype in options.formats:
        runs = [memory_mb(dtype, options.threads) for _ in range(3)]
        memory = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results["measured"][dtype] = {"first_token_s": harness.spread(taken[dtype]), "memory_mb": memory}
    path = harness.save("start", results)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
