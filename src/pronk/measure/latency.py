"""Latency: how long a model lets one wait, taken from outside, through LLM.stream, text and sampling included.

- TTFT (time to first token): from the call to the first token; it grows with the prompt.
- ITL (inter-token latency): from one token to the next; of one run there are as many as tokens after the first.
- The rate of prefill is prompt tokens over TTFT, that of decoding is tokens after the first over the time they took.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pronk.llm import LLM


def run(llm: LLM, ids: Sequence[int], new: int) -> tuple[float, list[float]]:
    """TTFT, and the ITL of each of `new` tokens after the first. Seconds."""
    gc.collect()
    begun = time.perf_counter()
    stamps = [time.perf_counter() for _ in llm.stream(ids, max_new_tokens=new + 1, ignore_eos=True)]
    if len(stamps) != new + 1:
        raise RuntimeError(f"{len(stamps)} tokens came instead of {new + 1}")
    return stamps[0] - begun, [later - earlier for earlier, later in pairwise(stamps)]


def one_round(llm: LLM, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """One run a prompt, of different lengths: TTFT and both rates of each, and the ITL of all of them. Milliseconds,
    tokens a second."""
    lengths, every = [], []
    for ids in prompts:
        ttft, gaps = run(llm, ids, new)
        every += gaps
        lengths.append(
            {
                "tokens": len(ids),
                "ttft_ms": 1e3 * ttft,
                "prefill_tok_s": len(ids) / ttft,
                "decode_tok_s": len(gaps) / sum(gaps),
            }
        )
    return {"itl_ms": percentiles([1e3 * gap for gap in every]), "lengths": lengths}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 (between two values, on the line that joins them) and mean, in the unit of `values`."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "mean": float(np.mean(values))}


def summary(rounds: Sequence[float]) -> dict[str, Any]:
    """Median and spread of one figure over all rounds, in its own unit."""
    return {"median": float(np.median(rounds)), "min": min(rounds), "max": max(rounds), "rounds": list(rounds)}


def over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `one_round` gave, round by round -> summaries, as in report.json. `ttft_ms` is the longest prompt's."""
    lengths = [entry["tokens"] for entry in rounds[0]["lengths"]]

    def of(figure: str, n: int) -> dict[str, Any]:
        return summary([one["lengths"][n][figure] for one in rounds])

    return {
        "ttft_ms": of("ttft_ms", len(lengths) - 1),
        "ttft_tokens": lengths[-1],
        "itl_ms": {figure: summary([one["itl_ms"][figure] for one in rounds]) for figure in rounds[0]["itl_ms"]},
        "prefill": [
            {"tokens": tokens, "tok_s": of("prefill_tok_s", n), "ttft_ms": of("ttft_ms", n)}
            for n, tokens in enumerate(lengths)
        ],
        "decode": [{"context": tokens, "tok_s": of("decode_tok_s", n)} for n, tokens in enumerate(lengths)],
    }
