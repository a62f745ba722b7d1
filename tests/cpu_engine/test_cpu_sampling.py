"""The native sampler against pronk.engine.sampling: every token the same, every log-probability to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import plain_sampling
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk import _native
from pronk.cpu_engine.backend import CpuBackend, new_model
from pronk.cpu_engine.predictions import CpuPredictions
from pronk.engine.filters import FILTER_NAMES, ONE
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.sampling import Sampled
from pronk.errors import NotEnoughMemory

SIZES = [1, 2, 15, 16, 33, 512, 513, 5000, 49_152]
MODELS = {
    (size, isa): new_model(_native, tiny_config(vocab_size=size), 2, isa)
    for size in SIZES
    for isa in (None, "portable")
}


@st.composite
def logits(draw: Any, size: int) -> np.ndarray:
    """Flat and steep, with ties, with -inf, with a few that stand out; tiny, huge, and now and then no numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    values = rng.normal(0, draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 10.0, 1e-30, 1e30])), size)
    kind = draw(st.integers(0, 9))
    if kind in (1, 2):
        values = np.round(values * draw(st.sampled_from([1, 4])))  # ties, and zeros of both signs
    elif kind == 3:
        values[rng.integers(0, size, 5)] += 12
    elif kind == 4:
        values[rng.random(size) < 0.5] = -np.inf
        values[rng.integers(size)] = 0.0
    elif kind == 5:
        values[rng.integers(size)] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38]))
    elif kind == 6:
        values[:] = draw(st.sampled_from([-np.inf, np.nan, np.inf, 0.0, 1e-45]))
    return values.astype(np.float32)


@st.composite
def ask(draw: Any, row: int, size: int) -> Ask:
    greedy = draw(st.integers(0, 4)) == 0
    filters = {
        "temperature": draw(st.sampled_from([1e-4, 0.3, 1.0, 1.0, 2.5, 1e4])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 40, 5000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.999999, 0.99, 0.9, 0.5, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 1e-20, 0.001, 0.1, 1.0])),
    }
    tokens = st.integers(0, size - 1)
    params = SamplingParams(
        **({} if greedy else filters),
        rng=draw(st.sampled_from(["philox", "xorshift", "numpy"])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.1, -1.3])),
        logit_bias=draw(st.dictionaries(tokens, st.floats(-100, 100), max_size=3)),
        logprobs=draw(st.sampled_from([None, 0, 5, 20, 6000])),
    )
    text = draw(st.lists(tokens, max_size=12))
    allowed = None
    if draw(st.integers(0, 3)) == 0:
        bits = np.random.default_rng(draw(st.integers(0, 99))).random(size) < draw(st.sampled_from([0.001, 0.5, 1.0]))
        bits[draw(tokens)] = True
        allowed = bits
    coin = draw(st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53, 1 - 2.0**-24])))
    return Ask(row, params, lambda: coin, np.array(text, np.int32), draw(st.integers(0, len(text))), allowed)


@st.composite
def passes(draw: Any) -> tuple[np.ndarray, list[Ask]]:
    size = draw(st.sampled_from(SIZES))
    rows = draw(st.integers(1, 3 if size > 600 else 9))
    asks = [draw(ask(draw(st.integers(0, rows - 1)), size)) for _ in range(draw(st.integers(1, 2 * rows)))]
    return np.stack([draw(logits(size)) for _ in range(rows)]), asks


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of logits that overflow, in numpy
@settings(max_examples=400, deadline=None)
@given(passes(), st.sampled_from([None, "portable"]))
def test_the_tokens_and_the_bits_of_their_logprobs(of: tuple[np.ndarray, list[Ask]], isa: str | None) -> None:
    rows, asks = of
    native = CpuPredictions(rows, MODELS[rows.shape[1], isa])
    together = native.draw(asks)
    assert repr(together) == repr(Predictions(rows).draw(asks))
    assert repr([native.draw([one])[0] for one in asks]) == repr(together), "alone and in company"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.5, 3.0]), st.sampled_from([0.8, 1.0, 2.0]), st.integers(0, 3))
def test_the_tokens_that_full_sorts_give(seed: int, scale: float, temperature: float, which: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, scale, (4, 49_152)).astype(np.float32)
    fields = [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"top_k": 3000, "min_p": 0.02}][which]
    params, coins = SamplingParams(temperature=temperature, **fields), rng.random(4).tolist()
    asks = [Ask(row, params, lambda row=row: coins[row]) for row in range(4)]
    drawn = CpuPredictions(rows, MODELS[49_152, None]).draw(asks)
    assert drawn == [Sampled(plain_sampling.token(rows[i], params, [], [], coins[i])) for i in range(4)]


