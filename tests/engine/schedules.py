"""Random schedules: requests that come one by one, over a backend that is interrupted, and what must hold after."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mock_backend import MockBackend, habitual_logits

from pronk.engine.events import Event
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Scheduler

VOCAB, CTX = 12, 70
Wanted = list[tuple[list[int], SamplingParams, int]]
Found = dict[tuple[int, int], list[Event]]


class Interrupted(MockBackend):
    """Raises at some of its first passes, after it has written into the cache."""

    def __init__(self, every: int) -> None:
        super().__init__(VOCAB, CTX, logits=habitual_logits)
        self.every = every

    def forward(self, batch: Any, kv: Any) -> Any:
        logits = super().forward(batch, kv)
        if self.every and len(self.batches) < 40 and len(self.batches) % self.every == 0:
            raise KeyboardInterrupt
        return logits


def run(scheduler: Scheduler, late: Wanted) -> Found:
    events: Found = defaultdict(list)
    while scheduler.has_work or late:
        if late:
            scheduler.add(*late.pop(0), [3])
        try:
            for event in scheduler.step():
                events[event.request, event.sample].append(event)
        except KeyboardInterrupt:
            pass
    return events


def check_accounts(scheduler: Scheduler, backend: Interrupted, kv: PrefixCache, found: Found) -> None:
    held = sum(kv.pool.references(block) for block in range(kv.pool.num_blocks))
    assert held == len(kv._keys) == kv.pool.num_blocks - kv.pool.num_free, "what is taken is held by the cache alone"
    counters = scheduler.counters
    if not backend.every:
        computed = counters.prefill_tokens + counters.decode_tokens + counters.recomputed_tokens
        rejected = counters.drafted_tokens - counters.accepted_tokens
        assert computed + rejected == sum(len(batch.token_ids) for batch in backend.batches)
        assert counters.decode_tokens == sum(map(len, found.values())) - len(found)
        assert counters.steps == len(backend.batches)
