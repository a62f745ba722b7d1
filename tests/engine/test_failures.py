"""One sequence that cannot go on ends alone, and a storage that cannot grow makes others wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mock_backend import MockBackend, MockKV, alone, habitual_logits, prefix_logits
from numpy.typing import NDArray
from searching import beam_search
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.events import Event, Failure
from pronk.engine.kv_blocks import BlockPool
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sampling import NotNumbers
from pronk.engine.scheduler import Scheduler
from pronk.errors import NotEnoughMemory
from pronk.torch_engine.backend import TorchBackend

VOCAB, CTX = 20, 60
POISON = 13
Wanted = list[tuple[list[int], SamplingParams, int]]


def spoilt(
    logits: Callable[[tuple[int, ...], int], NDArray[np.float32]],
) -> Callable[[tuple[int, ...], int], NDArray[np.float32]]:
    """Those of a model that breaks over a text which had the token POISON four tokens ago."""
    return lambda tokens, vocab: logits(tokens, vocab) * np.float32(np.nan if POISON in tokens[:-4] else 1)


def workload(seed: int) -> Wanted:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(int(rng.integers(2, 9))):
        greedy = rng.random() < 0.5
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, 30)),
            temperature=0.0 if greedy else 1.0,
            n=1 if greedy else int(rng.choice([1, 3])),
            speculative="ngram" if rng.random() < 0.5 else None,
        )
        made.append((rng.integers(0, VOCAB, int(rng.integers(1, 25))).tolist(), params, int(rng.integers(1, 99))))
    return made


def run(scheduler: Scheduler) -> tuple[dict[tuple[int, int], list[Event]], dict[tuple[int, int], Failure]]:
    events: dict[tuple[int, int], list[Event]] = defaultdict(list)
    failures: dict[tuple[int, int], Failure] = {}
    for _ in range(10_000):
        if not scheduler.has_work:
            return events, failures
        for one in scheduler.step():
            key = one.request, one.sample
            assert key not in failures, "nothing comes after a failure"
            if isinstance(one, Failure):
                failures[key] = one
            else:
                events[key].append(one)
    raise AssertionError("the scheduler does not come to an end")


def expected(prompt: Sequence[int], params: SamplingParams, seed: int, index: int) -> tuple[list[int], bool]:
    """The tokens before the model breaks, and whether it does; by the oracle, which knows no scheduler."""
    tokens: list[int] = []
    for count in range(params.max_new_tokens):
        if POISON in [*prompt, *tokens][:-4]:
            return tokens, True
        if len(prompt) + count == CTX:
            break
        more = SamplingParams(max_new_tokens=count + 1, temperature=params.temperature)
        tokens = alone(prompt, more, seed, index, vocab_size=VOCAB, ctx_size=CTX)[0]
    return tokens, False


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_a_sequence_whose_logits_are_not_numbers_fails_alone(seed: int, cached: bool) -> None:
    """Every further step raised, for everybody."""
    backend = MockBackend(VOCAB, CTX, logits=spoilt(prefix_logits))
    kv = PrefixCache(backend, 4, 200) if cached else None
    scheduler = Scheduler(backend, cached=cached, kv=kv, max_kv_tokens=160 if cached else None, max_batch_tokens=24)
    requests = workload(seed)
    if not cached:
        requests = [(prompt, SamplingParams(max_new_tokens=5), draw) for prompt, _, draw in requests]
    ids = [scheduler.add(*request) for request in requests]
    events, failures = run(scheduler)
    for request, (prompt, params, draw) in zip(ids, requests, strict=True):
        for index in range(params.samples):
            tokens, fails = expected(prompt, params, draw, index)
            assert [event.token for event in events[request, index]] == tokens
            assert ((request, index) in failures) == fails
    assert all(isinstance(failure.error, NotNumbers) for failure in failures.values())
    if kv:
        assert kv.pool.num_blocks - kv.pool.num_free == kv.pool.num_idle == len(kv._kept)


def test_the_workloads_do_fail() -> None:
    found = [expected(*request, 0)[1] for seed in range(25) for request in workload(seed)]
    assert 20 < sum(found) < len(found) - 20


def test_a_draft_over_which_the_model_breaks_keeps_what_came_before_it() -> None:
    def logits(tokens: tuple[int, ...], vocab: int) -> NDArray[np.float32]:
        return habitual_logits(tokens, vocab) * np.float32(np.nan if len(tokens) >= 40 else 1)

    found = []
    for speculative in ("ngram", None):
        backend = MockBackend(VOCAB, CTX, logits=logits)
        scheduler = Scheduler(backend, block_size=4)
        scheduler.add([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_new_tokens=50, speculative=speculative), 0)
        events, failures = run(scheduler)
        assert list(failures) == [(0, 0)]
        found.append(([event.token for event in events[0, 0]], len(backend.batches)))
    (drafted, fewer_passes), (plain, passes) = found
    assert drafted == plain
    assert len(plain) == 32
    assert fewer_passes < passes


class Narrow(MockKV):
    """Memory for so many blocks."""

    limit = 12

    def resize(self, num_blocks: int) -> None:
        if num_blocks > self.limit:
            raise NotEnoughMemory(f"{num_blocks} blocks need more memory than there is", "shorten the text")
        super().resize(num_blocks)


class Bursting(Narrow):
    """Memory that was there when it was asked for, and is not when it is taken."""

    def resize(self, num_blocks: int) -> None:
        if num_blocks > self.limit:
            raise MemoryError
        super().resize(num_blocks)


class Budgeted(Narrow):
    """Knows at first how much there will be."""

    def reserve(self, num_blocks: int) -> int:
        return min(num_blocks, self.limit)


@pytest.mark.parametrize("kept", [0, 200])
@pytest.mark.parametrize("storage", [Narrow, Bursting, Budgeted])
@pytest.mark.parametrize("seed", range(25))
def test_a_refused_growth_makes_others_wait(seed: int, storage: type[Narrow], kept: int) -> None:
    """It raised out of the step, and everybody's blocks were thrown away."""
    backend = MockBackend(VOCAB, CTX, storage)
    kv = PrefixCache(backend, 4, kept, first_blocks=2)
    scheduler = Scheduler(backend, kv=kv, max_batch_tokens=24)
    requests = workload(seed)
    ids = [scheduler.add(*request) for request in requests]
    events, failures = run(scheduler)
    assert kv.storage.num_blocks <= Narrow.limit
    for request, (prompt, params, draw) in zip(ids, requests, strict=True):
        for index in range(params.samples):
            tokens = alone(prompt, params, draw, index, vocab_size=VOCAB, ctx_size=CTX)[0]
            found = [event.token for event in events[request, index]]
            if (request, index) in failures:  # it alone is more than there is memory for
                assert isinstance(failures[request, index].error, NotEnoughMemory)
                assert len(prompt) + len(found) >= (Narrow.limit - 1) * 4
                tokens = tokens[: len(found)]
            assert found == tokens
    assert kv.pool.num_blocks - kv.pool.num_free == kv.pool.num_idle == len(kv._kept)