def test_64_rows_on_threads_are_those_drawn_one_by_one() -> None:
    rng = np.random.default_rng(3)
    rows, coins = rng.normal(0, 3, (64, 5000)).astype(np.float32), rng.random(64).tolist()
    params = [SamplingParams(temperature=0.5 + i / 40, top_p=0.9, logprobs=i % 7) for i in range(64)]
    asks = [Ask(i, params[i], lambda i=i: coins[i]) for i in range(64)]
    native = CpuPredictions(rows, MODELS[5000, None])
    drawn = native.draw(asks)
    assert drawn == Predictions(rows).draw(asks)
    for _ in range(20):
        assert native.draw(asks) == drawn
    assert native.draw(asks[::-1]) == drawn[::-1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_numbers_spoils_no_other(bad: float, temperature: float) -> None:
    rows = np.random.default_rng(4).normal(0, 1, (3, 512)).astype(np.float32)
    rows[1] = bad
    asks = [Ask(i, SamplingParams(temperature=temperature, logprobs=1), lambda: 0.3) for i in range(3)]
    drawn = CpuPredictions(rows, MODELS[512, None]).draw(asks)
    assert drawn[1] is None
    assert [drawn[0], drawn[2]] == Predictions(rows[[0, 2]]).draw([asks[0], asks[1]])


def test_what_is_not_allowed_is_never_drawn_and_logprobs_stay_the_models() -> None:
    rows = np.random.default_rng(5).normal(0, 1, (1, 513)).astype(np.float32)
    bits = np.zeros(513, bool)
    bits[[31, 32, 512]] = True
    for rng in ("philox", "xorshift"):
        params, drawn = SamplingParams(temperature=5.0, logprobs=0, rng=rng), set()
        for coin in np.linspace(0, 1 - 2.0**-24, 60).tolist():
            (one,) = CpuPredictions(rows, MODELS[513, None]).draw([Ask(0, params, lambda c=coin: c, allowed=bits)])
            assert one
            drawn.add(one.token)
            free = Predictions(rows).draw([Ask(0, SamplingParams(logit_bias={one.token: 100.0}, logprobs=0), float)])[0]
            assert free
            assert (one.token, one.logprob) == (free.token, free.logprob)
        assert drawn == {31, 32, 512}


def test_one_chain_of_filters() -> None:
    assert _native.filters() == list(FILTER_NAMES)


def test_the_native_unit_is_the_written_one() -> None:
    rows = np.zeros((1, 33), np.float32)
    assert MODELS[33, None].draw(rows, [(0, 0.0, SamplingParams(logprobs=0).asked, None, 0, None)]) == [
        (0, 0.0, 33 * ONE, [])
    ]


ASKED = SamplingParams().asked
NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "tokens",
    "biases",
    "xorshift",
    "logprobs",
)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 1e-5, "temperature must be"), ("temperature", float("nan"), "temperature must be"),
        ("top_k", -1, "top_k must be"), ("top_p", 0.0, "top_p must be"), ("top_p", float("nan"), "top_p must be"),
        ("min_p", 1.5, "min_p must be"), ("repetition", 0.0, "repetition_penalty"),
        ("presence", float("inf"), "penalties must be"),
        ("logprobs", -2, "logprobs must be"), ("tokens", np.array([3], np.int32), "biases must have 1"),
        ("biases", np.array([np.nan], np.float32), "biases must have 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(field: str, value: Any, message: str) -> None:
    asked = tuple(value if name == field else old for name, old in zip(NAMES, ASKED, strict=True))
    with pytest.raises(ValueError, match=message):
        MODELS[16, None].draw(np.zeros((1, 16), np.float32), [(0, 0.0, asked, None, 0, None)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1, 0.0, ASKED, None, 0, None), "a row must be"),
        ((-1, 0.0, ASKED, None, 0, None), "a row must be"),
        ((0, 1.0, ASKED, None, 0, None), "coin"),
        ((0, float("nan"), ASKED, None, 0, None), "coin"),
        ((0, 0.0, ASKED, np.array([16], np.int32), 0, None), "token id 16"),
        ((0, 0.0, ASKED, None, -1, None), "prompt_tokens"),
        ((0, 0.0, ASKED, None, 0, np.zeros(15, np.bool_)), "allowed must have 16"),
    ],
)
def test_rows_that_are_not_there_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS[16, None].draw(np.zeros((1, 16), np.float32), [row])
    with pytest.raises(ValueError, match="logits must be of shape"):
        MODELS[16, None].draw(np.zeros((1, 15), np.float32), [])


def test_memory_that_runs_out_is_one_line() -> None:
    class Full:
        def draw(self, *of: Any) -> Any:
            raise MemoryError

    with pytest.raises(NotEnoughMemory, match="drawing 1 tokens"):
        CpuPredictions(np.zeros((1, 4), np.float32), Full()).draw([Ask(0, SamplingParams(), float)])  # type: ignore[arg-type]


def test_a_backend_predicts_with_it() -> None:
    config = tiny_config()
    backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1)
    from pronk.engine.batch import Batch, Run

    predictions = backend.predict(Batch.of([Run([1, 2, 3])]), None)
    assert isinstance(predictions, CpuPredictions)
    assert predictions.draw([Ask(0, SamplingParams(), float)])[0] == Sampled(int(predictions.logits(0, 1).argmax()))
