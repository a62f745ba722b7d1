"""From logits to a token: a pure function of the logits, the request's parameters, the tokens so far and one uniform.

The filters run in transformers' order, each on what the one before left:

    logit bias, repetition penalty, presence and frequency penalty, temperature, top-k, top-p, min-p

and the token is then drawn by inverse CDF in vocabulary order. Temperature 0 takes the likeliest token after the
penalties and draws nothing. Reported log-probabilities are the model's own, before any filter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk.engine.params import SamplingParams
from pronk.errors import PronkError

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: float | None = None  # None where none were asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, logprob), best first


def sample(
    logits: Float32,
    params: SamplingParams,
    history: Sequence[int],
    generated: Sequence[int],
    uniform: float | Callable[[], float],
) -> Sampled:
    """The next token from logits [V].

    `history` is the prompt and what was generated, `generated` the latter alone. `uniform` is a number in [0, 1), or a
    function that gives it, called only where one is needed. Raises PronkError where the logits are not numbers.
    """
    scores = penalize(logits, params, history, generated)
    token = int(scores.argmax())
    if not math.isfinite(scores[token]):
        raise PronkError("the model's logits are not numbers (NaN or infinity); try --dtype f32")
    if params.temperature > 0:
        coin = uniform() if callable(uniform) else uniform
        choose = _choose_as_llama2c if params.rng == "xorshift" else _choose
        token = choose(scores / np.float32(params.temperature), params, coin)
    if params.logprobs is None:
        return Sampled(token)
    total = _log_sum_exp(logits)
    top = _likeliest(logits, params.logprobs)
    return Sampled(token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))


def penalize(scores: Float32, params: SamplingParams, history: Sequence[int], generated: Sequence[int]) -> Float32:
    """Scores [V] after logit bias and the three penalties; the input is never written to."""
    repeats = params.repetition_penalty != 1.0 and len(history) > 0
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (params.logit_bias or repeats or counts):
        return scores
    scores = scores.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += np.float32(bias)
    if repeats:
        seen = np.fromiter(set(history), np.intp)
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    if counts:
        for token, count in Counter(generated).items():
            scores[token] -= np.float32(params.presence_penalty + count * params.frequency_penalty)
    return scores


def survivors(scores: Float32, params: SamplingParams) -> Ids:
    """The tokens that top-k, top-p and min-p leave, ascending. Scores [V] are already divided by the temperature.

    Of tokens tied at the edge of top-k or top-p those with the lowest ids stay; so exactly k do.
    """
    kept = _top_k(scores, params.top_k)
    if params.top_p < 1.0:
        kept = kept[_top_p(_softmax(scores[kept]), params.top_p)]
    if params.min_p > 0.0:
        probs = _softmax(scores[kept])
        kept = kept[probs >= np.float32(params.min_p) * probs.max()]
    return kept


def _choose(scores: Float32, params: SamplingParams, coin: float) -> int:
    """Inverse CDF in vocabulary order, summed in double precision: what np.random.RandomState.choice does."""
    kept = survivors(scores, params)
    left = scores[kept]
    cdf = np.exp(left - left.max()).cumsum(dtype=np.float64)
    cdf /= cdf[-1]
    return int(kept[cdf.searchsorted(coin, side="right")])


def _choose_as_llama2c(scores: Float32, params: SamplingParams, coin: float) -> int:
    """llama2.c's softmax, top-p and choice (run.c: `sample_mult`, `sample_topp`) in its float32 arithmetic and order.

    Its top-p drops what lies below (1 - p) / (V - 1), sorts by probability and draws in that order. Top-k and min-p,
    which it lacks, come before.
    """
    if params.top_k or params.min_p:
        kept = _top_k(scores, params.top_k)
        kept = kept[scores[kept] >= scores.max() + math.log(params.min_p)] if params.min_p else kept
        masked = np.full_like(scores, -np.inf)
        masked[kept] = scores[kept]
        scores = masked
    # Rounding a double is what a good expf gives; the cumulative sums are sequential, as a C loop's.
    exps = np.exp((scores - scores.max()).astype(np.float64)).astype(np.float32)
    probs = exps / np.cumsum(exps)[-1]
    if params.top_p >= 1.0:
        return min(int(np.cumsum(probs).searchsorted(np.float32(coin), side="right")), len(probs) - 1)
    top_p = np.float32(params.top_p)
    kept = np.flatnonzero(probs >= (np.float32(1) - top_p) / np.float32(max(len(probs) - 1, 1)))
    if len(kept) == 0:
        return int(probs.argmax())
    kept = kept[np.argsort(-probs[kept], kind="stable")]
    cdf = np.cumsum(probs[kept])
    last = min(int(cdf.searchsorted(top_p, side="right")), len(kept) - 1)
    drawn = int(cdf[: last + 1].searchsorted(np.float32(coin) * cdf[last], side="right"))
    return int(kept[min(drawn, last)])


def _top_k(scores: Float32, k: int) -> Ids:
    if k == 0 or k >= len(scores):
        return np.arange(len(scores))
    edge = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > edge)
    tied = np.flatnonzero(scores == edge)[: k - len(above)]
    return np.sort(np.concatenate([above, tied]))


def _top_p(probs: Float32, top_p: float) -> Ids:
    """Indices, ascending, of the fewest likeliest tokens whose probabilities exceed top_p.

    As transformers does it: drop from the unlikely end while what is dropped is at most 1 - top_p, in float32.
    """
    spare = np.float32(1.0 - top_p)
    # Tokens that could all be dropped together need no sorting: each at most half its share of what may go.
    tail = probs <= spare / np.float32(2 * len(probs))
    rest = np.flatnonzero(~tail)
    order = rest[np.argsort(-probs[rest], kind="stable")][::-1]
    dropped = np.cumsum(probs[order], dtype=np.float64) + probs[tail].sum(dtype=np.float64)
    first = min(int(dropped.astype(np.float32).searchsorted(spare, side="right")), len(order) - 1)
    return np.sort(order[first:])


def _softmax(scores: Float32) -> Float32:
    exps: Float32 = np.exp(scores - scores.max())
    exps /= exps.sum()
    return exps


def _log_sum_exp(scores: Float32) -> float:
    top = scores.max()
    return float(top) + math.log(float(np.exp(scores - top).sum(dtype=np.float64)))


def _likeliest(scores: Float32, count: int) -> Ids:
    if count == 0:
        return np.arange(0)
    kept = _top_k(scores, count)
    return kept[np.argsort(-scores[kept], kind="stable")]
