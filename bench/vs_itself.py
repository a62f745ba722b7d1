"""This checkout beside another one of pronk, in turns: whether a change has cost any speed.

    python bench/vs_itself.py --other PYTHON [--formats q8 int8 q4 bf16 Q4_K_M] [--rounds 10] [--isa avx2]

PYTHON is that of an environment in which the other checkout is installed. The CPU engine, the default model's weights
in each format, or a file of a type in capitals: prefill 512, decode 128, 16 texts at once; then `import pronk` and a
process's first token. A row holds if the median of the rounds' ratios is 0.98 or more: under it, somebody should look.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import harness
import models
import tasks
from sides.pipe import Side

LEAST = 0.98
PROMPT = "Three good reasons to plant a tree:"


def import_s(python: str) -> float:
    script = "import time; begun = time.perf_counter(); import pronk; print(time.perf_counter() - begun)"
    return float(subprocess.check_output([python, "-c", script]))


def first_token_s(python: str, quantize: str, threads: int) -> float:
    command = [python, "-m", "pronk", "generate", "--quantize", quantize, "--threads", str(threads), "-n", "1", PROMPT]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stdout.read(1)
        return time.perf_counter() - begun


def starts(pythons: dict[str, str], formats: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Seconds, and ratios of speed: over 1 where this checkout is sooner."""
    found = {}
    for name, run in {
        "import": lambda python: import_s(python),
        **{f"first token, {f}": lambda python, f=f: first_token_s(python, f, threads) for f in formats},
    }.items():
        taken = harness.interleave({who: lambda p=p, run=run: run(p) for who, p in pythons.items()}, rounds)
        found[name] = {
            "seconds": {who: harness.spread(values) for who, values in taken.items()},
            "ratio": harness.ratios(taken["other"], taken["pronk"]),
        }
    return found


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, by_task in results["measured"].items():
        for task, taken in by_task.items():
            ours, theirs, ratio = taken["tok_s"]["pronk"], taken["tok_s"]["other"], taken["ratio"]
            rows.append([f"{name}, {task}", f"{ours['median']:.4g}", f"{theirs['median']:.4g}", _ratio(ratio)])
    for name, taken in results["starts"].items():
        ours, theirs = (f"{taken['seconds'][who]['median'] * 1e3:.1f} ms" for who in ("pronk", "other"))
        rows.append([name, ours, theirs, _ratio(taken["ratio"])])
    return harness.table(("tokens/s (medians)", "this", "other", "ratio"), rows)


def _ratio(ratio: dict[str, float]) -> str:
    under = "" if ratio["median"] >= LEAST else " (under 0.98)"
    return f"{ratio['median']:.3f} ({ratio['min']:.2f} to {ratio['max']:.2f}){under}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tasks.add_options(parser)
    parser.add_argument("--other", required=True, help="the Python of the other checkout's environment")
    parser.add_argument("--formats", nargs="+", default=["q8", "int8", "q4", "bf16"])
    parser.add_argument("--isa", help="take these kernels, as PRONK_ISA does")
    parser.set_defaults(rounds=10)
    options = parser.parse_args()
    if options.isa:
        os.environ["PRONK_ISA"] = options.isa
    sizes, rounds = (tasks.QUICK, 2) if options.quick else (tasks.Sizes(), options.rounds)
    harness.warn_if_busy()
    stored = {name: models.gguf("smollm2-135m", name) for name in options.formats if name.isupper()}
    weights = models.gguf("smollm2-135m", "F32")
    pythons = {"pronk": sys.executable, "other": options.other}
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "commit": harness.commit(),
        "settings": {"threads": options.threads, "rounds": rounds, "isa": options.isa, "sizes": sizes.to_dict()},
        "measured": {},
    }
    for quantize in options.formats:
        results["measured"][quantize] = {}
        with Side("pronk_side", pythons["pronk"]) as ours, Side("pronk_side", pythons["other"]) as theirs:
            for side in (ours, theirs):
                path, to = (stored[quantize], "auto") if quantize in stored else (weights, quantize)
                loaded = side.load(path=str(path), engine=options.engine, quantize=to, threads=options.threads)
            for task in ("prefill", "decode", "batch"):
                harness.say(quantize)
                found = tasks.measure(task, ours, theirs, "other", loaded["vocab_size"], sizes, rounds)
                results["measured"][quantize][task] = found
    quantized = [name for name in options.formats if name not in stored]
    results["starts"] = starts(pythons, ["auto", *quantized], options.threads, rounds)
    if not options.quick:
        harness.say(f"written to {harness.save('vs_itself' + (f'-{options.isa}' if options.isa else ''), results)}")
    print(report(results))


if __name__ == "__main__":
    main()
