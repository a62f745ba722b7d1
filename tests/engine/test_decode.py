"""generate(): prompts in, events out, through either path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
from mock_backend import MockBackend, alone

from pronk.engine.decode import generate
from pronk.engine.params import SamplingParams
from pronk.engine.scheduler import Event
from pronk.errors import BadRequest, ContextOverflow

VOCAB = 50
PROMPTS = [[1], [2, 3, 4], [5] * 20]


def tokens(events: Iterable[Event]) -> list[list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        found[event.request, event.sample].append(event.token)
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("cached", [True, False])
def test_events_are_each_prompts_own(cached: bool) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=1.0, n=2)
    events = generate(MockBackend(VOCAB), PROMPTS, params, (7,), seeds=4, cached=cached, max_batch_tokens=8)
    expected = [
        alone(p, params, 4, i, vocab_size=VOCAB, ctx_size=1000, eos_ids=(7,))[0] for p in PROMPTS for i in (0, 1)
    ]
    assert tokens(events) == expected


def test_params_and_seeds_of_their_own() -> None:
    each = [SamplingParams(max_new_tokens=i + 1, temperature=1.0) for i in range(3)]
    expected = [
        alone(p, e, s, vocab_size=VOCAB, ctx_size=1000)[0] for p, e, s in zip(PROMPTS, each, (1, 2, 3), strict=True)
    ]
    assert tokens(generate(MockBackend(VOCAB), PROMPTS, each, seeds=[1, 2, 3])) == expected


def test_the_seed_in_the_params_is_used_and_a_missing_one_is_drawn() -> None:
    params = SamplingParams(max_new_tokens=20, temperature=2.0, seed=9)
    first, second = (tokens(generate(MockBackend(VOCAB), [[1]], params)) for _ in range(2))
    assert first == second == [alone([1], params, 9, vocab_size=VOCAB, ctx_size=1000)[0]]
    params = SamplingParams(max_new_tokens=20, temperature=2.0)
    assert tokens(generate(MockBackend(VOCAB), [[1]], params)) != tokens(generate(MockBackend(VOCAB), [[1]], params))


def test_bad_requests_are_refused_before_the_first_event() -> None:
    with pytest.raises(ContextOverflow):
        generate(MockBackend(VOCAB, ctx_size=4), [[1], [1] * 4], SamplingParams())
    with pytest.raises(BadRequest, match="2 prompts, 1 params and 2 seeds"):
        generate(MockBackend(VOCAB), [[1], [2]], [SamplingParams()], seeds=[1, 2])
    assert tokens(generate(MockBackend(VOCAB), [], SamplingParams())) == []
