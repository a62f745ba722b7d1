"""Several greedy tokens a step, where nobody reads along: the very tokens of one a step, whatever else is going on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_backend import GreedyBackend, MockBackend, alone, habitual_logits
from schedules import CTX, VOCAB, Interrupted, check_accounts, run

from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Scheduler
from pronk.errors import PronkError


@st.composite
def requests(draw: Any) -> tuple[list[int], SamplingParams, int]:
    phrase = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    params = SamplingParams(
        max_new_tokens=draw(st.integers(1, 45)),
        temperature=draw(st.sampled_from([0.0] * 9 + [1.0])),
        repetition_penalty=draw(st.sampled_from([1.0] * 9 + [1.1])),
        logit_bias=draw(st.sampled_from([{}] * 9 + [{4: 3.0}])),
        n=draw(st.sampled_from([1, 1, 1, 3])),
        stop_token_ids=draw(st.sampled_from([(), (), (5,), (2, 9)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        logprobs=draw(st.sampled_from([None] * 9 + [2])),
        speculative=draw(st.sampled_from([None] * 9 + ["ngram"])),
    )
    return (phrase * 20)[: draw(st.integers(1, 40))], params, draw(st.integers(1, 99))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_several_at_once_change_no_token_in_any_schedule(data: Any) -> None:
    wanted = data.draw(st.lists(requests(), min_size=1, max_size=5))
    limits = {
        "max_batch_tokens": data.draw(st.integers(3, 30)),
        "max_sequences": data.draw(st.integers(3, 8)),
        "max_kv_tokens": data.draw(st.sampled_from([None, 75, 90])),
    }
    expected = run(Scheduler(MockBackend(VOCAB, CTX, logits=habitual_logits), **limits, block_size=4), list(wanted))
    backend = Interrupted(data.draw(st.sampled_from([0, 0, 3])))
    kv = PrefixCache(backend, data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 30, 200])))
    scheduler = Scheduler(backend, **limits, kv=kv, multi_step=True)
    assert run(scheduler, list(wanted)) == expected
    check_accounts(scheduler, backend, kv, expected)


def steps(backend: MockBackend, params: SamplingParams, *, multi_step: bool = True, requests: int = 1) -> int:
    """How many steps texts of 40 tokens take, which are what they are alone."""
    scheduler = Scheduler(backend, multi_step=multi_step)
    for request in range(requests):
        scheduler.add([1, 2, request], params, 0)
    taken, tokens = 0, defaultdict[int, list[int]](list)
    while scheduler.has_work:
        taken += 1
        for event in scheduler.step():
            tokens[event.request].append(event.token)
    for request, found in tokens.items():
        assert found == alone([1, 2, request], params, vocab_size=50, ctx_size=1000)[0]
        assert len(found) == 40
    return taken


PLAIN = SamplingParams(max_new_tokens=40, ignore_eos=True)


def test_it_is_done_where_nothing_but_greedy_tokens_is_wanted() -> None:
    """The inverse of the tests above, which prove nothing where every step gives one token."""
    backend = GreedyBackend()
    assert steps(backend, PLAIN) < 20
    assert steps(backend, PLAIN, requests=5) < 20
    assert backend.calls > 6
    for changes in (
        {"temperature": 1.0}, {"logprobs": 0}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1},
        {"repetition_penalty": 1.01}, {"logit_bias": {3: 0.1}}, {"stop": ("a string, found in text",)},
    ):  # fmt: skip
        assert steps(backend, replace(PLAIN, **changes)) == 40
    assert steps(backend, PLAIN, multi_step=False) == 40
    assert steps(MockBackend(), PLAIN) == 40


def test_nobody_waits_for_it() -> None:
    """With a request that waits for a place, a step gives one token."""
    backend = GreedyBackend()
    scheduler = Scheduler(backend, max_sequences=1, multi_step=True)
    scheduler.add([1], replace(PLAIN, max_new_tokens=5), 0)
    scheduler.add([2], PLAIN, 0)
    for _ in range(5):
        assert len(scheduler.step()) == 1
    assert not backend.calls


def test_no_block_is_taken_for_tokens_that_may_not_come() -> None:
    """One that was let grow the cache beyond its size, or pushed another text out of it."""
    backend = GreedyBackend()
    kv = PrefixCache(backend, 8, 200)
    scheduler = Scheduler(backend, kv=kv, multi_step=True)
    scheduler.add([1, 2, 3], PLAIN, 0)
    while scheduler.has_work:
        events = scheduler.step()
        tokens = 3 + events[-1].step + 1
        taken = kv.pool.num_blocks - kv.pool.num_free
        assert taken <= -(-tokens // 8)
    assert backend.calls > 3


def test_the_first_token_comes_alone() -> None:
    """Else the time to it is that of several, and the rate after it that of none."""
    backend = GreedyBackend()
    scheduler = Scheduler(backend, kv=PrefixCache(backend, 4, 100), multi_step=True)
    for prompt in ([1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]):
        scheduler.add(prompt, PLAIN, 0)
        assert len(scheduler.step()) == 1
        while scheduler.has_work:
            scheduler.step()
    assert scheduler.counters.cached_tokens == 4
    assert backend.calls


def test_numbers_before_those_that_are_none_are_given() -> None:
    class Breaks(GreedyBackend):
        def greedy(self, batch: Any, kv: Any, most: int, stops: Any) -> Any:
            left = 8 - int(batch.positions[0])
            rows = [[row if row < left else -1] for row in range(max(1, min(most, left + 1)))]
            return np.array(rows, np.int32)

    scheduler = Scheduler(Breaks(), multi_step=True)
    scheduler.add([1, 2, 3], PLAIN, 0)
    assert len(scheduler.step()) == 1
    assert [event.token for event in scheduler.step()] == [0, 1, 2, 3, 4]
    with pytest.raises(PronkError, match="logits are not numbers"):
        scheduler.step()
