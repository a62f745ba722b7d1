"""The three mistakes are the mistakes they are called: transformers, made to make them, writes the same texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peers import hugging_face
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk.config import ModelConfig
from pronk.cpu_engine.backend import CpuBackend
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.mistakes import CACHED, MISTAKES, RIGHT, mistakes
from pronk.torch_engine.backend import TorchBackend

CONFIG = tiny_config(num_hidden_layers=4)
PROMPTS = [[1, 5, 9, 33, 70], [1, 2, 3], [90, 40, 41, 42]]
NEW = 8
PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "kv-cache.md"


def llm(config: ModelConfig = CONFIG, attn: str = "math") -> LLM:
    checkpoint = in_memory(config, random_weights(config))
    return LLM("tiny", checkpoint, None, TorchBackend.from_checkpoint(checkpoint, device="cpu", attn=attn))


Theirs = Callable[[torch.nn.Module, list[int], int], torch.Tensor]

LOOPS: dict[str, Theirs] = {
    CACHED: lambda model, ids, _: model(torch.tensor([ids])),
    RIGHT: lambda model, ids, _: model(torch.tensor([ids])),
    "last token only": lambda model, ids, prompt: model(torch.tensor([ids if len(ids) == prompt else ids[-1:]])),
    "no causal mask": lambda model, ids, _: model(
        torch.tensor([ids]), attention_mask=torch.zeros(1, 1, len(ids), len(ids))
    ),
    "positions not moved on": lambda model, ids, prompt: model(
        torch.tensor([ids]), position_ids=torch.arange(len(ids)).clamp(max=prompt)[None]
    ),
}


@torch.inference_mode()
def written(model: torch.nn.Module, loop: Theirs, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW:
        ids.append(int(loop(model, ids, len(prompt)).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_texts_are_those_that_transformers_writes_with_the_same_mistakes() -> None:
    theirs = hugging_face(CONFIG, random_weights(CONFIG))
    found = mistakes(llm(), PROMPTS, NEW)
    wrong = 0
    for prompt, entry in zip(PROMPTS, found["prompts"], strict=True):
        assert list(entry["ways"]) == list(LOOPS) == [CACHED, RIGHT, *MISTAKES]
        right = written(theirs, LOOPS[RIGHT], prompt)
        for way, loop in LOOPS.items():
            expected = written(theirs, loop, prompt)
            expected = expected[: expected.index(2)] if 2 in expected else expected  # the end of a text
            assert entry["ways"][way]["tokens"] == expected, (prompt, way)
            at = entry["ways"][way]["parts_at"]
            assert at is None or expected[: at - 1] == right[: at - 1] != expected[:at]
            wrong += at is not None
        assert entry["ways"][CACHED]["parts_at"] is entry["ways"][RIGHT]["parts_at"] is None
        assert entry["ways"]["last token only"]["parts_at"] != 1  # the prompt is read rightly
    assert wrong >= 6


def test_the_future_is_seen_without_a_mask_and_not_without_a_cache() -> None:
    future = mistakes(llm(), PROMPTS[:1], NEW)["future"]
    assert future["tokens"] == len(PROMPTS[0]) + NEW
    assert future["without_cache"] == 0
    assert future["without_mask"] > 0.1


def test_one_layer_alone_needs_no_mask_to_write() -> None:
    """The newest token sees all others either way; it is through a second layer that what they saw comes back."""
    found = mistakes(llm(tiny_config(num_hidden_layers=1)), PROMPTS, NEW)
    assert all(entry["ways"]["no causal mask"]["parts_at"] is None for entry in found["prompts"])
    assert found["future"]["without_mask"] > 0.1


def test_a_mask_that_cannot_be_taken_away_is_said() -> None:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    for engine in (llm(attn="flash"), LLM("tiny", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, threads=1))):
        with pytest.raises(BadRequest, match="takes the torch engine, loaded with attn='math'"):
            mistakes(engine)
    with pytest.raises(BadRequest, match="no future in a text of one token"):
        mistakes(llm(tiny_config(eos_token_ids=tuple(range(96)))), [[1]], 1)


@pytest.mark.slow
def test_the_page_has_what_a_run_gives(data: Path) -> None:
    """Where the five texts of docs/how-it-works/kv-cache.md part, on stories260K."""
    page = PAGE.read_text("utf-8")
    (options,) = re.findall(r"\(`(-p .*?) -n 32`\)", page, re.DOTALL)
    prompts = re.findall(r'-p "(.*?)"', options)
    stories = pronk.load(data / "stories260K" / "stories260K.bin", engine="torch", attn="math", threads=1, device="cpu")
    found = mistakes(stories, prompts, 32)
    for way in (*MISTAKES, CACHED, RIGHT):
        parts = [entry["ways"][way]["parts_at"] for entry in found["prompts"]]
        if way in MISTAKES:
            assert f"| {way} | {', '.join(map(str, parts))} |" in page
        else:
            assert parts == [None] * 5
    assert len(prompts) == 5
    assert "looks better for a few tokens" not in page
