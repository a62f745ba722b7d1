"""One beam search through a scheduler of its own."""

from __future__ import annotations

from collections.abc import Sequence

from mock_backend import MockBackend

from pronk.engine.beam import BeamSearch
from pronk.engine.events import Failure, Found, Hypothesis
from pronk.engine.grammar import Grammar
from pronk.engine.kv_blocks import BlockTable
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Scheduler


def beam_search(
    backend: MockBackend,
    prompt: list[int],
    params: SamplingParams,
    eos_ids: Sequence[int] = (),
    cached: bool = True,
    kv: PrefixCache | None = None,
    grammar: Grammar | None = None,
) -> list[Hypothesis]:
    with Scheduler(backend, cached=cached, kv=kv) as scheduler:
        number = scheduler.add(prompt, params, 0, eos_ids, grammar)
        if params.num_beams == 1:  # which is no search, but could be one
            greedy = scheduler._plan.waiting.pop()
            table = BlockTable(scheduler.kv.pool) if scheduler.kv else greedy.parts[0].table
            scheduler._plan.waiting.append(BeamSearch.of(greedy.request, greedy.parts[0].tokens, table))
        while scheduler.has_work:
            for outcome in scheduler.step():
                assert outcome.request == number
                if isinstance(outcome, Failure):
                    raise outcome.error
                assert isinstance(outcome, Found)
                assert not scheduler.has_work
                return list(outcome.hypotheses)
    raise AssertionError("a search ends in what it found")