def test_growth_was_refused_in_these_workloads_and_a_budget_admits_fewer_who_must_give_way() -> None:
    preemptions = dict.fromkeys((Narrow, Bursting, Budgeted), 0)
    for storage in preemptions:
        for seed in range(25):
            backend = MockBackend(VOCAB, CTX, storage)
            scheduler = Scheduler(backend, kv=PrefixCache(backend, 4, 0, first_blocks=2), max_batch_tokens=24)
            for request in workload(seed):
                scheduler.add(*request)
            run(scheduler)
            preemptions[storage] += scheduler.counters.preemptions
    assert preemptions[Narrow] == preemptions[Bursting] > 20
    assert 0 < preemptions[Budgeted] < preemptions[Narrow]


def test_a_budget_is_that_of_the_first_who_asks() -> None:
    cache = PrefixCache(MockBackend(VOCAB, CTX, Budgeted), 4, first_blocks=2)
    assert cache.available(100) == 100
    for _ in range(2):
        cache.reserve(100)
        assert cache.available(100) == 12
        assert cache.available(7) == 7
    assert cache.make_room(9, 100)
    assert cache.pool.num_blocks == 9, "as large as is needed, if not twice as large"
    with pytest.raises(NotEnoughMemory):
        cache.make_room(13, 100)


