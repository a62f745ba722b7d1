"""SamplingParams refuses what cannot be honoured, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from pronk.engine.params import SamplingParams
from pronk.errors import BadRequest, ContextOverflow

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_new_tokens", v) for v in (0, -2, 1.5, True, None, 1 << 31)],
        *[("temperature", v) for v in (-1, NAN, INF, 1e-5, "1", None, True)],
        *[("top_k", v) for v in (-1, 0.5, NAN)],
        *[("top_p", v) for v in (0, -0.1, 1.01, NAN)],
        *[("min_p", v) for v in (-0.1, 1.1, NAN)],
        *[("repetition_penalty", v) for v in (0, -1, 1e-45, 9e-5, NAN, INF)],
        *[("presence_penalty", v) for v in (2.1, -2.1, NAN)],
        *[("frequency_penalty", v) for v in (2.1, -2.1, NAN)],
        *[("length_penalty", v) for v in (NAN, INF, 6)],
        *[("logit_bias", v) for v in ({-1: 0.0}, {1: NAN}, {1: 101}, {"1": 1.0}, [(1, 1.0)], {True: 1.0})],
        *[("seed", v) for v in (-1, 1 << 64, 1.0, True)],
        ("rng", "mt19937"),
        *[(name, v) for name in ("num_samples", "n", "num_beams", "num_return_sequences") for v in (0, 1.0)],
        *[(name, 65537) for name in ("num_samples", "n", "num_return_sequences")],
        *[("early_stopping", v) for v in ("always", 1, None)],
        *[("stop", v) for v in ("", ("a", ""), (1,), None)],
        *[("stop_token_ids", v) for v in ((-1,), (1.0,), 5, (True,))],
        ("ignore_eos", 1),
        *[("logprobs", v) for v in (-1, 2.0, True)],
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 2, "temperature": 0.7},
        {"num_beams": 2, "top_k": 5},
        {"num_beams": 2, "top_p": 0.9},
        {"num_beams": 2, "min_p": 0.1},
        {"num_beams": 2, "n": 2},
        {"num_beams": 2, "num_return_sequences": 3},
        {"num_beams": 2, "logprobs": 1},
        {"num_beams": 2, "stop": ("a",)},
        {"num_beams": 2, "num_samples": 2},
        {"n": 2, "num_return_sequences": 3},
        {"num_samples": 2, "n": 3},
        {"num_samples": 2, "temperature": 0},
        {"rng": "xorshift", "seed": 0},
        {"rng": "numpy", "seed": 1 << 32},
        {"length_penalty": 0.5},
        {"early_stopping": True},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1, "temperature": 0.0},
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**fields)
    assert all(name in str(caught.value) for name in fields)


def test_all_defaults_and_edges_are_accepted() -> None:
    SamplingParams()
    SamplingParams(temperature=1e-4, top_p=1e-9, min_p=1.0, repetition_penalty=0.01, logprobs=0, logit_bias={0: -100})
    SamplingParams(num_beams=3, num_return_sequences=3, early_stopping="never", length_penalty=-5.0)


def test_sequences_are_kept_as_tuples_and_a_lone_stop_string_is_one() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), (3, 4))
    biases = {1: 2.0}
    params = SamplingParams(logit_bias=biases)
    biases[1] = 5.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({}, 1),
        ({"num_samples": 3}, 3),
        ({"n": 3}, 3),
        ({"num_return_sequences": 3}, 3),
        ({"n": 2, "num_return_sequences": 2}, 2),
    ],
)
def test_n_and_num_return_sequences_are_names_of_num_samples(fields: dict[str, Any], samples: int) -> None:
    assert SamplingParams(temperature=1.0, **fields).samples == samples


@pytest.mark.parametrize("name", ["num_samples", "n", "num_return_sequences"])
def test_greedy_samples_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{name: 3})
    said = str(caught.value)
    assert said.startswith(f"{name}=3 gives the same text 3 times")
    assert "temperature=0.8" in said
    assert "num_beams" in said


def test_minus_one_new_tokens_are_as_many_as_there_can_be() -> None:
    assert SamplingParams(max_new_tokens=-1).max_new_tokens == (1 << 31) - 1
    assert SamplingParams.of(SamplingParams(max_new_tokens=-1), {}).max_new_tokens == (1 << 31) - 1


def test_stop_ids() -> None:
    assert SamplingParams(stop_token_ids=(5,)).stop_ids([2]) == {2, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).stop_ids([2]) == {5}


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        SamplingParams().check_prompt([], 10, 8)
    SamplingParams().check_prompt([1] * 7, 10, 8)
    with pytest.raises(ContextOverflow) as caught:
        SamplingParams().check_prompt([1] * 8, 10, 8)
    assert (caught.value.prompt_tokens, caught.value.limit) == (8, 7)


@pytest.mark.parametrize(
    ("fields", "prompt", "name"),
    [
        ({}, [10], "the prompt"),
        ({}, [-1], "the prompt"),
        ({"stop_token_ids": (10,)}, [1], "stop_token_ids"),
        ({"logit_bias": {10: 1}}, [1], "logit_bias"),
    ],
)
def test_tokens_the_model_lacks_are_refused(fields: dict[str, Any], prompt: list[int], name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} has token -?1"):
        SamplingParams(**fields).check_prompt(prompt, 10, 8)
