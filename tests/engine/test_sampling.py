"""Sampling, against transformers' logits processors, NumPy's RandomState.choice and a scalar llama2.c."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from plain_sampling import fast_survivors as survivors
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pronk.engine.params import SamplingParams
from pronk.engine.rng import stream
from pronk.engine.sampling import penalize, sample
from pronk.errors import PronkError


def random_logits(seed: int, size: int = 1000, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def as_transformers(logits: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    """Scores after transformers' processors, in the order its generate() puts them; -inf for what is filtered out."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases = {(token,): float(bias) for token, bias in params.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), torch.from_numpy(logits)[None].clone())[0].numpy()


def random_params(seed: int) -> SamplingParams:
    rng = np.random.default_rng([9, seed])

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=sometimes(float(rng.uniform(0.3, 2)), 1.0),
        top_k=sometimes(int(rng.integers(1, 200)), 0),
        top_p=sometimes(float(rng.uniform(0.01, 1)), 1.0),
        min_p=sometimes(float(rng.uniform(0, 0.3)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.7, 2)), 1.0),
        logit_bias=sometimes({int(i): float(rng.normal()) for i in rng.integers(0, 1000, 5)}, {}),
    )


@pytest.mark.parametrize("seed", range(300))
def test_the_same_tokens_survive_as_in_transformers(seed: int) -> None:
    logits, params = random_logits(seed), random_params(seed)
    history = np.random.default_rng(seed).integers(0, 1000, 40).tolist()
    expected = as_transformers(logits, params, history)
    scores = penalize(logits, params, history, []) / np.float32(params.temperature)
    kept = survivors(scores, params)
    assert kept.tolist() == np.flatnonzero(expected > -np.inf).tolist()
    assert (scores[kept] == expected[kept]).all()


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.5, 0.7, 0.75, 0.9, 0.95])
@pytest.mark.parametrize("size", [2, 4, 5, 10, 100])
def test_top_p_among_equals_keeps_as_many_as_transformers(size: int, top_p: float) -> None:
    logits = np.zeros(size, np.float32)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    count = int((as_transformers(logits, params, [0]) > -np.inf).sum())
    found = survivors(logits, params).tolist()
    assert found == list(range(len(found))), "the lowest ids stay; torch does not say which"
    if len(found) != count:  # its float32 sum of what is dropped falls on the other side of just what may go
        assert len(found) == count - 1
        assert abs((size - len(found)) / size - (1 - top_p)) < 1e-7


def test_top_p_on_a_real_sized_vocabulary() -> None:
    for seed, scale in enumerate((0.01, 1.0, 3.0, 8.0)):
        logits, params = random_logits(seed, 128_256, scale), SamplingParams(temperature=1.0, top_p=0.9)
        expected = as_transformers(logits, params, [0])
        kept = survivors(logits, params)
        # transformers sums 128k float32 probabilities in another order: the edge may lie a few tokens further when
        # the distribution is flat (each is 1e-5 or less, and the sum's rounding error about 1e-7 of 1).
        difference = set(kept.tolist()) ^ set(np.flatnonzero(expected > -np.inf).tolist())
        assert len(difference) <= 2, (scale, len(difference))


def test_top_k_keeps_exactly_k_the_lowest_of_those_tied() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    for k, expected in [
        (1, [1]),
        (2, [1, 3]),
        (3, [1, 2, 3]),
        (4, [1, 2, 3, 4]),
        (7, list(range(7))),
        (99, list(range(7))),
    ]:
        assert survivors(logits, SamplingParams(temperature=1.0, top_k=k)).tolist() == expected


