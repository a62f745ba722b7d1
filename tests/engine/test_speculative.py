"""Speculative decoding: the same tokens, in fewer passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_backend import MockBackend, habitual_logits
from schedules import CTX, VOCAB, Interrupted, check_accounts, run

from pronk.engine.events import Event
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Scheduler
from pronk.errors import BadRequest


@st.composite
def requests(draw: Any) -> tuple[list[int], SamplingParams, int]:
    # Prompts of few different tokens and many repeats, so that they have prefixes in common and drafts are made.
    phrase = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    prompt = (phrase * 20)[: draw(st.integers(1, 40))]
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    params = SamplingParams(
        max_new_tokens=draw(st.integers(1, 45)),
        temperature=temperature,
        top_k=5 * (temperature > 0) * draw(st.integers(0, 1)),
        rng=draw(st.sampled_from(["philox", "xorshift", "numpy"])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.2])),
        n=draw(st.sampled_from([1, 1, 3])) if temperature else 1,
        stop_token_ids=draw(st.sampled_from([(), (5,)])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    return prompt, params, draw(st.integers(1, 99))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_drafts_and_reuse_change_no_token_in_any_schedule(data: Any) -> None:
    wanted = data.draw(st.lists(requests(), min_size=1, max_size=6))
    block_size = data.draw(st.integers(1, 5))
    limits = {
        "max_batch_tokens": data.draw(st.integers(3, 30)),
        "max_sequences": data.draw(st.integers(3, 8)),
        "max_kv_tokens": data.draw(st.sampled_from([None, 75, 90])),
    }
    expected = run(Scheduler(MockBackend(VOCAB, CTX, logits=habitual_logits), **limits, block_size=4), list(wanted))

    backend = Interrupted(data.draw(st.sampled_from([0, 0, 3])))
    kv = PrefixCache(backend, block_size, data.draw(st.sampled_from([0, 30, 200])))
    scheduler = Scheduler(backend, **limits, kv=kv)
    found = run(scheduler, [(p, replace(params, speculative="ngram"), seed) for p, params, seed in wanted])
    assert found == expected
    check_accounts(scheduler, backend, kv, found)


def test_who_gives_way_in_a_pass_takes_no_block_of_it() -> None:
    """A prompt that had to give way began in the same pass with what the cache knew of it, held these blocks while it
    waited, and the text it gave way to failed for want of memory."""
    limits = {"max_batch_tokens": 3, "max_sequences": 3, "max_kv_tokens": 68}
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    scheduler = Scheduler(backend, **limits, kv=PrefixCache(backend, 1, 30))
    params = SamplingParams(max_new_tokens=15, ignore_eos=True, speculative="ngram")
    short = replace(params, max_new_tokens=1)
    found = run(scheduler, [([0] * 37, params, 1), ([0, 1] * 14, short, 1)])
    assert [type(outcome) for outcome in found[0, 0]] == [Event] * 15
    assert scheduler.counters.preemptions


def looping(tokens: tuple[int, ...], vocab_size: int) -> Any:
    logits = np.zeros(vocab_size, np.float32)
    logits[(tokens[-1] + 1) % 5] = 1
    return logits


def test_text_that_repeats_itself_takes_a_fraction_of_the_passes() -> None:
    backend = MockBackend(VOCAB, 1000, logits=looping)
    scheduler = Scheduler(backend)
    scheduler.add([0, 1, 2, 3, 4, 0, 1], SamplingParams(max_new_tokens=200, speculative="ngram"), 1)
    events = run(scheduler, [])[0, 0]
    assert [event.token for event in events] == [(2 + n) % 5 for n in range(200)]
    counters = scheduler.counters
    assert counters.steps == 200 - counters.accepted_tokens < 30
    assert counters.drafted_tokens == counters.accepted_tokens


def test_a_draft_is_cut_where_the_sequence_ends() -> None:
    backend = MockBackend(VOCAB, 12, logits=looping)
    for fields in ({"max_new_tokens": 3}, {"max_new_tokens": 99}, {"stop_token_ids": (4,)}):
        scheduler = Scheduler(backend)
        scheduler.add([0, 1, 2, 3, 4, 0, 1], SamplingParams(**fields, speculative="ngram"), 1)
        found = run(scheduler, [])[0, 0]
        assert len(found) == {(3,): 3, (99,): 5}.get((fields.get("max_new_tokens", 0),), 3)
    assert max(int(batch.positions.max()) for batch in backend.batches) < 12


def test_drafts_fill_small_passes_only() -> None:
    backend = MockBackend(VOCAB, 1000, logits=looping)
    scheduler = Scheduler(backend)
    for _ in range(20):
        scheduler.add([0, 1, 2, 3, 4, 0, 1], SamplingParams(max_new_tokens=20, speculative="ngram"), 1)
    run(scheduler, [])
    assert scheduler.counters.drafted_tokens == 0
    for _ in range(3):
        scheduler.add([0, 1, 2, 3, 4, 0, 1], SamplingParams(max_new_tokens=40, speculative="ngram"), 1)
    backend.batches.clear()
    run(scheduler, [])
    assert max(len(batch.token_ids) for batch in backend.batches[1:]) == 16


def test_it_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(BadRequest, match="speculative='ngram' means nothing in beam search; leave it"):
        SamplingParams(num_beams=2, speculative="ngram")
    with pytest.raises(BadRequest, match="speculative must be ngram"):
        SamplingParams(speculative="magic")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="needs the KV cache"):
        Scheduler(MockBackend(), cached=False).add([1], SamplingParams(speculative="ngram"), 1)
