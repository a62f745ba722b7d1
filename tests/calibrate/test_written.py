"""A text that a model writes to be calibrated on: it is the model's own, and stands beside one of others'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk.calibrate import CTX, MOST, own_text
from pronk.calibrate.calibrated import calibrated, types, windows
from pronk.calibrate.written import together, written
from pronk.errors import NoTokenizer


@pytest.fixture(scope="module")
def stories(data: Path) -> pronk.LLM:
    return pronk.load(data / "stories260K" / "stories260K.bin", engine="cpu", quantize="f32")


def test_texts_begin_with_words_and_go_on_as_the_model_would(stories: pronk.LLM) -> None:
    seen = []
    text = written(stories, 1200, progress=lambda name, done, total: seen.append((done, total)))
    texts = text.split("\n\n")
    assert len({one.split(" ")[0] for one in texts}) == len(texts) == 3
    assert all(one[0].isalpha() for one in texts)
    ids = stories.tokenizer.encode(text)
    assert 1200 < len(ids) < 3 * CTX + 50
    likely = logprobs(stories, ids[:CTX])
    assert -2.5 < likely.mean() < -0.5  # of random tokens -6.2 and less
    total = 3 * (CTX - 2)
    assert seen == [(done, total) for done in range(1, total + 1)]


def logprobs(llm: pronk.LLM, ids: list[int]) -> NDArray[np.float64]:
    """Of each token but the first two, given those before."""
    logits = llm.logits(ids).astype(np.float64)
    every = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return every[np.arange(1, len(ids) - 1), ids[2:]]


def test_the_seed_says_what_is_written(stories: pronk.LLM) -> None:
    assert written(stories, 300) == written(stories, 300)
    assert written(stories, 300) != written(stories, 300, seed=1)


def test_a_short_context_makes_shorter_texts(data: Path) -> None:
    with pronk.load(data / "stories260K" / "stories260K.bin", engine="cpu", quantize="f32", ctx_size=40) as llm:
        seen = []
        assert written(llm, 125, progress=lambda name, done, total: seen.append(total)).count("\n\n") >= 3
    assert set(seen) == {4 * (40 - 2)}


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_few_tokens(stories: pronk.LLM, tokens: int) -> None:
    """What a text begins with took more than was asked for, and nothing was left to be written."""
    assert written(stories, tokens)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    config = tiny_config()
    llm = pronk.load(in_memory(config, random_weights(config)), engine="cpu", quantize="f32")
    with llm, pytest.raises(NoTokenizer):
        written(llm, 100)


@given(own=st.integers(0, MOST), text=st.integers(128, 3 * MOST), longest=st.integers(1, 2 * CTX))
def test_both_are_what_is_read(own: int, text: int, longest: int) -> None:
    """All of what was written, and no more than is read of both: or what stands at the end would count for nothing."""
    both = together([-1] * own, range(text), longest)
    assert both[:own] == [-1] * own
    assert min(both[own:], default=0) == 0
    assert own <= len(both) <= MOST
    ctx = min(CTX, longest)
    assert len(both) > min(MOST, own + text) - 2 * ctx
    if own % ctx == 0:
        assert [token for window in windows(both, longest) for token in window] == both


def test_what_it_writes_is_a_better_text_than_one_of_other_words(stories: pronk.LLM) -> None:
    """pronk's text has languages and code, of which this model was taught nothing. It is judged on other stories."""
    judged = stories.tokenizer.encode(written(stories, 2000, seed=1))
    kinds = types(stories.checkpoint, "q4_0")
    text, longest = stories.tokenizer.encode(own_text()), stories.config.max_position_embeddings
    apart = []
    for own in ([], stories.tokenizer.encode(written(stories, MOST))):
        made = calibrated(stories.checkpoint, kinds, together(own, text, longest))
        with pronk.load(made, engine="cpu", quantize="f32") as llm:
            apart.append(np.mean([divergence(stories, llm, judged[at:][:CTX]) for at in range(0, 2000, CTX)]))
    assert apart[1] < 0.95 * apart[0], apart


def divergence(one: pronk.LLM, other: pronk.LLM, ids: list[int]) -> float:
    p, q = (llm.logits(ids).astype(np.float64) for llm in (one, other))
    p, q = (logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True) for logits in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
