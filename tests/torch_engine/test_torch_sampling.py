"""Tokens that are drawn on the device are those of pronk.engine.sampling, to the last, whatever rows are beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st

from pronk.engine import sampling as host
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask
from pronk.torch_engine.sampling import can_sample, sample

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-20, 0.1, 1.0]),
)
COINS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53]))


def rows_of(seed: int, count: int, size: int) -> np.ndarray:
    """Flat and steep, with ties, with minus infinity, and so large that a temperature makes them infinite."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, size)) * rng.choice([0.01, 1, 10, 1e37], (count, 1))
    kind = seed % 3
    if kind == 1:
        rows = np.round(rows)
    elif kind == 2:
        rows[:, 1::3] = -np.inf
    return rows.astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of logits that overflow, in numpy
@settings(max_examples=150)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 5, 64, 700, 5000]),
    st.lists(st.tuples(PARAMS, COINS), min_size=1, max_size=5),
)
def test_the_tokens_are_the_hosts(device: str, seed: int, size: int, drawn: list[tuple[SamplingParams, float]]) -> None:
    rows, params, coins = rows_of(seed, len(drawn), size), [p for p, _ in drawn], [c for _, c in drawn]
    wanted = [host.sample(row, p, [], [], c).token for row, p, c in zip(rows, params, coins, strict=True)]
    assert sample(torch.from_numpy(rows).to(device), params, coins).tolist() == wanted


@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 1}, {"logit_bias": {1: 2.0}}, {"repetition_penalty": 1.1}, {"rng": "xorshift"}],
)
def test_what_stays_on_the_host(options: dict[str, object]) -> None:
    def ask(**more: object) -> Ask:
        return Ask(0, SamplingParams(**{**more, **options}), lambda: 0.5)

    assert can_sample(Ask(0, SamplingParams(temperature=1.0), lambda: 0.5))
    assert not can_sample(ask() if not options else ask(temperature=1.0))
    assert not can_sample(Ask(0, SamplingParams(temperature=1.0), lambda: 0.5, allowed=np.ones(3, np.bool_)))