def test_one_text_too_long_for_memory_fails_and_the_next_is_run() -> None:
    backend = MockBackend(VOCAB, CTX, Narrow)
    scheduler = Scheduler(backend, block_size=4)
    scheduler.add([1] * 40, SamplingParams(max_new_tokens=15), 0)  # 55 tokens, of which 48 have room
    scheduler.add([2] * 10, SamplingParams(max_new_tokens=15), 0)
    events, failures = run(scheduler)
    assert list(failures) == [(0, 0)]
    assert "need more memory than there is" in str(failures[0, 0].error)
    assert len(events[0, 0]) == 9  # the last of them needs no room of its own
    params = SamplingParams(max_new_tokens=15)
    assert [event.token for event in events[1, 0]] == alone([2] * 10, params, vocab_size=VOCAB, ctx_size=CTX)[0]


def test_a_refused_growth_takes_what_is_needed_then_forgets_texts_then_raises() -> None:
    backend = MockBackend(VOCAB, CTX, Narrow)
    cache = PrefixCache(backend, 4, 1000, first_blocks=8)
    table = cache.match([])
    table.append(32)
    assert cache.make_room(2)  # 16 are refused
    assert cache.pool.num_blocks == 10
    table.append(8)
    cache.keep([1] * 40, table)
    table.free()
    assert cache.available(100) == 100
    assert cache.make_room(11)  # of which 10 were remembered
    with pytest.raises(NotEnoughMemory):
        cache.make_room(13)
    assert cache.available(100) == 11, "where growth was refused only what is there can be given"


def test_a_beam_search_says_that_memory_is_short() -> None:
    params = SamplingParams(num_beams=4, max_new_tokens=15)
    backend = MockBackend(VOCAB, CTX, Narrow)
    with pytest.raises(NotEnoughMemory, match="more memory"):
        beam_search(backend, [1] * 45, params, kv=PrefixCache(backend, 4))


def test_how_many_blocks_are_available_is_known_without_looking_through_them() -> None:
    """It took 25 ms at 5,580 blocks, at each admission."""

    class NotLookedThrough(dict):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("looks through all blocks")

        items = keys = values = __iter__  # type: ignore[assignment]

    cache = PrefixCache(MockBackend(VOCAB), 1, 1000)
    for text in range(5):
        table = cache.match([])
        cache.make_room(9)
        table.append(9)
        cache.keep([text] * 9, table)
        if text > 1:
            table.free()
    cache._kept, cache._keys = NotLookedThrough(cache._kept), NotLookedThrough(cache._keys)  # type: ignore[assignment]
    assert cache.available(100) == 100 - 18
    assert cache.pool.num_idle == 27
    free = cache.pool.num_free
    assert cache.make_room(free + 10, cache.pool.num_blocks), "nor are those that are forgotten looked for"
    assert cache.pool.num_idle == 17
    assert cache.match([2] * 9).length == 0, "of the text that was not named for the longest time nothing is left"
    assert cache.match([3] * 10).length == 8, "and of the next the end is gone"
    assert cache.match([4] * 10).length == 9


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_gives_the_lowest_free_block_and_knows_the_longest_idle_one(seed: int) -> None:
    """Beside plain lists, which are looked through."""
    rng = np.random.default_rng(seed)
    pool = BlockPool(5, 4)
    held: list[int] = []  # a reference each
    pinned: list[int] = []
    idle: list[int] = []  # in the order in which they became so
    for _ in range(400):
        what = rng.integers(6)
        free = [block for block in range(pool.num_blocks) if block not in held + pinned]
        if what == 0 and free:
            held.append(pool.allocate())
            assert held[-1] == free[0]
        elif what == 1 and held:
            after = held[rng.integers(len(held))]
            if free:
                held.append(pool.allocate(after))
                assert held[-1] == (after + 1 if after + 1 in free else free[0])
        elif what == 2 and held:
            block = held.pop(rng.integers(len(held)))
            pool.release(block)
            if block in pinned and block not in held:
                idle.append(block)
        elif what == 3 and held + pinned:
            block = (held + pinned)[rng.integers(len(held + pinned))]
            pool.share(block)
            held.append(block)
            idle = [other for other in idle if other != block]
        elif what == 4 and set(held) - set(pinned):
            block = sorted(set(held) - set(pinned))[0]
            pool.pin(block)
            pinned.append(block)
        elif what == 5 and idle:
            assert pool.longest_idle() == idle[0]
            block = idle.pop(0) if rng.integers(2) else idle.pop()
            if rng.integers(2):
                pool.unpin(block)
                pinned.remove(block)
            else:
                pool.refresh(block)
                idle.append(block)
        elif rng.integers(10) == 0:
            pool.grow(int(rng.integers(1, 4)))
        assert pool.num_idle == len(idle)
        assert pool.num_free == pool.num_blocks - len(set(held) | set(pinned))


