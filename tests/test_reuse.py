"""Reuse of earlier texts and guessing ahead, through LLM: the same tokens, and an account of what was spared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny import byte_tokenizer, in_memory, random_weights, tiny_config

import pronk
import pronk.tokenizer
from pronk.engine.generation import Generation
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.verify import verify
from pronk.measure.watched import WatchedBackend
from pronk.torch_engine.backend import TorchBackend

TEXT = "so it goes, so it goes, so it goes, and then it went: "
LONG = TEXT * 3


class Spy(WatchedBackend):
    """A Backend that remembers how many tokens each pass had."""

    def __init__(self, backend: TorchBackend) -> None:
        self.passes: list[int] = []
        super().__init__(backend, lambda batch: self.passes.append(len(batch.token_ids)))


def make(tmp: Path, prefix_cache: int | None = None) -> tuple[LLM, Spy]:
    config = tiny_config(vocab_size=259, max_position_embeddings=512)
    checkpoint = in_memory(config, random_weights(config))
    source = pronk.tokenizer.find(byte_tokenizer(tmp / "tokenizer.bin"))
    assert source
    spy = Spy(TorchBackend.from_checkpoint(checkpoint, device="cpu"))
    return LLM("tiny", checkpoint, pronk.tokenizer.load(source), spy, prefix_cache=prefix_cache), spy


def one(result: Generation | list[Generation]) -> Generation:
    assert isinstance(result, Generation)
    return result


def test_a_second_text_with_the_same_beginning_starts_sooner(tmp_path: Path) -> None:
    llm, spy = make(tmp_path)
    first = one(llm.generate(LONG, max_new_tokens=10))
    spy.passes.clear()
    second = one(llm.generate(LONG, max_new_tokens=10))
    assert (first.tokens, first.stats.cached_tokens) == (second.tokens, 0)
    assert second.stats.cached_tokens == first.prompt_tokens // 64 * 64
    assert spy.passes[0] == first.prompt_tokens % 64
    assert second.stats.prefill_tok_s == pytest.approx(spy.passes[0] / second.stats.ttft_s)
    beams = one(llm.generate(LONG, max_new_tokens=3, num_beams=2))
    assert beams.tokens == one(make(tmp_path)[0].generate(LONG, max_new_tokens=3, num_beams=2)).tokens


def test_no_prefix_cache_and_no_cache_remember_nothing(tmp_path: Path) -> None:
    for llm, cache in ((make(tmp_path, 0)[0], True), (make(tmp_path)[0], False)):
        for _ in range(2):
            assert one(llm.generate(LONG, max_new_tokens=2, cache=cache)).stats.cached_tokens == 0


def test_verification_computes_everything_itself(tmp_path: Path) -> None:
    llm, spy = make(tmp_path)
    fresh = verify(llm, LONG)
    passes = list(spy.passes)
    llm.generate(LONG, max_new_tokens=2)
    spy.passes.clear()
    assert verify(llm, LONG) == fresh
    assert spy.passes == passes


def test_streams_that_overlap_do_not_meet_in_the_cache(tmp_path: Path) -> None:
    llm, _ = make(tmp_path)
    texts = [LONG, LONG + "a", LONG[:-3] + "b", LONG]
    expected = [one(make(tmp_path, 0)[0].generate(text, max_new_tokens=20)).tokens for text in texts]
    for _ in range(2):
        streams = [llm.stream(text, max_new_tokens=20, ignore_eos=True) for text in texts]
        found = [[chunk.token for chunk in chunks] for chunks in zip(*streams, strict=True)]
        assert [list(tokens) for tokens in zip(*found, strict=True)] == expected
    with ThreadPoolExecutor(4) as pool:
        found_by_threads = list(pool.map(lambda text: one(llm.generate(text, max_new_tokens=20)).tokens, texts * 3))
    assert found_by_threads == expected * 3


def test_guessing_ahead_changes_no_text_and_is_accounted_for(tmp_path: Path) -> None:
    llm, spy = make(tmp_path, 0)
    for options in (
        {},
        {"temperature": 0.8, "top_k": 20, "seed": 3},
        {"stop": "\x00"},
        {"logprobs": 2, "repetition_penalty": 1.1},
        {"n": 2, "temperature": 0.5, "seed": 1},
    ):
        results = []
        for speculative in (None, "ngram"):
            found = llm.generate(TEXT, max_new_tokens=120, ignore_eos=True, speculative=speculative, **options)
            generations = found if isinstance(found, list) else [found]
            results.append([(g.tokens, g.text, g.finish_reason) for g in generations])
        assert results[0] == results[1]
    spy.passes.clear()
    stats = one(llm.generate(TEXT, max_new_tokens=120, ignore_eos=True, speculative="ngram")).stats
    assert len(spy.passes) == 120 - stats.accepted_tokens
    assert stats.drafted_tokens >= stats.accepted_tokens > 0


def test_a_stop_string_inside_a_draft_ends_the_text_there(tmp_path: Path) -> None:
    llm, _ = make(tmp_path, 0)
    whole = one(llm.generate(TEXT, max_new_tokens=120, ignore_eos=True))
    for at in range(0, len(whole.text) - 2, 5):
        stop = whole.text[at : at + 2]
        plain, guessed = (
            one(llm.generate(TEXT, max_new_tokens=120, ignore_eos=True, stop=stop, speculative=s))
            for s in (None, "ngram")
        )
        assert (plain.text, plain.tokens, plain.finish_reason) == (guessed.text, guessed.tokens, guessed.finish_reason)
        assert plain.stats.new_tokens == guessed.stats.new_tokens
        assert list(asdict(guessed.stats)) == list(asdict(plain.stats))


def test_a_wrong_size_is_refused_before_anything_is_opened() -> None:
    for wrong in (-1, 1.5, True, "all"):
        with pytest.raises(BadRequest, match="prefix_cache"):
            pronk.load("nowhere", prefix_cache=wrong)  # type: ignore[arg-type]
    for wrong in (0, 1.5, True, None):
        with pytest.raises(BadRequest, match="max_batch_tokens"):
            pronk.load("nowhere", max_batch_tokens=wrong)  # type: ignore[arg-type]
