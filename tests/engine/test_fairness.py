"""Who waits for whom: prompts beside longer ones, alike ones, those that do not fit; and how long a pass takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mock_backend import MockBackend, prefix_logits
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

import pronk.session.session
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.events import Event
from pronk.engine.pace import Pace
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sampling import NotNumbers
from pronk.engine.scheduler import Scheduler
from pronk.session import Session

VOCAB, CTX, LONG = 40, 10_000, 8000


def plain(tokens: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
    """Quick however long the text is."""
    return prefix_logits(tokens[-3:], vocab_size)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def made(keep: int = CTX, block_size: int = 64, **limits: Any) -> tuple[Scheduler, MockBackend]:
    backend = MockBackend(VOCAB, CTX, logits=plain)
    return Scheduler(backend, kv=PrefixCache(backend, block_size, keep), **limits), backend


def first_tokens(scheduler: Scheduler, late: Iterator[tuple[list[int], int] | None], passes: int) -> dict[int, int]:
    """By request, in which pass after it came it had its first token. `late`: what comes before each pass."""
    came: dict[int, int] = {}
    waited: dict[int, int] = {}
    for number in range(passes):
        if wanted := next(late, None):
            prompt, count = wanted
            came[scheduler.add(prompt, SamplingParams(max_new_tokens=count), 1)] = number
        for event in scheduler.step():
            assert isinstance(event, Event)
            waited.setdefault(event.request, number - came[event.request] + 1)
        if wanted is None and not scheduler.has_work:
            break
    return waited


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_of_16_tokens_beside_one_of_8000_waits_for_three_passes_at_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler, _ = made()
    lengths = [LONG, *(int(rng.choice([16, 16, 16, 300, 2000])) for _ in range(20))]
    came = [(text(seed * 100 + n, length), 5) for n, length in enumerate(lengths)]
    waited = first_tokens(scheduler, iter(came), 200)
    short = [waited[n] for n, length in enumerate(lengths) if length == 16]
    assert len(short) > 5
    assert max(short) <= 3
    assert max(waited[n] for n, length in enumerate(lengths) if length == 300) <= 6
    assert waited[0] <= 2 * -(-LONG // 512) + 1, "half of each pass was its own"


def test_whoever_came_is_the_oldest_once_though_shorter_ones_come_without_end() -> None:
    scheduler, _ = made(keep=0)
    waves = ((text(1000 + n, 250), 1) for n in itertools.count())
    long = [(text(1, LONG), 1), (text(2, 3000), 1), (text(3, 2000), 1)]
    waited = first_tokens(scheduler, itertools.chain(long, waves), 120)
    assert waited[0] <= 2 * -(-LONG // 512)
    assert waited[1] <= 2 * -(-(LONG + 3000) // 512)
    assert waited[2] <= 2 * -(-(LONG + 5000) // 512)


@pytest.mark.parametrize("keep", [CTX, 0])
def test_prompts_that_begin_alike_and_come_at_once_are_read_once(keep: int) -> None:
    scheduler, backend = made(keep)
    beginning, count = text(1, 1000), 8
    prompts = [beginning + text(n, 30) for n in range(2, 2 + count)]
    params = SamplingParams(max_new_tokens=3)
    ids = [scheduler.add(prompt, params, 1) for prompt in prompts]
    found: dict[int, list[int]] = {number: [] for number in ids}
    while scheduler.has_work:
        for event in scheduler.step():
            assert isinstance(event, Event)
            found[event.request].append(event.token)
    read = sum(len(batch.token_ids) for batch in backend.batches)
    once = 1000 + count * (30 + 64 + 3)
    assert (read <= once) == bool(keep)
    assert keep or read >= count * 1000, "the inverse: where nothing is remembered, each is read"
    assert scheduler.counters.cached_tokens == (count - 1) * 960 * bool(keep)
    # All in step, none behind the others: what another one reads is waited for, and no longer.
    assert len(backend.batches) <= -(-(once if keep else count * 1030) // 512) + 5
    quick = MockBackend(VOCAB, CTX, logits=plain)
    for number, prompt in zip(ids, prompts, strict=True):
        alone_ = Scheduler(quick)
        alone_.add(prompt, params, 1)
        tokens: list[int] = []
        while alone_.has_work:
            tokens += [event.token for event in alone_.step() if isinstance(event, Event)]
        assert found[number] == tokens


def test_what_is_read_of_a_prompt_that_then_fails_is_not_reused() -> None:
    def broken(tokens: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
        return prefix_logits(tokens[-3:], vocab_size) * np.float32(np.nan)

    backend = MockBackend(VOCAB, CTX, logits=broken)
    scheduler = Scheduler(backend, kv=PrefixCache(backend, 64, CTX), max_batch_tokens=100)
    scheduler.add(text(1, 300), SamplingParams(), 1)
    scheduler.step()
    assert scheduler.kv
    assert scheduler.kv.match(text(1, 300), (0, None)).length == 64
    while scheduler.has_work:
        outcomes = scheduler.step()
    assert [type(outcome.error) for outcome in outcomes] == [NotNumbers]  # type: ignore[union-attr]
    assert scheduler.kv.match(text(1, 300), (0, None)).length == 0


def test_who_does_not_fit_holds_nobody_back_and_is_not_held_back_for_ever() -> None:
    """Of 100 blocks 60 are taken, 70 are wanted next, and then come many who take 3 each."""
    scheduler, _ = made(keep=0, block_size=16, max_kv_tokens=1600, max_sequences=8)
    came = [(text(1, 900), 60), (text(2, 1100), 5)]
    small = ((text(1000 + n, 16), 20) for n in itertools.count())
    waited = first_tokens(scheduler, itertools.chain(came, small), 300)
    assert 2 in waited
    assert waited[2] <= 3, "it fits, and goes before one who does not"
    assert 1 in waited, "it is admitted though there is always one that would fit before it"
    # As many as may run at once go before it, then none; and those end.
    assert waited[1] <= 60 + 8 * 20
    before = sum(1 for n, passes in waited.items() if n > 1 and n - 1 + passes < 1 + waited[1])
    assert before >= 3


def test_nobody_passes_one_who_was_passed_often_enough() -> None:
    scheduler, _ = made(keep=0, block_size=16, max_kv_tokens=1600, max_sequences=4)
    scheduler.add(text(1, 900), SamplingParams(max_new_tokens=500), 1)
    scheduler.step()
    head = scheduler.add(text(2, 1100), SamplingParams(max_new_tokens=1), 1)
    for n in range(20):
        scheduler.add(text(10 + n, 8), SamplingParams(max_new_tokens=1), 1)
    for _ in range(20):
        scheduler.step()
    waiting = scheduler._plan.waiting
    assert waiting[0].request.id == head
    assert waiting[0].passed == 4
    assert len(waiting) == 1 + 20 - 4


# -- how long a pass takes --


def test_the_pace_is_that_of_the_last_passes_and_one_that_stood_still_does_not_count() -> None:
    pace = Pace(0.5)
    first = pace.tokens
    pace.observe(8, 1.0)  # reading the weights: says nothing of more tokens
    assert pace.tokens == first
    for seconds in (0.2, 0.2, 9.0, 0.2, 0.2):
        pace.observe(100, seconds)
    assert pace.tokens == 250
    for _ in range(3):
        pace.observe(100, 100.0)
    assert pace.tokens == 32
    pace.observe(100, 0.0)


def test_passes_are_bounded_while_texts_go_on_and_else_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "tokens", 40)
    backend = MockBackend(VOCAB, CTX, logits=plain)
    session = Session(backend, prefix_cache=0)

    def passes(*wanted: tuple[list[int], int]) -> list[int]:
        backend.batches.clear()
        for prompt, count in wanted:
            session.submit(prompt, SamplingParams(max_new_tokens=count))
        while session.has_work:
            session.step()
        return [len(batch.token_ids) for batch in backend.batches]

    assert max(passes((text(1, 1000), 1))) == 512, "nobody waits"
    beside = passes((text(1, 5), 100), (text(2, 1000), 1))
    assert beside[0] == 512, "nobody waits yet"
    assert set(beside[1:12]) == {40}
    # Who wants whole texts wants them soon: there nothing is bounded.
    backend.batches.clear()
    list(session.stream([text(1, 5), text(2, 1000)], SamplingParams(max_new_tokens=100), whole=True))
    assert [len(batch.token_ids) for batch in backend.batches[:2]] == [512, 494]
    backend.batch_invariant = False  # bits would depend on the clock
    assert max(passes((text(1, 5), 100), (text(2, 1000), 1))[1:]) > 40


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_equal_to_the_bit_whatever_the_pace(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(max_position_embeddings=512)
    backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1)
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 90, 130).tolist()
    wanted = []
    for n in range(9):
        prompt = shared[: int(rng.integers(0, 131))] + rng.integers(0, 90, int(rng.integers(1, 200))).tolist()
        wanted.append((prompt, SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=n, logprobs=2)))

    def texts(keep: int, pace: Any, together: bool) -> list[Any]:
        monkeypatch.setattr(pronk.session.session, "Pace", pace)
        session = Session(backend, prefix_cache=keep, max_batch_tokens=512)
        found: dict[Any, list[Any]] = {}
        order = []
        for prompt, params in wanted:
            order.append(session.submit(prompt, params))
            while session.has_work if not together else len(order) % 3 == 0:
                for handle, chunk in session.step():
                    found.setdefault(handle, []).append((chunk.token, chunk.logprob, chunk.top))
                if together:
                    break
        while session.has_work:
            for handle, chunk in session.step():
                found.setdefault(handle, []).append((chunk.token, chunk.logprob, chunk.top))
        return [found[handle] for handle in order]

    class Random:
        def __init__(self, seconds: float) -> None:
            self.rng = np.random.default_rng(seed)

        def observe(self, tokens: int, seconds: float) -> None: ...

        @property
        def tokens(self) -> int:
            return int(self.rng.integers(1, 300))

    expected = texts(0, Pace, False)
    assert texts(512, Random, True) == expected
    assert texts(0, Random, True) == expected
