"""From logits to a token: a pure function of the logits, the request's parameters, the tokens so far and one uniform.

The filters run in transformers' order, each on what the one before left:

    logit bias, repetition penalty, presence and frequency penalty, temperature, top-k, top-p, min-p

and the token is then drawn by inverse CDF in vocabulary order. Temperature 0 takes the likeliest token after the
penalties and draws nothing. Reported log-probabilities are the model's own, before any filter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk.engine.rng import RNGS, Rng, check_seed
from pronk.errors import BadRequest, PronkError

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]

# name: what is allowed, in words and as a test. NaN fails every comparison.
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    # Outside these bounds a float32 logit divided by the temperature is no longer a number.
    "temperature": ("0 (greedy) or from 0.0001 to 10000", lambda x: x == 0 or 1e-4 <= x <= 1e4),
    "top_p": ("above 0 and at most 1 (off)", lambda x: 0 < x <= 1),
    "min_p": ("from 0 (off) to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0 and at most 100 (1 is off)", lambda x: 0 < x <= 100),
    "presence_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "length_penalty": ("from -5 to 5", lambda x: -5 <= x <= 5),
}
_INTEGERS = {"max_new_tokens": 1, "top_k": 0, "n": 1, "num_beams": 1, "num_return_sequences": 1}  # name: least
_LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of decoding; every field is checked, and two that contradict each other are refused by name.

    `n` and, without beams, `num_return_sequences` are two names for the number of samples (`samples`). `stop` strings
    are carried for the text layer. `logprobs=N` asks for the chosen token's log-probability and the N likeliest.
    Raises BadRequest.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens, as transformers counts
    presence_penalty: float = 0.0  # over generated tokens, as OpenAI counts
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    rng: Rng = "philox"
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, least in _INTEGERS.items():
            _check_integer(name, getattr(self, name), least)
        for name, (allowed, holds) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value) or not holds(value):
                raise BadRequest(f"{name} must be {allowed}, not {value!r}")
        if self.rng not in RNGS:
            raise BadRequest(f"rng must be one of {', '.join(RNGS)}, not {self.rng!r}")
        if self.seed is not None:
            check_seed(self.rng, self.seed)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise BadRequest(f"early_stopping must be true, false or 'never', not {self.early_stopping!r}")
        if not isinstance(self.ignore_eos, bool):
            raise BadRequest(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        self._settle("stop", _strings(self.stop))
        self._settle("stop_token_ids", _token_ids(self.stop_token_ids))
        self._settle("logit_bias", _biases(self.logit_bias))
        self._check_contradictions()

    @property
    def samples(self) -> int:
        """How many sequences sampling returns."""
        return max(self.n, self.num_return_sequences)

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_contradictions(self) -> None:
        if self.num_beams == 1:
            if self.n > 1 and self.num_return_sequences not in (1, self.n):
                raise BadRequest(
                    f"n={self.n} and num_return_sequences={self.num_return_sequences} both say how many samples; give one"
                )
            return
        if self.num_return_sequences > self.num_beams:
            raise BadRequest(
                f"num_return_sequences={self.num_return_sequences} must not exceed num_beams={self.num_beams}"
            )
        if self.n > 1:
            raise BadRequest(f"n={self.n} contradicts num_beams={self.num_beams}; ask for num_return_sequences")
        for name, off in (("temperature", 0.0), ("logprobs", None), ("stop", ())):
            if getattr(self, name) != off:
                raise BadRequest(f"{name}={getattr(self, name)!r} contradicts num_beams={self.num_beams}")


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

    Of tokens tied at the edge of top-k those with the lowest ids stay, so that exactly k do.
    """
    kept = _top_k(scores, params.top_k)
    if params.top_p < 1.0:
        kept = kept[_top_p(_softmax(scores[kept]), params.top_p)]
    if params.min_p > 0.0:
        probs = _softmax(scores[kept])
        kept = kept[probs >= np.float32(params.min_p) * probs.max()]
    return kept


def _choose(scores: Float32, params: SamplingParams, coin: float) -> int:
    """Inverse CDF in vocabulary order, in double precision: what np.random.RandomState.choice does."""
    kept = survivors(scores, params)
    left = scores[kept].astype(np.float64)
    cdf = np.exp(left - left.max()).cumsum()
    cdf /= cdf[-1]
    return int(kept[cdf.searchsorted(coin, side="right")])


def _choose_as_llama2c(scores: Float32, params: SamplingParams, coin: float) -> int:
    """llama2.c's softmax, top-p and choice, in its float32 arithmetic and order; top-k and min-p, which it lacks, before.

    Source: `sample_mult` and `sample_topp` of run.c. Its top-p drops what lies below (1 - p) / (V - 1), sorts by
    probability and draws in that order.
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
    order = rest[np.argsort(probs[rest], kind="stable")]
    dropped = np.cumsum(probs[order], dtype=np.float64) + probs[tail].sum(dtype=np.float64)
    first = min(int(dropped.astype(np.float32).searchsorted(spare, side="right")), len(order) - 1)
    return np.sort(order[first:])


def _softmax(scores: Float32) -> Float32:
    exps = np.exp(scores - scores.max())
    return exps / exps.sum()


def _log_sum_exp(scores: Float32) -> float:
    top = scores.max()
    return float(top) + math.log(float(np.exp(scores - top).sum(dtype=np.float64)))


def _likeliest(scores: Float32, count: int) -> Ids:
    if count == 0:
        return np.arange(0)
    kept = _top_k(scores, count)
    return kept[np.argsort(-scores[kept], kind="stable")]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise BadRequest(f"{name} must be a whole number from {least} to {_LARGEST}, not {value!r}")


def _strings(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(s, str) and s for s in values):
        raise BadRequest(f"stop must be strings that are not empty, not {value!r}")
    return tuple(values)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise BadRequest(f"stop_token_ids must be token ids, not {value!r}")
    for token in value:
        _check_integer("stop_token_ids", token, 0)
    return tuple(value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"logit_bias must be a mapping of token id to bias, not {value!r}")
    for token, bias in value.items():
        _check_integer("logit_bias token", token, 0)
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias of token {token} must be from -100 to 100, not {bias!r}")
    return dict(value)
