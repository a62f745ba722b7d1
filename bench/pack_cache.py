"""How soon a large model answers that has been packed before: the pack cache, in turns with packing at every start.

    python bench/pack_cache.py [--formats q8 int8 q4] [--threads 2] [--rounds 5]

The model has the shape of TinyLlama and random weights (`random_model.py`), in bf16. Each start is a process of its
own; the first token, of a prompt of six, is timed from after `import pronk` on. The files lie in the page cache, the
packed ones in a folder that is removed. What two processes hold that run the model at once is their Pss, the system's
own account of what is theirs: of a page that n of them share, each has one n-th. Decoding is timed in one process that
has the model twice, since weights that lie in a file cannot lie in huge pages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import random_model
import speed_tables

import pronk

PROMPT = [5, 6, 7, 8, 9, 10]
NEW = 24
GOAL_S = 0.5
CHILD = """
import sys, time
import pronk, pronk.loading
begun = time.perf_counter()
path, quantize, threads, kept = sys.argv[1:]
llm = pronk.load(path, engine="cpu", quantize=quantize, threads=int(threads), pack_cache=kept == "kept")
llm.generate([[5, 6, 7, 8, 9, 10]], max_new_tokens=1)
print(time.perf_counter() - begun, flush=True)
sys.stdin.read()
"""


@contextmanager
def started(model: Path, quantize: str, threads: int, kept: bool) -> Iterator[tuple[float, int]]:
    """Seconds to the first token, and the number of a process that stays while this lasts."""
    given = [str(model), quantize, str(threads), "kept" if kept else "anew"]
    command = [sys.executable, "-c", CHILD, *given]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=usual, text=True, **pipes) as process:
        assert process.stdin
        assert process.stdout
        yield float(process.stdout.readline()), process.pid
        process.stdin.close()


def first_token_s(*of: Any) -> float:
    with started(*of) as (seconds, _):
        return seconds


def pss_mb(number: int) -> float:
    lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def two_mb(*of: Any) -> float:
    """What two processes hold, together."""
    with started(*of) as (_, first), started(*of) as (_, second):
        return pss_mb(first) + pss_mb(second)


def decoding_ms(llm: pronk.LLM) -> float:
    """Of a token."""

    def seconds(new: int) -> float:
        begun = time.perf_counter()
        llm.generate([PROMPT], max_new_tokens=new, ignore_eos=True)
        return time.perf_counter() - begun

    seconds(1)  # the prompt is read, and stays
    return (seconds(NEW) - seconds(1)) / (NEW - 1) * 1e3


def measured(model: Path, quantize: str, threads: int, rounds: int) -> dict[str, Any]:
    of = model, quantize, threads
    first = first_token_s(*of, True)  # which packs into a file
    starts = harness.interleave(
        {"kept": lambda: first_token_s(*of, True), "anew": lambda: first_token_s(*of, False)}, rounds, note=harness.say
    )
    memory = {"kept": two_mb(*of, True), "anew": two_mb(*of, False)}
    options: dict[str, Any] = {"engine": "cpu", "quantize": quantize, "threads": threads, "prefix_cache": 64}
    with pronk.load(model, **options, pack_cache=True) as kept, pronk.load(model, **options) as anew:
        decode = harness.interleave(
            {"kept": lambda: decoding_ms(kept), "anew": lambda: decoding_ms(anew)}, rounds, note=harness.say
        )
        weights = anew.backend.nbytes
    return {
        "packed_mb": weights / 1e6,
        "first_start_s": first,
        "first_token_s": {name: harness.spread(taken) for name, taken in starts.items()},
        "two_processes_mb": memory,
        "decode_ms": {name: harness.spread(taken) for name, taken in decode.items()},
        "decode_ratio": harness.ratios(decode["kept"], decode["anew"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q8", "int8", "q4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "settings": {"model": "random-1.1b", "threads": options.threads, "rounds": options.rounds},
        "goals": {"first_token_s": GOAL_S},
        "measured": {},
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("PRONK_BENCH_MODELS")) as folder:
        os.environ["PRONK_HOME"] = folder
        model = Path(folder) / "random-1.1b.gguf"
        random_model.write_random(model)
        for format in options.formats:
            harness.say(format)
            results["measured"][format] = measured(model, format, options.threads, options.rounds)
            harness.say(f"written to {harness.save('pack_cache', results)}")
    print(speed_tables.pack_cache(results))


if __name__ == "__main__":
    main()
