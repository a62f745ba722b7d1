"""The default model on both engines, in float32, against transformers on the same dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import hugging_face

import pronk
from pronk.engine.generation import Generation
from pronk.llm import LLM
from pronk.measure.verify import TEXT, verify

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three animals that live in the Andes.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "1, 1, 2, 3, 5, 8,",
]


ENGINES = {"cpu": {"engine": "cpu", "quantize": "f32"}, "torch": {"engine": "torch", "device": "cpu"}}


@pytest.fixture(scope="module", params=ENGINES)
def llm(smollm2: Path, request: pytest.FixtureRequest) -> LLM:
    return pronk.load(smollm2, **ENGINES[request.param])


@pytest.fixture(scope="module")
def peer(llm: LLM) -> torch.nn.Module:
    return hugging_face(llm.config, {name: tensor.read() for name, tensor in llm.checkpoint.tensors.items()})


def test_logits(llm: LLM, peer: torch.nn.Module) -> None:
    ids = llm.tokenizer.encode(TEXT * 4)[:300]
    with torch.inference_mode():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    worst = np.abs(llm.logits(ids) - expected).max()
    assert worst < 2e-3, f"worst logit is off by {worst}"


@pytest.mark.parametrize(
    "quantize", ["auto", *(pytest.param(q, marks=pytest.mark.slow) for q in ("bf16", "int8", "q8"))]
)
def test_every_path_of_the_cpu_engine_is_identical(smollm2: Path, quantize: str) -> None:
    found = verify(pronk.load(smollm2, engine="cpu", quantize=quantize), TEXT)
    assert found["verdict"] == "identical"
    assert found["noise_floor"] > 0


def test_what_is_generated_is_what_is_streamed(smollm2: Path) -> None:
    """Side by side, other passes are begun ahead than alone, and given up as texts end."""
    llm = pronk.load(smollm2, engine="cpu", quantize="q8")
    ends: dict[str, dict[str, Any]] = {
        "length": {"max_new_tokens": 29},
        "string": {"max_new_tokens": 60, "stop": (".", "\n")},
        "token": {"max_new_tokens": 60, "stop_token_ids": (28, 30), "ignore_eos": True},
    }
    for options in ends.values():
        together = llm.generate(PROMPTS, **options)
        assert isinstance(together, list)
        for prompt, found in zip(PROMPTS, together, strict=True):
            chunks = list(llm.stream(prompt, **options))
            streamed = ("".join(c.text for c in chunks), [c.token for c in chunks if c.token is not None])
            for made in (found, llm.generate(prompt, **options)):
                assert isinstance(made, Generation)
                assert (made.text, made.tokens, made.finish_reason) == (*streamed, chunks[-1].finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text(llm: LLM, peer: torch.nn.Module, prompt: str) -> None:
    ids = llm.tokenizer.encode(prompt)
    with torch.inference_mode():
        expected = peer.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=128,
            do_sample=False,
            pad_token_id=2,
        )[0, len(ids) :].tolist()
    found = llm.generate(prompt, max_new_tokens=128)
    assert isinstance(found, Generation)
    assert found.tokens + [2] * (found.finish_reason == "stop") == expected
    assert found.text == llm.tokenizer.decode(expected)
