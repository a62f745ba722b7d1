"""The scheduler, against what each request gives alone (mock_backend.alone)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mock_backend import MockBackend, MockKV, alone

from pronk.engine.batch import Batch
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Event, Scheduler
from pronk.errors import BadRequest, ContextOverflow

VOCAB = 50
EOS = (7, 8)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0)


def run(scheduler: Scheduler, after_step: Callable[[], None] = lambda: None) -> dict[tuple[int, int], list[Event]]:
    """Everything that is queued, to its end: the events of each (request, sample)."""
    events: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for _ in range(100_000):
        if not scheduler.has_work:
            return events
        for event in scheduler.step():
            events[event.request, event.sample].append(event)
        after_step()
    raise AssertionError("the scheduler does not come to an end")


def check(events: list[Event], expected: tuple[list[int], str]) -> None:
    assert [event.token for event in events] == expected[0]
    assert [event.step for event in events] == list(range(len(events)))
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == expected[1]
    assert events[-1].is_stop_token == (expected[1] == "stop")


def all_free(scheduler: Scheduler) -> bool:
    return scheduler._kv is None or scheduler._kv.pool.num_free == scheduler._kv.pool.num_blocks


def random_workload(seed: int) -> tuple[dict[str, Any], list[tuple[list[int], SamplingParams, int]]]:
    rng = np.random.default_rng(seed)
    block_size = int(rng.integers(1, 6))
    limits = {
        "max_batch_tokens": int(rng.integers(4, 40)),
        "max_sequences": int(rng.integers(4, 12)),
        "block_size": block_size,
        "max_kv_tokens": int(rng.integers(65, 120)) if rng.random() < 0.7 else None,
    }
    requests = []
    for _ in range(int(rng.integers(1, 10))):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=(temperature := float(rng.choice([0.0, 0.7, 1.5]))),
            top_k=int(rng.choice([0, 5])) * (temperature > 0),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            rng=str(rng.choice(["philox", "xorshift", "numpy"])),  # type: ignore[arg-type]
            num_samples=int(rng.choice([1, 1, 2, 4])) if temperature else 1,
            stop_token_ids=(3,) if rng.random() < 0.2 else (),
            ignore_eos=bool(rng.random() < 0.6),
        )
        requests.append((prompt, params, int(rng.integers(1, 1000))))
    return limits, requests


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("seed", range(120))
def test_every_request_gets_the_tokens_it_would_get_alone(seed: int, cached: bool) -> None:
    limits, requests = random_workload(seed)
    backend = MockBackend(VOCAB, ctx_size=60)
    scheduler = Scheduler(backend, cached=cached, **limits)
    rng = np.random.default_rng([2, seed])
    late = [request for request in requests if rng.random() < 0.4]
    early = [request for request in requests if request not in late]
    queued = []

    def add_one() -> None:
        if late:
            prompt, params, draw_seed = late.pop()
            queued.append((scheduler.add(prompt, params, draw_seed, EOS), prompt, params, draw_seed))

    for prompt, params, draw_seed in early:
        queued.append((scheduler.add(prompt, params, draw_seed, EOS), prompt, params, draw_seed))
    if not early:
        add_one()
    events = run(scheduler, add_one)
    assert len(events) == sum(params.samples for _, _, params, _ in queued)
    for request, prompt, params, draw_seed in queued:
        for index in range(params.samples):
            expected = alone(prompt, params, draw_seed, index, vocab_size=VOCAB, ctx_size=60, eos_ids=EOS)
            check(events[request, index], expected)
    assert all_free(scheduler)
    assert not late
    if cached:
        assert max(len(batch.token_ids) for batch in backend.batches) <= limits["max_batch_tokens"]
        assert scheduler._kv.pool.num_blocks * limits["block_size"] <= (limits["max_kv_tokens"] or 10**9)
    assert max(len(batch.lengths) for batch in backend.batches) <= limits["max_sequences"]
    counters = scheduler.counters
    assert counters.steps == len(backend.batches)
    computed = counters.prefill_tokens + counters.decode_tokens + counters.recomputed_tokens
    assert computed == sum(len(batch.token_ids) for batch in backend.batches)
    assert counters.prefill_tokens == sum(len(prompt) for _, prompt, _, _ in queued)
    assert counters.decode_tokens == sum(len(sample) for sample in events.values()) - len(events)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("keep_tokens", [0, 60])
def test_samples_beyond_those_that_run_at_once_queue(cached: bool, keep_tokens: int) -> None:
    backend, prompt, count = MockBackend(VOCAB, ctx_size=60), [1, 2, 3, 4, 5, 6], 1000
    kv = PrefixCache(backend, 4, keep_tokens)
    scheduler = Scheduler(backend, cached=cached, max_sequences=16, kv=kv)
    params = SamplingParams(max_new_tokens=9, temperature=1.5, num_samples=count)
    request = scheduler.add(prompt, params, 7, EOS)
    neighbour = scheduler.add([5, 6], params.of(params, {"num_samples": 1}), 3, EOS)
    events = run(scheduler)
    for index in range(count):
        check(events[request, index], alone(prompt, params, 7, index, vocab_size=VOCAB, ctx_size=60, eos_ids=EOS))
    check(events[neighbour, 0], alone([5, 6], params, 3, 0, vocab_size=VOCAB, ctx_size=60, eos_ids=EOS))
    at_once = [len(batch.lengths) for batch in backend.batches]
    assert max(at_once) <= 16
    assert sum(at_once) / len(at_once) > 12  # places that are free do not wait for the last of a group
    if cached and keep_tokens:
        assert scheduler.counters.recomputed_tokens == 0
        assert scheduler.counters.prefill_tokens < len(prompt) * count / 2


def test_queued_samples_are_cancelled_with_the_others() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, ctx_size=60), max_sequences=4, block_size=4)
    request = scheduler.add([1, 2], SamplingParams(max_new_tokens=9, temperature=1.5, num_samples=30), 7)
    scheduler.step()
    scheduler.cancel(request, 29)
    scheduler.step()
    scheduler.cancel(request)
    assert not scheduler.has_work
    assert all_free(scheduler)


def test_the_workloads_do_preempt() -> None:
    """The test above proves little about preemption unless it happens."""
    preemptions = 0
    for seed in range(30):
        limits, requests = random_workload(seed)
        scheduler = Scheduler(MockBackend(VOCAB, 60), **limits)
        for request in requests:
            scheduler.add(*request, EOS)
        run(scheduler)
        preemptions += scheduler.counters.preemptions
    assert preemptions > 20


class ForgetsCopies(MockKV):
    def copy(self, pairs: Any) -> None:
        pass


class CopiesWrongly(MockKV):
    def copy(self, pairs: Any) -> None:
        super().copy([(destination, source) for source, destination in pairs])


@pytest.mark.parametrize("kv_type", [ForgetsCopies, CopiesWrongly])
def test_a_storage_that_does_not_copy_is_found_out(kv_type: type[MockKV]) -> None:
    """The inverse: the mock does see a broken copy on write."""
    scheduler = Scheduler(MockBackend(VOCAB, 100, kv_type), block_size=4)
    params = SamplingParams(max_new_tokens=8, temperature=2.0, n=3)
    scheduler.add([1, 2, 3, 4, 5, 6], params, 1)
    expected = [alone([1, 2, 3, 4, 5, 6], params, 1, i, vocab_size=VOCAB, ctx_size=100)[0] for i in range(3)]
    try:
        events = run(scheduler)
    except AssertionError:
        return
    assert [[event.token for event in events[0, i]] for i in range(3)] != expected


def test_samples_share_the_prompt() -> None:
    backend = MockBackend(VOCAB)
    scheduler = Scheduler(backend, block_size=4)
    scheduler.add(list(range(21)), SamplingParams(max_new_tokens=2, temperature=1.0, n=4), 1)
    scheduler.step()
    assert scheduler._kv.pool.num_blocks - scheduler._kv.pool.num_free == 6
    events = scheduler.step()
    # Five full blocks in common, and a sixth of each's own, of which three are copies.
    assert [len(batch.token_ids) for batch in backend.batches] == [21, 4]
    assert len({tuple(blocks[:5]) for blocks in backend.batches[1].tables}) == 1
    assert len({blocks[5] for blocks in backend.batches[1].tables}) == 4
    assert [event.finish_reason for event in events] == ["length"] * 4
    assert scheduler.counters.cached_tokens == 3 * 21


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    scheduler = Scheduler(MockBackend(VOCAB), max_batch_tokens=8)
    params = SamplingParams(max_new_tokens=30)
    first = scheduler.add([1, 2], params, 0)
    scheduler.step()
    second = scheduler.add([3] * 70, params, 0)
    for _ in range(10):
        events = scheduler.step()
        assert events[0].request == first
    assert [event.request for event in events] == [first, second]  # 70 tokens, 7 a step


def test_a_lone_sequence_is_contiguous() -> None:
    backend = MockBackend(VOCAB)
    scheduler = Scheduler(backend, block_size=4)
    for _ in range(2):
        scheduler.add([1] * 30, SamplingParams(max_new_tokens=50), 0)
        run(scheduler)
    assert all((blocks == np.arange(len(blocks))).all() for batch in backend.batches for blocks in batch.tables)


def test_the_context_ends_a_sequence() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, ctx_size=10))
    scheduler.add([1] * 9, SAMPLED, 0)
    scheduler.add([1] * 4, SAMPLED, 0)
    events = run(scheduler)
    assert [len(events[0, 0]), len(events[1, 0])] == [1, 6]
    assert [events[i, 0][-1].finish_reason for i in range(2)] == ["length"] * 2


def test_the_size_of_the_cache_ends_a_sequence() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, ctx_size=100), block_size=4, max_kv_tokens=15)
    scheduler.add([1] * 9, SAMPLED, 0)
    with pytest.raises(ContextOverflow) as caught:
        scheduler.add([1] * 12, SAMPLED, 0)
    assert (caught.value.prompt_tokens, caught.value.limit) == (12, 11)
    assert len(run(scheduler)[0, 0]) == 3


def test_what_cannot_be_done_is_refused_when_it_is_added() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, ctx_size=10), max_sequences=3)
    with pytest.raises(ContextOverflow) as caught:
        scheduler.add([1] * 10, SAMPLED, 0)
    assert (caught.value.prompt_tokens, caught.value.limit) == (10, 9)
    with pytest.raises(BadRequest, match="no tokens"):
        scheduler.add([], SAMPLED, 0)
    with pytest.raises(BadRequest, match="token 50"):
        scheduler.add([50], SAMPLED, 0)
    with pytest.raises(BadRequest, match="num_beams"):
        scheduler.add([1], SamplingParams(num_beams=513), 0)
    with pytest.raises(BadRequest, match="seed"):
        scheduler.add([1], SamplingParams(rng="xorshift"), 0)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "limits", [{"max_batch_tokens": 0}, {"max_sequences": 0}, {"block_size": 0}, {"max_kv_tokens": 63}]
)
def test_limits_of_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match=next(iter(limits))):
        Scheduler(MockBackend(), **limits)


def test_eos_stop_ids_and_ignore_eos() -> None:
    backend = MockBackend(VOCAB)
    free = alone([1, 2], SamplingParams(max_new_tokens=30), vocab_size=VOCAB, ctx_size=1000)[0]
    eos, stop = free[5], free[8]
    assert eos not in free[:5]
    assert stop not in free[:8]
    for fields, length, reason in (
        ({}, 6, "stop"),
        ({"ignore_eos": True}, 30, "length"),
        ({"ignore_eos": True, "stop_token_ids": (stop,)}, 9, "stop"),
        ({"max_new_tokens": 6}, 6, "stop"),  # the token that ends it for both reasons
        ({"max_new_tokens": 5}, 5, "length"),
    ):
        scheduler = Scheduler(backend)
        scheduler.add([1, 2], SamplingParams(**{"max_new_tokens": 30, **fields}), 0, [eos])
        check(run(scheduler)[0, 0], (free[:length], reason))


def test_cancel_drops_a_request_or_one_of_its_samples() -> None:
    scheduler = Scheduler(MockBackend(VOCAB), block_size=2)
    params = SamplingParams(max_new_tokens=20, temperature=1.0, n=3)
    for _ in range(3):
        scheduler.add([1, 2, 3], params, 5)
    scheduler.cancel(0, 1)  # before it is born
    scheduler.cancel(2)  # before it is begun
    scheduler.step()
    scheduler.step()
    scheduler.cancel(1, 0)
    scheduler.cancel(1, 0)
    scheduler.cancel(99)
    events = run(scheduler)
    assert set(events) == {(0, 0), (0, 2), (1, 1), (1, 2)}
    for (_, index), found in events.items():
        assert [e.token for e in found] == alone([1, 2, 3], params, 5, index, vocab_size=VOCAB, ctx_size=1000)[0][2:]
    assert all_free(scheduler)


class Interrupted(MockBackend):
    """Raises at some calls, after it has written into the cache."""

    def __init__(self, seed: int, error: type[BaseException]) -> None:
        super().__init__(VOCAB, 100)
        self.rng, self.error = np.random.default_rng(seed), error

    def forward(self, batch: Batch, kv: Any) -> Any:
        logits = super().forward(batch, kv)
        if self.rng.random() < 0.3:
            raise self.error
        return logits


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("seed", range(10))
def test_an_interrupted_step_costs_no_token(seed: int, error: type[BaseException]) -> None:
    scheduler = Scheduler(Interrupted(seed, error), block_size=3, max_kv_tokens=90, max_batch_tokens=16)
    params = SamplingParams(max_new_tokens=10, temperature=1.0, n=2)
    prompts = [[i] * (5 * i + 1) for i in range(4)]
    for prompt in prompts:
        scheduler.add(prompt, params, 3)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    interruptions = 0
    while scheduler.has_work:
        try:
            for event in scheduler.step():
                found[event.request, event.sample].append(event.token)
        except error:
            interruptions += 1
    assert interruptions
    for i, prompt in enumerate(prompts):
        for index in range(2):
            assert found[i, index] == alone(prompt, params, 3, index, vocab_size=VOCAB, ctx_size=100)[0]
    assert all_free(scheduler)


def test_close_frees_every_block_and_ends_the_scheduler() -> None:
    with Scheduler(MockBackend(VOCAB), block_size=2, max_sequences=4) as scheduler:
        for _ in range(3):
            scheduler.add([1] * 9, SamplingParams(n=2, temperature=1.0), 0)
        scheduler.step()
        scheduler.step()
        assert not all_free(scheduler)
    assert all_free(scheduler)
    assert not scheduler.has_work
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.add([1], SAMPLED, 0)


def test_the_cache_does_not_grow_beyond_its_need() -> None:
    backend = MockBackend(VOCAB, ctx_size=8192)
    scheduler = Scheduler(backend, block_size=4)
    scheduler.add([1] * 100, SamplingParams(max_new_tokens=20), 0)
    run(scheduler)
    assert scheduler._kv.pool.num_blocks <= 2 * 30


def test_logprobs_come_with_every_token() -> None:
    scheduler = Scheduler(MockBackend(VOCAB))
    scheduler.add([1, 2], SamplingParams(max_new_tokens=3, logprobs=2), 0)
    for event in run(scheduler)[0, 0]:
        assert event.top[0] == (event.token, event.logprob)
        assert len(event.top) == 2
