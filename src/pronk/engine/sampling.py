"""From logits to a token: a pure function of the logits, the request's parameters, the tokens so far and one uniform.

In transformers' order: logit bias, repetition penalty, presence and frequency penalty, temperature, and FILTERS, each
on what the one before left, which at the start is what a grammar lets follow. The token is then drawn by inverse CDF in
vocabulary order, or as the request's generator has it (DRAWS). Temperature 0 takes the likeliest token after the
penalties and draws nothing. Reported log-probabilities are the model's own, before any filter.

This is what is meant; the CPU engine draws the same tokens, of many texts at once, in src/native/sampling.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.engine.filters import ONE, Float32, Ids, survivors, top_k, weights
from pronk.engine.grammar import Bools
from pronk.engine.params import SamplingParams
from pronk.errors import PronkError

Tokens = Sequence[int] | NDArray[np.int32]


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
    history: Tokens,
    generated: Tokens,
    uniform: float | Callable[[], float],
    allowed: Bools | None = None,
) -> Sampled:
    """The next token from logits [V].

    `history` is the prompt and what was generated, `generated` the latter alone. `uniform` is a number in [0, 1), or a
    function that gives it, called only where one is needed. `allowed` [V], at least one True: no other token can be
    drawn. Raises NotNumbers.
    """
    scores = logits
    if allowed is not None:
        _check(logits)
        scores = np.where(allowed, logits, np.float32(-np.inf))
    scores = penalize(scores, params, history, generated)
    token = _check(scores)
    if params.temperature > 0:
        coin = uniform() if callable(uniform) else uniform
        draw = DRAWS[params.rng]
        scores = _divided(scores, scores[token], np.float32(params.temperature))
        filters = [(f, value) for f, value in params.filters if f.name != draw.own]
        token = draw.choose(scores, survivors(scores, filters), params, coin)
    return Sampled(token) if params.logprobs is None else reported(logits, token, params.logprobs)


def reported(logits: Float32, token: int, likeliest: int) -> Sampled:
    """A token with its log-probability, and so many of the likeliest, of logits [V] as the model gave them.

    Raises NotNumbers.
    """
    total = log_total(float(logits[_check(logits)]), int(weights(logits).sum()))
    top = _likeliest(logits, likeliest)
    return Sampled(token, float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top))


def _check(scores: Float32) -> int:
    """The likeliest token, the first of equals. Raises NotNumbers."""
    token = int(scores.argmax())
    if not math.isfinite(scores[token]):
        raise NotNumbers
    return token


def log_total(largest: float, weight: int) -> float:
    """The logarithm of the sum of all tokens' exponentials, from the largest logit and the weight of all."""
    return largest + math.log(weight / ONE)


def penalize(scores: Float32, params: SamplingParams, history: Tokens, generated: Tokens) -> Float32:
    """Scores [V] after logit bias and the three penalties; the input is never written to."""
    repeats = params.repetition_penalty != 1.0 and len(history) > 0
    counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (params.logit_bias or repeats or counts):
        return scores
    scores = scores.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += np.float32(bias)
    if repeats:
        seen = np.unique(np.asarray(history, np.intp))
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    if counts:
        tokens, times = np.unique(np.asarray(generated, np.intp), return_counts=True)
        scores[tokens] -= (times * params.frequency_penalty + params.presence_penalty).astype(np.float32)
    return scores


def _divided(scores: Float32, largest: np.float32, temperature: np.float32) -> Float32:
    with np.errstate(over="ignore"):
        if np.isfinite(largest / temperature):
            return np.divide(scores, temperature, dtype=np.float32)
        return np.divide(scores - largest, temperature, dtype=np.float32)  # the same distribution; the largest is 0


def _choose(scores: Float32, kept: Ids | None, params: SamplingParams, coin: float) -> int:
    """Inverse CDF in vocabulary order, as np.random.RandomState.choice does it."""
    if kept is None:
        return _inverse_cdf(weights(scores), coin)
    return int(kept[_inverse_cdf(weights(scores[kept]), coin)])


def _inverse_cdf(weigh: NDArray[np.int64], coin: float) -> int:
    """The first place where the weights so far exceed the coin's share of all."""
    cdf = weigh.cumsum()
    total = int(cdf[-1])
    return int(cdf.searchsorted(min(int(coin * float(total)), total - 1), side="right"))


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
    exps = _double_exponentials(scores - scores.max()).astype(np.float32)
    probs = exps / np.cumsum(exps)[-1]
    if params.top_p >= 1.0:
        last = int(np.flatnonzero(scores > -np.inf)[-1])
        return min(int(np.cumsum(probs).searchsorted(np.float32(coin), side="right")), last)
    top_p = np.float32(params.top_p)
    kept = np.flatnonzero(probs >= (np.float32(1) - top_p) / np.float32(max(len(probs) - 1, 1)))
    if len(kept) == 0:
        return int(probs.argmax())
    kept = kept[np.argsort(-probs[kept], kind="stable")]
    cdf = np.cumsum(probs[kept])
    last = min(int(cdf.searchsorted(top_p, side="right")), len(kept) - 1)
    drawn = int(cdf[: last + 1].searchsorted(np.float32(coin) * cdf[last], side="right"))
    return int(kept[min(drawn, last)])


def _double_exponentials(x: Float32) -> NDArray[np.float64]:
    """Of numbers up to 0, within 2 units in the last place; bits as filters.exponentials has them."""
    r = np.maximum(x, np.float32(-200)).astype(np.float64)
    n = np.rint(r * 1.4426950408889634)
    r -= n * 6.93147180369123816490e-01  # of 33 bits
    r -= n * 1.90821492927058770002e-10
    power = np.full_like(r, 1 / math.factorial(14))
    for k in range(13, -1, -1):
        power *= r
        power += 1 / math.factorial(k)
    found: NDArray[np.float64] = np.ldexp(power, n.astype(np.int32))
    return found


class Draw(NamedTuple):
    """How a generator's number becomes a token of scores [V], of which the filters have left `kept` (None: all)."""

    choose: Callable[[Float32, Ids | None, SamplingParams, float], int]
    own: str | None = None  # a filter that it runs itself, after all others


DRAWS = {"philox": Draw(_choose), "numpy": Draw(_choose), "xorshift": Draw(_choose_as_llama2c, own="top_p")}


def _likeliest(scores: Float32, count: int) -> Ids:
    if count == 0:
        return np.arange(0)
    kept = top_k(scores, count)
    return kept[np.argsort(-scores[kept], kind="stable")]
