"""Tokens drawn where the logits lie are those that the host draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk.engine.backend import Backend
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.sampling import Sampled
from pronk.llm import LLM
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.predictions import TorchPredictions

CONFIG = tiny_config(max_position_embeddings=512)
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))
SPECIAL = (0.0, -0.0, 1.0, 1.0, 3.0e38, np.inf, -np.inf, np.nan, 2.0**-149)


def outcome(predictions: Predictions, row: int, params: SamplingParams) -> Any:
    return predictions.draw([Ask(row, params, lambda: 0.37, [1, 2, 1], 2)])[0]


@pytest.mark.parametrize("device", DEVICES)
@given(
    rows=st.lists(st.lists(st.sampled_from(SPECIAL), min_size=5, max_size=5), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    options=st.sampled_from(
        [{}, {"logprobs": 2}, {"logit_bias": {3: 5.0}}, {"repetition_penalty": 1.5}, {"temperature": 0.7, "top_k": 2}]
    ),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what is not a number
def test_ties_and_what_is_no_number(
    rows: list[list[float]], dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    """numpy's argmax and torch's agree on the first of equals, and on NaN."""
    logits, params = torch.tensor(rows).to(dtype), SamplingParams(**options)
    here, there = Predictions(logits.float().numpy()), TorchPredictions(logits.to(device))
    for row in range(len(rows)):
        assert repr(outcome(there, row, params)) == repr(outcome(here, row, params))


@pytest.mark.parametrize("quantize", ["f32", "bf16", "llm-int8"])
@pytest.mark.parametrize("cache", [True, False])
def test_the_same_texts(quantize: str, cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu", quantize=quantize)
    drawn_there = 0

    def tokens() -> list[list[int]]:
        llm, found = LLM("tiny", CHECKPOINT, None, backend), []
        for options in ({}, {"presence_penalty": 0.5}, {"temperature": 1.0, "seed": 3}, {"speculative": "ngram"}):
            if cache or "speculative" not in options:
                found += llm.generate([[1, 2, 3], [5] * 70], max_new_tokens=12, ignore_eos=True, cache=cache, **options)
        return [one.tokens for one in found]

    sample = TorchPredictions.sample

    def counted(self: TorchPredictions, ask: Ask) -> Any:
        nonlocal drawn_there
        drawn_there += ask.params.takes_likeliest and "_here" not in vars(self)
        return sample(self, ask)

    monkeypatch.setattr(TorchPredictions, "sample", counted)
    there = tokens()
    assert drawn_there >= 24
    monkeypatch.setattr(TorchBackend, "predict", Backend.predict)
    assert there == tokens()


def test_greedy_tokens_leave_the_logits_where_they_are() -> None:
    predictions = TorchPredictions(torch.eye(4))
    asks = [Ask(row, SamplingParams(), lambda: 0.0) for row in range(4)]
    assert predictions.draw(asks) == [Sampled(token) for token in range(4)]
    assert "_here" not in vars(predictions)
    assert predictions.sample(Ask(2, SamplingParams(logprobs=0), lambda: 0.0)).token == 2
    assert "_here" in vars(predictions)


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16", "absmax"])
def test_a_plain_module_has_the_weights_that_are_computed_with(quantize: str) -> None:
    """Of 16 bits it had the file's."""
    backend = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu", quantize=quantize, attn="math")
    module = LLM("tiny", CHECKPOINT, None, backend).to_torch()
    name = "model.embed_tokens.weight"
    assert torch.equal(module.get_parameter(name), backend.model.get_parameter(name).float())
    stored = torch.from_numpy(np.array(CHECKPOINT.tensors[name].read()))
    assert torch.equal(module.get_parameter(name), stored) == (quantize in ("f32", "absmax"))
