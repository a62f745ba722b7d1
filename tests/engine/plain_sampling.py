"""What sampling means, said plainly: full sorts and running sums. engine/filters.py and sampling.py must agree to the
token, whatever they leave out."""

from __future__ import annotations

import numpy as np

from pronk.engine import filters
from pronk.engine.params import SamplingParams
from pronk.engine.sampling import penalize


def survivors(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    kept = np.arange(len(scores))
    if params.top_k:
        best = np.argsort(-scores, kind="stable")[: params.top_k]
        kept = np.sort(best)
    if params.top_p < 1:
        probs = softmax(scores[kept])
        unlikely_first = np.argsort(-probs, kind="stable")[::-1]
        dropped = np.cumsum(probs[unlikely_first], dtype=np.float64).astype(np.float32)
        goes = dropped <= np.float32(1.0 - params.top_p)
        goes[-1] = False
        kept = np.sort(kept[unlikely_first[~goes]])
    if params.min_p:
        probs = softmax(scores[kept])
        kept = kept[probs >= np.float32(params.min_p) * probs.max()]
    return kept


def fast_survivors(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The same, by what this file is held against."""
    kept = filters.survivors(scores, params.filters)
    return np.arange(len(scores)) if kept is None else kept


def softmax(scores: np.ndarray) -> np.ndarray:
    exps = np.exp(scores - scores.max())
    return exps / exps.sum()


def token(logits: np.ndarray, params: SamplingParams, history: list[int], generated: list[int], coin: float) -> int:
    scores = penalize(logits, params, history, generated)
    if params.temperature == 0:
        return int(scores.argmax())
    scores = scores / np.float32(params.temperature)
    kept = survivors(scores, params)
    cdf = np.exp(scores[kept] - scores[kept].max()).cumsum(dtype=np.float64)
    cdf /= cdf[-1]
    return int(kept[cdf.searchsorted(coin, side="right")])


def likeliest(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    logprobs = logits - np.log(np.exp((logits - logits.max()).astype(np.float64)).sum()) - logits.max()
    order = np.argsort(-logits, kind="stable")[:count]
    return [(int(i), float(logprobs[i])) for i in order]
