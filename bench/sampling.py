"""What drawing a token takes: the CPU engine's sampler beside its meaning in numpy, alone and 64 texts at once.

    python bench/sampling.py [--threads 2] [--rounds 7] [--quick]

Logits are random, normal with a standard deviation of 3, as those of a language model are about; 512 tokens of a text
are behind each where penalties look at them. Microseconds are of the clock, a token, and hold what Python does around
the call. Both sides must draw the same tokens, or there are no figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from pronk.config import ModelConfig
from pronk.cpu_engine.backend import load_native, new_model
from pronk.cpu_engine.predictions import CpuPredictions
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask, Predictions

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


def sides(texts: int, vocab_size: int, name: str, model: Any) -> dict[str, Callable[[], float]]:
    """Seconds a token, of each side."""
    logits = np.random.default_rng(texts).normal(0, 3, (texts, vocab_size)).astype(np.float32)
    asked = asks(texts, vocab_size, SamplingParams(**SETTINGS[name]))
    native, plain = CpuPredictions(logits, model), Predictions(logits)
    if native.draw(asked) != plain.draw(asked):
        raise SystemExit(f"{name}, {texts} texts, {vocab_size} tokens: the two sides draw other tokens")

    def timed(predictions: Predictions, at_least: float) -> float:
        count, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < at_least or not count:
            predictions.draw(asked)
            count += texts
        return taken / count

    return {"native": lambda: timed(native, 0.02), "numpy": lambda: timed(plain, 0.02)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a look of seconds; nothing is kept in results/")
    options = parser.parse_args()
    harness.warn_if_busy()
    machine, stolen, found = harness.machine("numpy"), harness.steal_s(), []
    for vocab_size in VOCABULARIES[: 1 if options.quick else None]:
        config = ModelConfig(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=64,
        )  # fmt: skip
        model = new_model(load_native(), config, options.threads)
        for texts in TEXTS:
            for name in SETTINGS:
                taken = harness.interleave(
                    sides(texts, vocab_size, name, model), 2 if options.quick else options.rounds
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
        }
        harness.save(
            "sampling", {"machine": machine, "steal_s": harness.steal_s() - stolen, **conditions, "rows": found}
        )


if __name__ == "__main__":
    main()