@pytest.mark.parametrize("fields", [{"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}])
def test_something_always_survives(fields: dict[str, Any]) -> None:
    logits = random_logits(1)
    assert survivors(logits, SamplingParams(temperature=1.0, **fields)).tolist() == [int(logits.argmax())]


def test_presence_and_frequency_count_generated_tokens_and_repetition_all() -> None:
    logits = np.array([1, -1, 2, 3], np.float32)
    history, generated = [0, 1, 2, 2], [2, 2]
    presence = penalize(logits, SamplingParams(presence_penalty=0.5), history, generated)
    frequency = penalize(logits, SamplingParams(frequency_penalty=0.5), history, generated)
    repetition = penalize(logits, SamplingParams(repetition_penalty=2.0), history, generated)
    assert presence.tolist() == [1, -1, 1.5, 3]
    assert frequency.tolist() == [1, -1, 1, 3]
    assert repetition.tolist() == [0.5, -2, 1, 3]
    assert logits.tolist() == [1, -1, 2, 3], "the model's logits are never written to"


def test_the_order_is_bias_then_repetition_then_presence() -> None:
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0, presence_penalty=1.0)
    assert penalize(np.array([1, 0], np.float32), params, [0], [0])[0] == (1 + 3) / 2 - 1


def test_greedy_takes_the_first_of_the_likeliest_and_draws_nothing() -> None:
    def refuse() -> float:
        raise AssertionError("greedy drew a number")

    logits = np.array([1, 3, 3, 2], np.float32)
    assert sample(logits, SamplingParams(), [], [], refuse).token == 1
    assert sample(logits, SamplingParams(logit_bias={3: 5.0}), [], [], refuse).token == 3
    assert sample(logits, SamplingParams(repetition_penalty=2.0), [1, 2], [], refuse).token == 3


@pytest.mark.parametrize("seed", range(100))
def test_the_draw_is_the_inverse_cdf_in_vocabulary_order(seed: int) -> None:
    """Against a plain loop in double precision."""
    logits, params = random_logits(seed, 200), random_params(seed)
    params = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    coin = float(np.random.default_rng([1, seed]).random())
    scores = as_transformers(logits, params, [0]).astype(np.float64)
    weights = [math.exp(score - scores.max()) for score in scores]
    running, expected = 0.0, -1
    for token, weight in enumerate(weights):
        running += weight
        if coin * sum(weights) < running:
            expected = token
            break
    assert sample(logits, params, [], [], coin).token == expected
    assert sample(logits, params, [], [], lambda: coin).token == expected


def test_numpy_draws_are_randomstate_choice() -> None:
    params, draws, reference = (
        SamplingParams(temperature=0.8, rng="numpy"),
        stream("numpy", 5),
        np.random.RandomState(5),
    )
    for step in range(200):
        logits = random_logits(step, 300)
        scores = (logits / np.float32(0.8)).astype(np.float64)
        probs = np.exp(scores - scores.max())
        expected = reference.choice(300, p=probs / probs.sum())
        assert sample(logits, params, [], [], draws.uniform(step)).token == expected


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 2.0}])
def test_frequencies_are_the_distribution(fields: dict[str, Any]) -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2], np.float32)
    params = SamplingParams(**{"temperature": 1.0, **fields})
    draws, count = stream("philox", 17), 6000
    counts = np.bincount([sample(logits, params, [], [], draws.uniform(i)).token for i in range(count)], minlength=8)
    scores = as_transformers(logits, params, [0]).astype(np.float64)
    expected = np.exp(scores) / np.exp(scores).sum() * count
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    # Chi-square with at most 7 degrees of freedom exceeds 24.3 once in a thousand; the seed is fixed.
    assert ((counts[some] - expected[some]) ** 2 / expected[some]).sum() < 24.3


# -- llama2.c


_LIBM = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_LIBM.expf.restype, _LIBM.expf.argtypes = ctypes.c_float, [ctypes.c_float]


def llama2c(logits: np.ndarray, temperature: float, top_p: float, coin: float) -> int:
    """run.c's choice, one float32 scalar operation at a time."""
    f = np.float32
    x = [f(v) / f(temperature) for v in logits]
    top = max(x)
    x = [f(_LIBM.expf(float(v - top))) for v in x]
    total = f(0)
    for v in x:
        total = f(total + v)
    x = [f(v / total) for v in x]
    n = len(x)
    if top_p <= 0 or top_p >= 1:
        cdf = f(0)
        for i in range(n):
            cdf = f(cdf + x[i])
            if f(coin) < cdf:
                return i
        return n - 1
    cutoff = f(f(1) - f(top_p)) / f(n - 1)
    kept = sorted(((v, i) for i, v in enumerate(x) if v >= cutoff), key=lambda pair: -pair[0])
    cumulative, last = f(0), len(kept) - 1
    for i, (v, _) in enumerate(kept):
        cumulative = f(cumulative + v)
        if cumulative > f(top_p):
            last = i
            break
    r, cdf = f(f(coin) * cumulative), f(0)
    for v, i in kept[: last + 1]:
        cdf = f(cdf + v)
        if r < cdf:
            return i
    return kept[last][1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.9), (0.5, 0.9), (1.3, 0.3), (2.0, 0.99)])
def test_xorshift_chooses_as_llama2c(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, rng="xorshift")
    draws = stream("xorshift", 42)
    for step in range(60):
        logits = random_logits(step, 512, 3.0)
        coin = draws.uniform(step)
        assert sample(logits, params, [], [], coin).token == llama2c(logits, temperature, top_p, coin)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("coin", [0.0, 1 - 2.0**-24])
