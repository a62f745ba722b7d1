"""A pass of a few tokens beside a pass of one, after 512 tokens of context: drafts, beams, small crowds at a server.

    python bench/few_tokens.py [--formats int8 q8 q4 bf16 Q4_K_M Q6_K] [--isa avx2] [--rounds 5] [--quick]

A random model of 1.1 billion weights (random_model.py), so that memory is what one token waits for. Formats of pronk's
are made of its BF16 file; those of llama.cpp's names are files of its quantizer, run as they are. Every format has a
process of its own, and all take turns: in each round each measures each number of tokens, several passes of which the
median counts. Of each round there is a ratio to its pass of one token. Results are kept under the instruction set's
name, format by format.

Beside each stands the share of a limit: no pass is faster than its weights can be read, at the ceiling measured just
before in the same round (a shared machine's memory has a fast and a slow hour), nor than its tokens can be multiplied,
at the best rate of any pass of that round (one of 96 tokens included).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from typing import Any

import bandwidth
import harness
import models
import numpy as np
import speed_tables
from sides.pipe import Side

COUNTS = (1, 2, 4, 8, 16, 32)
MANY = 96  # for the best rate
CONTEXT, PASSES = 512, 5
FILES = ("Q4_0", "Q4_K_M", "Q6_K", "Q5_K_M", "Q3_K_M", "Q2_K")


def load(stack: contextlib.ExitStack, model: str, name: str, threads: int, context: list[int]) -> tuple[Side, float]:
    """And the megabytes of its weights."""
    side = stack.enter_context(Side("pronk_side"))
    path = models.gguf(model, name if name in FILES else models.ORIGIN[model])
    loaded = side.load(path=str(path), engine="cpu", quantize="auto" if name in FILES else name, threads=threads)
    side.remember(ids=context, more=MANY)
    harness.say(f"{name} is loaded")
    return side, loaded["weights_mb"]


def shares(ms: dict[int, list[float]], read_ms: list[float]) -> dict[str, dict[str, float]]:
    """Of what is possible: what a pass's limit is of its time, over the rounds."""
    a_token = [min(took / n for n, took in zip(ms, each, strict=True)) for each in zip(*ms.values(), strict=True)]
    return {
        str(n): harness.spread(
            [max(read, n * one) / took for read, one, took in zip(read_ms, a_token, ms[n], strict=True)]
        )
        for n in COUNTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int8", "q8", "q4", "bf16", "Q4_0", "Q4_K_M", "Q6_K"])
    parser.add_argument("--isa", help="an instruction set, as PRONK_ISA has it; the default is the best one")
    parser.add_argument("--model", default=models.RANDOM)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="the default model, one round; nothing is kept in results/"
    )
    options = parser.parse_args()
    if options.isa:
        os.environ["PRONK_ISA"] = options.isa  # which the sides inherit
    model, rounds = (models.SMOLLM2, 1) if options.quick else (options.model, options.rounds)
    folder = models.FOLDER if options.quick else harness.RESULTS
    harness.warn_if_busy()
    numbers = np.random.default_rng(0).integers(300, 30000, CONTEXT + MANY).tolist()
    context, ids = numbers[:CONTEXT], numbers[CONTEXT:]
    taken: dict[str, dict[int, list[float]]] = {name: {n: [] for n in (*COUNTS, MANY)} for name in options.formats}
    gb_s: dict[str, list[float]] = {name: [] for name in options.formats}
    ceiling = bandwidth.ceilings(options.threads, options.quick)
    with contextlib.ExitStack() as stack:
        loaded = {name: load(stack, model, name, options.threads, context) for name in options.formats}
        sides = {name: side for name, (side, _) in loaded.items()}
        for number in range(-1, rounds):  # the first warms up
            for name in list(sides) if number % 2 == 0 else reversed(sides):
                if number >= 0:
                    gb_s[name].append(bandwidth.reading(ceiling, options.quick))
                for n in (*COUNTS, MANY):
                    passes = [1e3 * sides[name].pass_after(ids=ids[:n]) for _ in range(1 if n == MANY else PASSES)]
                    if number >= 0:
                        taken[name][n].append(statistics.median(passes))
            harness.say(f"round {number + 1} of {rounds}")
    measured = {
        name: {
            "one_ms": harness.spread(ms[1]),
            "ratios": {str(n): harness.ratios(ms[n], ms[1]) for n in COUNTS[1:]},
            "read_gb_s": harness.spread(gb_s[name]),
            "of_limit": shares(ms, [loaded[name][1] / each for each in gb_s[name]]),
        }
        for name, ms in taken.items()
    }
    path = folder / "few_tokens.json"
    results: dict[str, Any] = json.loads(path.read_text())["measured"] if path.exists() else {}
    about = {
        "threads": options.threads,
        "rounds": rounds,
        "machine": harness.machine("numpy"),
        "commit": harness.commit(),
    }
    isa = options.isa or "best"
    results[isa] = {**results.get(isa, {}), **{name: {**one, **about} for name, one in measured.items()}}
    settings = {"model": model, "context": CONTEXT, "passes": PASSES}
    path = harness.save("few_tokens", {"settings": settings, "measured": results}, folder)
    print(speed_tables.few_tokens({"measured": {isa: results[isa]}}))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