@pytest.mark.parametrize("seed", range(20))
def test_idle_blocks_are_those_that_the_cache_alone_names(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = PrefixCache(MockBackend(VOCAB), 2, 40, first_blocks=4)
    tables: list[tuple[list[int], Any]] = []
    for _ in range(200):
        what = rng.integers(4)
        if what == 0 or not tables:
            tokens = rng.integers(0, 2, int(rng.integers(2, 14))).tolist()
            table = cache.match(tokens)
            if cache.make_room(table.blocks_needed(len(tokens) - table.length), 30):
                table.append(len(tokens) - table.length)
                tables.append((tokens, table))
            else:
                table.free()
        elif what == 1:
            cache.keep(*tables[rng.integers(len(tables))])
        elif what == 2:
            tokens, table = tables[rng.integers(len(tables))]
            tables.append((tokens, table.fork()))
        else:
            tables.pop(rng.integers(len(tables)))[1].free()
        idle = [kept.block for kept in cache._kept.values() if cache.pool.references(kept.block) == 1]
        assert cache.pool.num_idle == len(idle)
        assert all(map(cache.pool.is_idle, idle))


@pytest.mark.parametrize("engine", [CpuBackend, TorchBackend])
def test_keys_and_values_that_are_not_numbers_stay_with_their_text(engine: Any) -> None:
    """Blocks that they were written into go to other texts, which must not read them beyond their own ends."""
    config = tiny_config()
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][POISON, 0] = 1
    weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = 3e38  # values overflow, of this token alone
    backend = engine.from_checkpoint(in_memory(config, weights))
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    rng = np.random.default_rng(1)
    good = [[int(t) for t in rng.integers(14, 90, n)] for n in (3, 30, 70)]
    bad = [[int(t) for t in rng.integers(14, 90, n)] + [POISON] for n in (100, 20)]
    alone_ = []
    for prompt in good:
        scheduler = Scheduler(backend)
        scheduler.add(prompt, params, 0)
        alone_.append([event.token for event in run(scheduler)[0][0, 0]])
    for kept in (0, 256):
        kv = PrefixCache(backend, keep_tokens=kept)
        for _ in range(2):  # the second time in blocks that the first has left
            with Scheduler(backend, kv=kv) as scheduler:
                for prompt in (bad[0], *good, bad[1]):
                    scheduler.add(prompt, params, 0)
                events, failures = run(scheduler)
            assert set(failures) == {(0, 0), (4, 0)}
            assert [[event.token for event in events[n, 0]] for n in (1, 2, 3)] == alone_