def test_llama2c_at_the_ends_of_the_coin(coin: float, top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=top_p, rng="xorshift")
    for seed in range(10):
        logits = random_logits(seed, 512, 1.0)
        assert sample(logits, params, [], [], coin).token == llama2c(logits, 1.0, top_p, coin)


def test_llama2c_sorts_what_philox_does_not() -> None:
    """The inverse: the two orders of top-p must tell apart, or the tests above show nothing."""
    logits, coins = random_logits(3, 50), np.linspace(0.01, 0.99, 50).tolist()
    plain = SamplingParams(temperature=1.0, top_p=0.9)
    as_c = SamplingParams(temperature=1.0, top_p=0.9, rng="xorshift")
    both = [[sample(logits, params, [], [], coin).token for coin in coins] for params in (plain, as_c)]
    assert both[0] != both[1]
    assert set(both[0]) <= set(survivors(logits, plain).tolist())


def test_xorshift_honours_the_filters_llama2c_lacks() -> None:
    logits, coins = random_logits(3, 50), np.linspace(0.001, 0.999, 200).tolist()
    for fields in ({"top_k": 4}, {"min_p": 0.2}, {"top_k": 6, "min_p": 0.1, "top_p": 0.99}):
        params = SamplingParams(temperature=1.0, rng="xorshift", **fields)
        drawn = {sample(logits, params, [], [], coin).token for coin in coins}
        assert drawn == set(survivors(logits, SamplingParams(temperature=1.0, **fields)).tolist())


def test_llama2c_with_a_top_p_that_leaves_nothing_takes_the_likeliest() -> None:
    """run.c reads before its array here: a flat distribution under the cut-off."""
    params = SamplingParams(temperature=1.0, top_p=0.001, rng="xorshift")
    assert sample(np.zeros(512, np.float32), params, [], [], 0.5).token == 0


# -- log-probabilities, hostile logits, speed


def test_logprobs_are_the_models_own_whatever_the_filters() -> None:
    logits = random_logits(4)
    expected = torch.from_numpy(logits).double().log_softmax(0).numpy()
    params = SamplingParams(temperature=0.7, top_k=3, repetition_penalty=2.0, logit_bias={5: 50.0}, logprobs=4)
    sampled = sample(logits, params, [1, 2], [2], 0.3)
    assert sampled.token == 5
    # float32 logits, exponentials and sum: a few units in the last place of numbers near 10.
    assert sampled.logprob == pytest.approx(expected[5], abs=1e-5)
    order = np.argsort(-logits, kind="stable")[:4]
    assert [token for token, _ in sampled.top] == order.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize(("logprobs", "tops"), [(None, 0), (0, 0), (3, 3), (99, 10)])
def test_as_many_logprobs_as_asked_for(logprobs: int | None, tops: int) -> None:
    sampled = sample(random_logits(1, 10), SamplingParams(logprobs=logprobs), [], [], 0.5)
    assert (sampled.logprob is None) == (logprobs is None)
    assert len(sampled.top) == tops


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = random_logits(2, 20)
    logits[7] = bad
    with pytest.raises(PronkError, match="not numbers"):
        sample(logits, SamplingParams(temperature=temperature), [], [], 0.5)


@pytest.mark.parametrize("rng", ["philox", "xorshift", "numpy"])
@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_stay_numbers(rng: Any, temperature: float) -> None:
    logits = random_logits(2, 100, 1000.0)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01, rng=rng)
    token = sample(logits, params, [], [], 0.5).token
    assert temperature > 1 or token == int(logits.argmax())


@pytest.mark.parametrize("rng", ["philox", "xorshift"])
def test_a_vocabulary_of_one(rng: Any) -> None:
    for fields in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        params = SamplingParams(temperature=1.0, rng=rng, logprobs=1, **fields)
        assert sample(np.ones(1, np.float32), params, [], [], 0.99).top == ((0, 0.0),)


def test_a_large_vocabulary_is_sampled_in_milliseconds() -> None:
    logits = random_logits(0, 128_256, 3.0)
    for fields, limit in (({}, 0.001), ({"temperature": 1.0, "top_k": 40, "top_p": 0.95}, 0.02)):
        params, times = SamplingParams(**fields), []
        for _ in range(10):
            begin = time.process_time()
            sample(logits, params, [], [], 0.5)
            times.append(time.process_time() - begin)
        assert min(times) < limit  # about ten times what a laptop needs
