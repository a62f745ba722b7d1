"""What a side is asked to do, and how two of them are asked in turn: the same prompts, never the same one twice.

A prompt that came before might be answered from a cache of prefixes, so each round has its own, of random tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import harness
from sides.pipe import Side

FIRST_PLAIN_ID = 300  # below it vocabularies keep control tokens and bytes


@dataclass(frozen=True)
class Sizes:
    prefill: int = 512
    long: int = 4096
    prompt: int = 32  # before decoding
    new: int = 128
    sequences: int = 16

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


QUICK = Sizes(prefill=64, long=256, prompt=16, new=16, sequences=4)
TASKS = ("prefill", "decode", "batch", "long")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that every comparison has."""
    parser.add_argument("--engine", default="cpu", choices=["cpu", "torch"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="short texts, two rounds; nothing is kept in results/")


def measure(
    task: str, ours: Side, theirs: Side, peer: str, vocab_size: int, sizes: Sizes, rounds: int
) -> dict[str, Any]:
    """Tokens a second of both sides, their ratio round by round, and the memory each has peaked at so far."""
    sides = {"pronk": ours, peer: theirs}
    ctx, sequences = context(task, sizes)
    for side in sides.values():
        side.prepare(ctx=ctx, sequences=sequences)
    runs = {name: _rate_of(task, side, vocab_size, sizes) for name, side in sides.items()}
    rates = harness.interleave(runs, rounds, note=lambda line: harness.say(f"  {task}: {line}"))
    return {
        "tok_s": {name: harness.spread(values) | {"rounds": values} for name, values in rates.items()},
        "ratio": harness.ratios(rates["pronk"], rates[peer]),
        "peak_rss_mb": {name: side.memory()["peak"] for name, side in sides.items()},
    }


def context(task: str, sizes: Sizes) -> tuple[int, int]:
    """Tokens a sequence, and sequences, that a side must make room for."""
    tokens = {"prefill": sizes.prefill + 1, "long": sizes.long + 1}.get(task, sizes.prompt + sizes.new)
    return -(-tokens // 256) * 256, sizes.sequences if task == "batch" else 1


def _rate_of(task: str, side: Side, vocab_size: int, sizes: Sizes) -> Callable[[], float]:
    rounds = itertools.count()

    def prompts(count: int, length: int) -> list[list[int]]:
        numbers = random.Random(f"{task} {next(rounds)}")  # the same for both sides
        return [[numbers.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(length)] for _ in range(count)]

    def run() -> float:
        if task in ("prefill", "long"):
            length = sizes.prefill if task == "prefill" else sizes.long
            return length / float(side.prefill(ids=prompts(1, length)[0]))
        if task == "decode":
            (ids,) = prompts(1, sizes.prompt)
            return (sizes.new - 1) / float(side.decode(ids=ids, new=sizes.new)["seconds"])
        many = prompts(sizes.sequences, sizes.prompt)
        return sizes.sequences * (sizes.new - 1) / float(side.decode_batch(prompts=many, new=sizes.new))

    return run


def with_spread(values: dict[str, Any], digits: int = 1) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}-{values['max']:.{digits}f})"
