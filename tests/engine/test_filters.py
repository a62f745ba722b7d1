"""Fast filters and draws against their plain statement, to the token."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import plain_sampling
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronk.engine import filters, sampling
from pronk.engine import params as params_module
from pronk.engine.params import SamplingParams
from pronk.engine.rng import RNGS
from pronk.engine.sampling import sample


@st.composite
def logits(draw: Any) -> np.ndarray:
    """Of every shape that matters: flat and steep, with ties, with -inf, with a few that stand out; small and large."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    size = draw(st.sampled_from([1, 2, 50, 4096, 4097, 10_000, 49_152]))
    values = rng.normal(0, draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0])), size)
    if draw(st.booleans()):
        values = np.round(values * draw(st.sampled_from([1, 4])))  # ties
    if draw(st.booleans()):
        values[rng.integers(0, size, 5)] += 12
    if draw(st.booleans()):
        values[rng.random(size) < 0.5] = -np.inf
        values[0] = 0.0
    return values.astype(np.float32)


@st.composite
def params(draw: Any) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 40, 5000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.99, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.1, 1.0])),
    )


@settings(max_examples=300, deadline=None)
@given(logits(), params(), st.floats(0, 1, exclude_max=True))
def test_the_same_tokens_survive_and_the_same_one_is_drawn(
    logits: np.ndarray, params: SamplingParams, coin: float
) -> None:
    scores = logits / np.float32(params.temperature)
    assert plain_sampling.fast_survivors(scores, params).tolist() == plain_sampling.survivors(scores, params).tolist()
    assert sample(logits, params, [], [], coin).token == plain_sampling.token(logits, params, [], [], coin)


@settings(max_examples=100, deadline=None)
@given(logits(), st.integers(0, 30))
def test_the_likeliest_are_those_a_sort_finds(logits: np.ndarray, count: int) -> None:
    found = sample(logits, SamplingParams(logprobs=count), [], [], 0.0).top
    expected = plain_sampling.likeliest(logits, count)
    assert [token for token, _ in found] == [token for token, _ in expected]
    np.testing.assert_allclose([p for _, p in found], [p for _, p in expected], atol=1e-4)


def test_exponentials_are_those_of_the_library_within_two_units() -> None:
    scores = -np.linspace(0, 39.9, 200_001, dtype=np.float32)
    true = np.exp(scores.astype(np.float64))
    off = np.abs(filters.exponentials(scores).astype(np.float64) - true) / np.spacing(true.astype(np.float32))
    assert off.max() < 2
    true = np.exp(4 * scores.astype(np.float64))
    off = np.abs(sampling._double_exponentials(4 * scores) - true) / np.spacing(true)
    assert off.max() < 2


def test_the_double_exponential_rounds_to_what_the_library_rounds_to() -> None:
    x = -np.random.default_rng(5).exponential(20, 200_000).astype(np.float32)
    ours = sampling._double_exponentials(x).astype(np.float32)
    library = np.exp(x.astype(np.float64)).astype(np.float32)
    assert (ours != library).sum() <= 2, "a rounding of doubles decides once in 2**28"


def test_weights_are_exact_in_any_order() -> None:
    scores = np.random.default_rng(1).normal(0, 3, 49_152).astype(np.float32)
    weigh = filters.weights(scores)
    assert weigh.max() == filters.ONE
    assert weigh.sum() == sum(weigh[np.random.default_rng(2).permutation(49_152)].tolist())
    assert weigh.sum() / filters.ONE == pytest.approx(np.exp((scores - scores.max()).astype(float)).sum(), rel=1e-6)


def test_what_weighs_nothing_is_never_drawn() -> None:
    weigh = np.zeros(5000, np.int64)
    weigh[[1500, 3000]] = filters.ONE
    assert [sampling._inverse_cdf(weigh, coin) for coin in (0.0, 0.4, 0.5, 1 - 2**-53)] == [1500, 1500, 3000, 3000]


def test_top_p_whose_edge_sums_to_just_what_may_go() -> None:
    """Half of the probability in equal parts, dropped to the last."""
    scores = np.full(8193, -np.log(8192), np.float32)
    scores[0] = 0  # as likely as all others together
    for top_p, count in ((0.5, 1), (0.75, 4097), (0.50001, 2)):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        kept = plain_sampling.fast_survivors(scores, params).tolist()
        assert kept == plain_sampling.survivors(scores, params).tolist()
        assert abs(len(kept) - count) <= 1


def test_logits_too_large_to_be_divided_by_the_temperature_still_make_a_distribution() -> None:
    logits = np.array([0, 3.3e38, 1, -3.3e38, 3.3e38], np.float32)
    for rng in ("philox", "xorshift"):
        for fields in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
            params = SamplingParams(temperature=1e-4, rng=rng, **fields)
            assert [sample(logits, params, [], [], coin).token for coin in (0.0, 0.4, 0.6, 0.99)] == [1, 1, 4, 4]


# One value of each field that decides which token is drawn, and the fields that decide no token: a new field is in one.
DECIDES: dict[str, Any] = {
    **{"top_k": 2, "top_p": 0.05, "min_p": 0.9},
    **{"temperature": 0.2, "logit_bias": {7: 9.0}},
    **{"repetition_penalty": 30.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
}
LEAVES = {
    *(
        "max_new_tokens",
        "seed",
        "rng",
        "num_samples",
        "n",
        "num_beams",
        "length_penalty",
        "early_stopping",
        "num_return_sequences",
    ),
    *("stop", "stop_token_ids", "ignore_eos", "logprobs", "speculative"),
}


def heard(name: str, rng: Any) -> bool:
    """Whether the option changes a token that this generator draws."""
    scores = np.random.default_rng(5).normal(0, 1, 40).astype(np.float32)
    likely = np.argsort(-scores)[:12].tolist()
    history = [token for token in likely for _ in range(3)]
    plain = SamplingParams(temperature=1.0, rng=rng)
    changed = SamplingParams(**{"temperature": 1.0, "rng": rng, name: DECIDES[name]})
    coins = np.linspace(0.01, 0.99, 60).tolist()
    drawn = [[sample(scores, params, history, history, c).token for c in coins] for params in (plain, changed)]
    return drawn[0] != drawn[1]


@pytest.mark.parametrize("rng", RNGS)
@pytest.mark.parametrize("name", DECIDES)
def test_every_option_changes_a_token_under_every_generator(name: str, rng: str) -> None:
    assert heard(name, rng)


def test_every_option_is_known_to_decide_a_token_or_not_to() -> None:
    """An added filter that was taken out of the chain of one generator passed all tests."""
    assert {field.name for field in dataclasses.fields(SamplingParams)} == DECIDES.keys() | LEAVES
    assert set(filters.FILTER_NAMES) <= DECIDES.keys()
    assert all(getattr(SamplingParams(), filter_.name) == filter_.off for filter_ in filters.FILTERS)


@pytest.mark.parametrize("rng", RNGS)
@pytest.mark.parametrize("name", filters.FILTER_NAMES)
def test_a_filter_left_out_of_the_chain_is_found_out(name: str, rng: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(filter_ for filter_ in filters.FILTERS if filter_.name != name)
    monkeypatch.setattr(params_module, "FILTERS", left)
    if sampling.DRAWS[rng].own == name:
        monkeypatch.setitem(sampling.DRAWS, rng, sampling.Draw(sampling._choose))
    assert not heard(name, rng)
