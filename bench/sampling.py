"""What drawing a token takes: the CPU engine's sampler beside its meaning in numpy, alone and 64 texts at once.

    python bench/sampling.py [--threads 2] [--rounds 7] [--processor-time] [--quick]

First as a share of a step: 64 texts of the default model in q8, each 64 tokens long, go on by a token, and their tokens
are drawn from these logits at temperature 1 with top-p 0.9. A round is a pass and both ways of drawing from it, in
turns. Then each setting alone, on random logits, normal with a standard deviation of 3, as those of a language model
are about; 512 tokens of a text are behind each where penalties look at them. Times are of the clock, or of all threads
on the processor, which is fairer where others are at work; they hold what Python does around the call. Both sides must
draw the same tokens, or there are no figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

import pronk
from pronk.config import ModelConfig
from pronk.cpu_engine.backend import load_native, new_model
from pronk.cpu_engine.predictions import CpuPredictions
from pronk.engine.batch import Batch, Run
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.prefix_cache import BLOCK_SIZE

VOCABULARIES = (49_152, 128_256)
TEXTS = (1, 64)
BEHIND = 512
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs 5": {"logprobs": 5},
    "all of them": {
        **{"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 5},
    },
}


def asks(texts: int, vocab_size: int, params: SamplingParams) -> list[Ask]:
    rng = np.random.default_rng(7)
    coins = rng.random(texts).tolist()
    behind = rng.integers(0, vocab_size, (texts, BEHIND)).astype(np.int32)
    tokens = list(behind) if params.penalizes else [()] * texts
    return [Ask(i, params, coins[i].__float__, tokens[i], BEHIND // 2) for i in range(texts)]


def sides(
    texts: int, vocab_size: int, name: str, model: Any, clock: Callable[[], float]
) -> dict[str, Callable[[], float]]:
    """Seconds a token, of each side."""
    logits = np.random.default_rng(texts).normal(0, 3, (texts, vocab_size)).astype(np.float32)
    asked = asks(texts, vocab_size, SamplingParams(**SETTINGS[name]))
    native, plain = CpuPredictions(logits, model), Predictions(logits)
    if native.draw(asked) != plain.draw(asked):
        raise SystemExit(f"{name}, {texts} texts, {vocab_size} tokens: the two sides draw other tokens")

    def timed(predictions: Predictions, at_least: float) -> float:
        count, begin = 0, clock()
        while (taken := clock() - begin) < at_least or not count:
            predictions.draw(asked)
            count += texts
        return taken / count

    return {"native": lambda: timed(native, 0.02), "numpy": lambda: timed(plain, 0.02)}


def step(threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of a pass and of drawing from it, and the latter as a share of both together."""
    texts, behind = max(TEXTS), 64
    backend = pronk.load(quantize="q8", engine="cpu", threads=threads).backend
    kv, blocks = backend.new_kv(texts * (behind // BLOCK_SIZE + 1), BLOCK_SIZE), behind // BLOCK_SIZE + 1
    tables = [range(i * blocks, (i + 1) * blocks) for i in range(texts)]
    rng = np.random.default_rng(5)
    ids = rng.integers(0, backend.config.vocab_size, (texts, behind + 1)).tolist()
    for row, table in zip(ids, tables, strict=True):
        backend.forward(Batch.of([Run(row[:behind], 0, table)]), kv)
    batch = Batch.of([Run(row[behind:], behind, table) for row, table in zip(ids, tables, strict=True)])
    asked = asks(texts, backend.config.vocab_size, SamplingParams(temperature=1.0, top_p=0.9))
    latest: list[Predictions] = []

    def seconds(do: Callable[[], Any]) -> float:
        begin = clock()
        do()
        return clock() - begin

    def compute() -> None:
        latest[:] = [backend.predict(batch, kv)]

    def plainly() -> None:
        Predictions(latest[0].logits(0, texts)).draw(asked)

    compute()
    if latest[0].draw(asked) != Predictions(latest[0].logits(0, texts)).draw(asked):
        raise SystemExit("the two sides draw other tokens")
    sides = {"pass": lambda: seconds(compute), "native": lambda: seconds(lambda: latest[0].draw(asked))}
    taken = harness.interleave({**sides, "numpy": lambda: seconds(plainly)}, rounds)
    found: dict[str, Any] = {name: harness.spread([1e3 * s for s in of]) for name, of in taken.items()}
    for side in ("native", "numpy"):
        together = [a + b for a, b in zip(taken["pass"], taken[side], strict=True)]
        found[f"{side} share"] = harness.ratios(taken[side], together)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor-time", action="store_true", help="of all threads, instead of the clock's")
    parser.add_argument("--quick", action="store_true", help="a look of seconds; nothing is kept in results/")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    harness.warn_if_busy()
    machine, stolen, found = harness.machine("numpy"), harness.steal_s(), []
    of_step = step(options.threads, 3 if options.quick else 3 * options.rounds, clock)
    shown = ", ".join(f"{name} {of_step[name]['median']:.1f} ms" for name in ("pass", "native", "numpy"))
    shares = ", ".join(f"{side} {100 * of_step[side + ' share']['median']:.1f}%" for side in ("native", "numpy"))
    print(f"64 texts: {shown}; of the step: {shares}", flush=True)
    for vocab_size in VOCABULARIES[: 1 if options.quick else None]:
        config = ModelConfig(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=64,
        )  # fmt: skip
        model = new_model(load_native(), config, options.threads)
        for texts in TEXTS:
            for name in SETTINGS:
                taken = harness.interleave(
                    sides(texts, vocab_size, name, model, clock), 2 if options.quick else options.rounds
                )
                row = {"vocab_size": vocab_size, "texts": texts, "setting": name}
                row |= {side: harness.spread([1e6 * s for s in of]) for side, of in taken.items()}
                row["ratio"] = harness.ratios(taken["numpy"], taken["native"])
                found.append(row)
                shown = ", ".join(f"{side} {row[side]['median']:.0f} us" for side in taken)
                print(f"{vocab_size:>7} {texts:>3} texts  {name:12} {shown}", flush=True)
    if not options.quick:
        conditions = {
            "threads": options.threads,
            "rounds": options.rounds,
            "tokens behind": BEHIND,
            "unit": "us a token",
            "clock": clock.__name__,
        }
        harness.save(
            "sampling",
            {"machine": machine, "steal_s": harness.steal_s() - stolen, **conditions, "step": of_step, "rows": found},
        )


if __name__ == "__main__":
    main()
