"""What sampling means, said plainly: full sorts and running sums. engine/filters.py and sampling.py, and the native
sampler, must agree to the token, whatever they leave out."""

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
        best_first = np.argsort(-scores[kept], kind="stable")
        parts = filters.weights(scores[kept])[best_first].tolist()
        dropped, total = 0, sum(parts)
        while len(parts) > 1 and np.float32((dropped + parts[-1]) / total) <= np.float32(1.0 - params.top_p):
            dropped += parts.pop()
        kept = np.sort(kept[best_first[: len(parts)]])
    if params.min_p:
        kept = kept[filters.exponentials(scores[kept]) >= np.float32(params.min_p)]
    return kept


def fast_survivors(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The same, by what this file is held against."""
    kept = filters.survivors(scores, params.filters)
    return np.arange(len(scores)) if kept is None else kept


def token(logits: np.ndarray, params: SamplingParams, history: list[int], generated: list[int], coin: float) -> int:
    scores = penalize(logits, params, history, generated)
    if params.temperature == 0:
        return int(scores.argmax())
    scores = scores / np.float32(params.temperature)
    kept = survivors(scores, params)
    parts = filters.weights(scores[kept]).tolist()
    place, left = -1, min(int(coin * float(sum(parts))), sum(parts) - 1)
    while left >= 0:
        place += 1
        left -= parts[place]
    return int(kept[place])


def likeliest(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    logprobs = logits - np.log(np.exp((logits - logits.max()).astype(np.float64)).sum()) - logits.max()
    order = np.argsort(-logits, kind="stable")[:count]
    return [(int(i), float(logprobs[i])) for i in order]
