"""Texts that follow a grammar: the same tokens alone and in company, with drafts, samples, preemption, interrupts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from automata import Automaton, alone_under
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_backend import MockBackend, habitual_logits
from schedules import CTX, VOCAB, Interrupted, check_accounts

from pronk.engine.events import Event, Failure, Found, Outcome
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sampling import sample
from pronk.engine.scheduler import Scheduler
from pronk.errors import BadRequest

EOS = 3
Wanted = list[tuple[list[int], SamplingParams, int, Automaton | None]]

# 0 1 2 then any number of (4 5), then 6 which ends it.
PLAIN = Automaton(VOCAB, {0: {0: 1}, 1: {1: 2}, 2: {2: 3}, 3: {4: 4, 6: 5}, 4: {5: 3}}, frozenset({5}))


@st.composite
def automata(draw: Any) -> Automaton:
    states = draw(st.integers(1, 5))
    state = st.integers(0, states - 1)
    follows = {s: draw(st.dictionaries(st.integers(0, VOCAB - 1), state, max_size=4)) for s in range(states)}
    breaks = frozenset({states - 1}) if draw(st.integers(0, 5)) == 0 else frozenset()
    return Automaton(VOCAB, follows, frozenset(draw(st.sets(state, max_size=2))), breaks)


@st.composite
def requests(draw: Any) -> tuple[list[int], SamplingParams, int, Automaton | None]:
    phrase = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    prompt = (phrase * 20)[: draw(st.integers(1, 40))]
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    params = SamplingParams(
        max_new_tokens=draw(st.integers(1, 45)),
        temperature=temperature,
        top_k=5 * (temperature > 0) * draw(st.integers(0, 1)),
        top_p=draw(st.sampled_from([0.5, 1.0])) if temperature else 1.0,
        rng=draw(st.sampled_from(["philox", "xorshift", "numpy"])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.1])),
        n=draw(st.sampled_from([1, 1, 3])) if temperature else 1,
        stop_token_ids=draw(st.sampled_from([(), (5,)])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 2])),
        speculative=draw(st.sampled_from([None, "ngram"])),
    )
    return prompt, params, draw(st.integers(1, 99)), draw(st.one_of(st.none(), automata(), st.just(PLAIN)))


def run(scheduler: Scheduler, late: Wanted) -> dict[tuple[int, int], list[Outcome]]:
    late, outcomes = list(late), defaultdict(list)
    while scheduler.has_work or late:
        if late:
            prompt, params, seed, grammar = late.pop(0)
            scheduler.add(prompt, params, seed, [EOS], grammar)
        try:
            for outcome in scheduler.step():
                outcomes[outcome.request, getattr(outcome, "sample", 0)].append(outcome)
        except KeyboardInterrupt:
            pass
    return outcomes


ANY = Automaton(VOCAB, {0: dict.fromkeys(range(VOCAB), 0)}, frozenset({0}))


def expected(prompt: list[int], params: SamplingParams, seed: int, index: int, grammar: Automaton | None) -> Any:
    return alone_under(grammar or ANY, prompt, params, seed, index, [EOS], CTX)


def said(outcomes: list[Outcome]) -> tuple[list[int], str]:
    tokens = [outcome.token for outcome in outcomes if isinstance(outcome, Event)]
    last = outcomes[-1]
    return tokens, "error" if isinstance(last, Failure) else last.finish_reason


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_same_tokens_in_any_schedule(data: Any) -> None:
    wanted = data.draw(st.lists(requests(), min_size=1, max_size=6))
    limits = {
        "max_batch_tokens": data.draw(st.integers(3, 30)),
        "max_sequences": data.draw(st.integers(3, 8)),
        "max_kv_tokens": data.draw(st.sampled_from([None, 75, 90])),
    }
    backend = Interrupted(data.draw(st.sampled_from([0, 0, 3])))
    kv = PrefixCache(backend, data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 30, 200])))
    scheduler = Scheduler(backend, **limits, kv=kv)
    found = run(scheduler, wanted)
    for number, (prompt, params, seed, grammar) in enumerate(wanted):
        for index in range(params.samples):
            assert said(found[number, index]) == expected(prompt, params, seed, index, grammar)
    if not any(isinstance(outcome, Failure) for outcomes in found.values() for outcome in outcomes):
        check_accounts(scheduler, backend, kv, found)


@settings(max_examples=30, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3))
def test_the_same_tokens_without_a_cache(wanted: Wanted) -> None:
    wanted = [(prompt, replace(params, speculative=None), *rest) for prompt, params, *rest in wanted]
    found = run(Scheduler(MockBackend(VOCAB, CTX, logits=habitual_logits), cached=False), wanted)
    for number, (prompt, params, seed, grammar) in enumerate(wanted):
        for index in range(params.samples):
            assert said(found[number, index]) == expected(prompt, params, seed, index, grammar)


def test_preemption_is_survived() -> None:
    """Two texts that do not fit together, and are begun again and again."""
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    scheduler = Scheduler(backend, kv=PrefixCache(backend, 2, 0), max_kv_tokens=72, max_sequences=4)
    loop = Automaton(VOCAB, {0: {0: 1, 1: 1}, 1: {2: 2, 4: 2}, 2: {5: 0}}, frozenset({1}))
    params = SamplingParams(max_new_tokens=50, temperature=1.0, ignore_eos=True)
    wanted: Wanted = [([1, 2], params, seed, loop) for seed in range(4)]
    found = run(scheduler, wanted)
    assert scheduler.counters.preemptions
    for number, (prompt, params, seed, grammar) in enumerate(wanted):
        assert said(found[number, 0]) == expected(prompt, params, seed, 0, grammar)


def test_a_draft_goes_no_further_than_the_grammar() -> None:
    """And is not computed beyond: after 0 1 2 the past says 0, where only 4 and 6 may follow."""
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    scheduler = Scheduler(backend)
    params = SamplingParams(max_new_tokens=20, speculative="ngram")
    found = run(scheduler, [([0, 1, 2, 0, 1, 2, 0, 1, 2], params, 1, PLAIN)])
    assert said(found[0, 0]) == expected([0, 1, 2, 0, 1, 2, 0, 1, 2], params, 1, 0, PLAIN)
    assert scheduler.counters.accepted_tokens >= 2
    after = [batch.token_ids.tolist() for batch in backend.batches[1:]]
    assert not any(pair == (2, 0) for tokens in after for pair in itertools.pairwise(tokens))


def test_a_text_ends_with_the_token_that_nothing_can_follow() -> None:
    """In no pass of its own; and where it may end or go on, by a token that ends it."""
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    one = Automaton(VOCAB, {0: {7: 1}, 1: {8: 2}}, frozenset({2}))
    outcomes = run(Scheduler(backend), [([1], SamplingParams(max_new_tokens=9), 1, one)])[0, 0]
    assert [(o.token, o.finish_reason, o.is_stop_token) for o in outcomes] == [(7, None, False), (8, "stop", False)]
    assert len(backend.batches) == 2
    some = Automaton(VOCAB, {0: {7: 1}, 1: {8: 1}}, frozenset({1}))
    bias = {EOS: 100.0}
    outcomes = run(Scheduler(backend), [([1], SamplingParams(max_new_tokens=9, logit_bias=bias), 1, some)])[0, 0]
    assert [(o.token, o.finish_reason, o.is_stop_token) for o in outcomes] == [(7, None, False), (EOS, "stop", True)]
    outcomes = run(Scheduler(backend), [([1], SamplingParams(max_new_tokens=1, logit_bias=bias), 1, some)])[0, 0]
    assert [(o.token, o.finish_reason) for o in outcomes] == [(7, "length")]
    outcomes = run(Scheduler(backend), [([1], SamplingParams(max_new_tokens=2), 1, one)])[0, 0]
    assert outcomes[-1].finish_reason == "stop", "whole with its last token"


def test_a_matcher_that_fails_ends_its_text_alone() -> None:
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    broken = replace(PLAIN, breaks=frozenset({2}))
    nowhere = Automaton(VOCAB, {0: {7: 1}}, frozenset())
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    beams = SamplingParams(max_new_tokens=12, num_beams=3)
    wanted: Wanted = [([1, 2], params, 1, broken), ([1, 2], params, 2, PLAIN), ([1, 2], params, 3, nowhere)]
    found = run(Scheduler(backend), [*wanted, ([1], beams, 4, broken), ([1, 2], params, 5, None)])
    assert [type(o).__name__ for o in found[0, 0]] == ["Event", "Event", "Failure"]
    assert "broken on purpose" in str(found[0, 0][-1].error)
    assert [type(o).__name__ for o in found[2, 0]] == ["Event", "Failure"]
    assert "no token of the vocabulary" in str(found[2, 0][-1].error)
    assert [type(o).__name__ for o in found[3, 0]] == ["Failure"]
    assert said(found[1, 0]) == expected([1, 2], params, 2, 0, PLAIN)
    assert said(found[4, 0]) == expected([1, 2], params, 5, 0, None)


def test_reported_log_probabilities_are_the_models_own() -> None:
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    params = SamplingParams(max_new_tokens=6, logprobs=VOCAB)
    events = run(Scheduler(backend), [([1], params, 1, PLAIN)])[0, 0]
    tokens = [1]
    for event in events:
        own = sample(habitual_logits(tuple(tokens), VOCAB), params, [], [], 0.0)
        assert event.top == own.top
        assert event.logprob == dict(own.top)[event.token]
        tokens.append(event.token)
    assert any(event.token != event.top[0][0] for event in events), "or the grammar has done nothing"


@pytest.mark.parametrize("drafts", [None, "ngram"])
def test_cancelled_samples_leave_the_others_alone(drafts: Any) -> None:
    backend = MockBackend(VOCAB, CTX, logits=habitual_logits)
    scheduler = Scheduler(backend)
    params = SamplingParams(max_new_tokens=30, temperature=1.0, n=3, speculative=drafts)
    scheduler.add([1, 2], params, 7, [EOS], PLAIN)
    found = defaultdict(list)
    for number in range(40):
        if number == 2:
            scheduler.cancel(0, 1)
        for outcome in scheduler.step():
            found[outcome.sample].append(outcome)
    for index in (0, 2):
        assert said(found[index]) == expected([1, 2], params, 7, index, PLAIN)
    assert not scheduler.has_work


def test_beams_find_the_likeliest_texts_of_a_grammar() -> None:
    """With as many beams as there are beginnings nothing is cut, and the best must be the best of all texts."""
    grammar = Automaton(
        VOCAB, {0: {0: 1, 1: 1, 2: 2}, 1: {4: 3, 5: 3, 6: 2}, 2: {7: 3, 8: 3}, 3: {}}, frozenset({2, 3})
    )
    params = SamplingParams(max_new_tokens=8, num_beams=10, num_return_sequences=5)
    found = run(Scheduler(MockBackend(VOCAB, CTX, logits=habitual_logits)), [([1, 2], params, 0, grammar)])[0, 0][0]
    assert isinstance(found, Found)
    scores = {}
    for word in grammar.words(4):
        tokens, total = [1, 2], 0.0
        for token in (*word, EOS):
            logits = habitual_logits(tuple(tokens), VOCAB).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            tokens.append(token)
        scores[(*word, EOS)] = total / (len(word) + 1)
    best = sorted(scores, key=lambda word: -scores[word])[:5]
    assert [hypothesis.tokens for hypothesis in found.hypotheses] == best
    assert [h.score for h in found.hypotheses] == pytest.approx([scores[word] for word in best], abs=1e-5)
    assert all(hypothesis.finish_reason == "stop" for hypothesis in found.hypotheses)


def test_what_cannot_be_is_refused_at_once() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, CTX))
    with pytest.raises(BadRequest, match="of 99 tokens, and the model knows 12"):
        scheduler.add([1], SamplingParams(), 0, [EOS], Automaton(99, {}, frozenset()))
    with pytest.raises(BadRequest, match="ignore_eos"):
        scheduler.add([1], SamplingParams(num_beams=2, ignore_eos=True), 0, [EOS], PLAIN)
    assert not scheduler.has_work
