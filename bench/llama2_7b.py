"""A model of Llama-2-7B's shape in each format: loading, memory, prefill and decode, batches, with and without a cache.

    python bench/llama2_7b.py [--formats q4 q8 int8 llm-int8 bf16] [--batches 1 8 16] [--threads 2]

The weights are random, so quality is not measured here: speed and memory do not depend on what weights say. `q4` loads
the Q4_0 file that llama.cpp loads, and takes turns with it; the others are made of the bf16 file as it is loaded.
Without a cache a token costs a pass over all of its text: of these, few are measured.
"""

from __future__ import annotations

import argparse
import itertools
import random
from contextlib import ExitStack
from typing import Any

import bandwidth
import harness
import models
import speed_tables
import tasks
from sides.pipe import Side

PEER = "llama.cpp"
PROMPT, NEW, NEW_UNCACHED = 256, 32, 2
MOST_UNCACHED = 8  # texts at once: more would take minutes a token
_ROUNDS = itertools.count()


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Never the same twice."""
    numbers = random.Random(f"7b {next(_ROUNDS)}")
    return [[numbers.randrange(tasks.FIRST_PLAIN_ID, vocab_size) for _ in range(PROMPT)] for _ in range(count)]


def rates(side: Side, asked: list[list[int]], cache: bool) -> dict[str, float]:
    """Tokens a second, all sequences together. Without a cache reading and writing are the same work."""
    new = NEW if cache else NEW_UNCACHED
    taken = side.time_batch(prompts=asked, new=new, cache=cache)
    if not cache:
        return {"decode": len(asked) * new / taken["all_s"]}
    return {
        "prefill": len(asked) * PROMPT / taken["first_s"],
        "decode": len(asked) * (new - 1) / (taken["all_s"] - taken["first_s"]),
    }


def measure(name: str, options: argparse.Namespace, ceiling: Any) -> dict[str, Any]:
    path = models.gguf(models.RANDOM_7B, "Q4_0" if name == "q4" else "BF16")
    measured: dict[str, Any] = {"file": path.name}
    before = bandwidth.reading(ceiling, quick=True)
    with ExitStack() as stack:
        sides = {"pronk": stack.enter_context(Side("pronk_side"))}
        loaded = sides["pronk"].load(path=str(path), engine="cpu", quantize=name, threads=options.threads)
        found = {"pronk": {"load_s": loaded["load_s"], "cached": {}, "uncached": {}}}
        if name == "q4":
            sides[PEER] = stack.enter_context(Side("llama_cpp_side", models.PEERS_PYTHON))
            theirs = sides[PEER].load(path=str(path), threads=options.threads)
            found[PEER] = {"load_s": theirs["load_s"], "cached": {}, "uncached": {}}
        for count, cache in itertools.product(options.batches, (True, False)):
            if not cache and count > MOST_UNCACHED:
                continue
            having = sides if cache else {"pronk": sides["pronk"]}  # llama.cpp has no other way
            taken: dict[str, list[dict[str, float]]] = {side: [] for side in having}
            for side in having.values():
                side.prepare(ctx=-(-(PROMPT + NEW) // 256) * 256, sequences=count)
            for number in range(options.rounds if count == 1 else 1):
                asked = prompts(count, loaded["vocab_size"])
                for side in sorted(having, reverse=number % 2 > 0):
                    taken[side].append(rates(having[side], asked, cache))
            for side, rounds in taken.items():
                spread = {key: harness.spread([one[key] for one in rounds]) for key in rounds[0]}
                found[side]["cached" if cache else "uncached"][str(count)] = spread
                harness.say(f"  {side}, {name}, {count} at once, {'with' if cache else 'without'} a cache: {spread}")
        for side, own in sides.items():
            found[side]["memory_mb"] = own.memory()
    measured["sides"] = found
    measured["read_ceiling_gb_s"] = {"before": before, "after": bandwidth.reading(ceiling, quick=True)}
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q4", "q8", "int8", "llm-int8", "bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of one text at a time; of more there is one")
    options = parser.parse_args()
    harness.warn_if_busy()
    ceiling = bandwidth.ceilings(options.threads)
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "ceilings": [ceiling],
        "settings": {"prompt": PROMPT, "new": NEW, "new_uncached": NEW_UNCACHED, **vars(options)},
        "measured": {},
    }
    del results["settings"]["formats"]
    results["measured"] = harness.before("llama2_7b", results).get("measured", {})  # rows that are not run again
    for name in options.formats:
        results["measured"][name] = measure(name, options, ceiling)
        harness.save("llama2_7b", results)
    print(speed_tables.llama2_7b(results))


if __name__ == "__main__":
    main()
