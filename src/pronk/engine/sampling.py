"""From logits to a token: a pure function of the logits, the request's parameters, the tokens so far and one uniform.

In transformers' order: logit bias, repetition penalty, presence and frequency penalty, temperature, and FILTERS, each
on what the one before left, which at the start is what a grammar lets follow. The token is then drawn by inverse CDF in
vocabulary order, or as the request's generator has it (DRAWS). Temperature 0 takes the likeliest token after the
penalties and draws nothing. Reported log-probabilities are the model's own, before any filter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pronk.engine.filters import Float32, Ids, exponentials, survivors, top_k
from pronk.engine.grammar import Bools
from pronk.engine.params import SamplingParams
from pronk.errors import PronkError

_BLOCK = 512


class NotNumbers(PronkError):
    """Logits that no token can be drawn from."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers (NaN or infinity); try --quantize f32, or --kv-dtype f32")


@dataclass(slots=True)
class Sampled:
    token: int
    logprob: float | None = None  # None where none were asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, logprob), best first
    completes: bool = False  # what its grammar asks for, so that nothing can follow


def sample(
    logits: Float32,
    params: SamplingParams,
    history: Sequence[int],
    generated: Sequence[int],
    uniform: float | Callable[[], float],
    allowed: Bools | None = None,
) -> Sampled:
    """The next token from logits [V].

    `history` is the prompt and what was generated, `generated` the latter alone. `uniform` is a number in [0, 1), or a
    function that gives it, called only where one is needed. `allowed` [V], at least one True: no other token can be
    drawn. Raises NotNumbers.
    """
    scores = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
    scores = penalize(scores, params, history, generated)
    token = int(scores.argmax())
    if not math.isfinite(scores[token]):
        raise NotNumbers
    if params.temperature > 0:
        coin = uniform() if callable(uniform) else uniform
        draw = DRAWS[params.rng]
        scores = _divided(scores, scores[token], np.float32(params.temperature))
        filters = [(f, value) for f, value in params.filters if f.name != draw.own]
        token = draw.choose(scores, survivors(scores, filters), params, coin)
    return Sampled(token) if params.logprobs is None else reported(logits, token, params.logprobs)


def reported(logits: Float32, token: int, likeliest: int) -> Sampled:
    """A token with its log-probability, and so many of the likeliest, of logits [V] as the model gave them."""
    total = _log_sum_exp(logits)
    top = _likeliest(logits, likeliest)
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
        counter = Counter(generated)
        counted = np.fromiter(counter.values(), np.float64) * params.frequency_penalty + params.presence_penalty
        scores[np.fromiter(counter.keys(), np.intp)] -= counted.astype(np.float32)
    return scores


def _divided(scores: Float32, largest: np.float32, temperature: np.float32) -> Float32:
    with np.errstate(over="ignore"):
        if np.isfinite(largest / temperature):
            return np.divide(scores, temperature, dtype=np.float32)
        return np.divide(scores - largest, temperature, dtype=np.float32)  # the same distribution; the largest is 0


def _choose(scores: Float32, kept: Ids | None, params: SamplingParams, coin: float) -> int:
    """Inverse CDF in vocabulary order, summed in double precision: what np.random.RandomState.choice does."""
    if kept is None:
        return _inverse_cdf(exponentials(scores), coin)
    return int(kept[_inverse_cdf(exponentials(scores[kept]), coin)])


def _inverse_cdf(weights: Float32, coin: float) -> int:
    """The first place where the weights so far, in double precision and over their sum, exceed the coin.

    Adding up a whole vocabulary in order is slow. Block sums find the place in a fraction of the time, and are believed
    where it is further from its edges than two ways of adding may differ.
    """
    blocks = len(weights) // _BLOCK
    if blocks > 1:
        sums = weights[: blocks * _BLOCK].reshape(blocks, _BLOCK).sum(axis=1, dtype=np.float64).cumsum()
        total = float(sums[-1]) + float(weights[blocks * _BLOCK :].sum(dtype=np.float64))
        block = int(sums.searchsorted(coin * total, side="right"))
        base = float(sums[block - 1]) if block else 0.0
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64) + base
        place = int(inside.searchsorted(coin * total, side="right"))
        if place < len(inside):
            margin = 1e-10 * total  # a sum of 10 ** 6 doubles in any order is within 1.2e-10 of the true one
            low = float(inside[place - 1]) if place else base
            if float(inside[place]) - coin * total > margin and (coin * total - low > margin or place + block == 0):
                return block * _BLOCK + place
    cdf = weights.cumsum(dtype=np.float64)
    cdf /= cdf[-1]
    return int(cdf.searchsorted(coin, side="right"))


def _choose_as_llama2c(scores: Float32, survivors: Ids | None, params: SamplingParams, coin: float) -> int:
    """llama2.c's softmax, top-p and choice (run.c: `sample_mult`, `sample_topp`) in its float32 arithmetic and order.

    Its top-p drops what lies below (1 - p) / (V - 1), sorts by probability and draws in that order. The filters that it
    lacks come before.
    """
    if survivors is not None:
        masked = np.full_like(scores, -np.inf)
        masked[survivors] = scores[survivors]
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


class Draw(NamedTuple):
    """How a generator's number becomes a token of scores [V], of which the filters have left `kept` (None: all)."""

    choose: Callable[[Float32, Ids | None, SamplingParams, float], int]
    own: str | None = None  # a filter that it runs itself, after all others


DRAWS = {"philox": Draw(_choose), "numpy": Draw(_choose), "xorshift": Draw(_choose_as_llama2c, own="top_p")}


def _log_sum_exp(scores: Float32) -> float:
    top = scores.max()
    return float(top) + math.log(float(np.exp(scores - top).sum(dtype=np.float64)))


def _likeliest(scores: Float32, count: int) -> Ids:
    if count == 0:
        return np.arange(0)
    kept = top_k(scores, count)
    return kept[np.argsort(-scores[kept], kind="stable")]
