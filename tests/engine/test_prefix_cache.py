"""The prefix cache: what is reused, what is evicted, and who may have it."""

from __future__ import annotations

import numpy as np
import pytest
from mock_backend import MockBackend, MockKV, alone
from searching import beam_search

from pronk.engine.kv_blocks import BlockTable
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.scheduler import Scheduler

VOCAB = 50


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def remember(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute a text and finish it; gives its blocks."""
    table = cache.match(tokens)
    count = len(tokens) - table.length
    assert cache.make_room(table.blocks_needed(count))
    table.append(count)
    blocks = list(table.blocks)
    cache.keep(tokens, table)
    table.free()
    return blocks


def generate(kv: PrefixCache, backend: MockBackend, prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens of one request; they must be those it gives alone."""
    tokens = []
    with Scheduler(backend, kv=kv) as scheduler:
        scheduler.add(prompt, params, 1)
        while scheduler.has_work:
            tokens += [event.token for event in scheduler.step() if event.sample == 0]
    assert tokens == alone(prompt, params, 1, vocab_size=VOCAB, ctx_size=backend.ctx_size)[0]
    return tokens


def test_a_conversation_computes_only_what_is_new() -> None:
    backend = MockBackend(VOCAB)
    kv = PrefixCache(backend, 4, 1000)
    params = SamplingParams(max_new_tokens=10)
    history = text(1, 21)
    for turn in range(4):
        backend.batches.clear()
        answer = generate(kv, backend, history, params)
        known = (len(history) - 7) // 4 * 4 if turn else 0  # all but the last answer's last token and the new question
        assert len(backend.batches[0].token_ids) == len(history) - known
        history += [*answer, *text(turn + 10, 6)]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    backend = MockBackend(VOCAB)
    kv = PrefixCache(backend, 4, 1000)
    for length, computed in ((16, 16), (16, 4), (17, 1), (18, 2), (13, 1), (12, 4), (3, 3)):
        backend.batches.clear()
        generate(kv, backend, text(1, 20)[:length], SamplingParams(max_new_tokens=1))
        assert [len(batch.token_ids) for batch in backend.batches] == [computed]


def test_requests_that_run_at_once_share_what_is_computed() -> None:
    backend = MockBackend(VOCAB)
    scheduler = Scheduler(backend, kv=PrefixCache(backend, 4, 1000))
    scheduler.add(text(1, 20), SamplingParams(max_new_tokens=50), 1)
    scheduler.step()
    scheduler.add([*text(1, 20), 1, 2], SamplingParams(max_new_tokens=5), 1)
    scheduler.step()
    assert [len(batch.token_ids) for batch in backend.batches] == [20, 3]
    assert scheduler.counters.cached_tokens == 20
    first, second = backend.batches[1].tables
    assert first[:5].tolist() == second[:5].tolist()


def test_beams_reuse_and_leave_their_prompt() -> None:
    backend = MockBackend(VOCAB)
    kv = PrefixCache(backend, 4, 1000)
    params = SamplingParams(num_beams=3, max_new_tokens=6)
    expected = beam_search(MockBackend(VOCAB), text(1, 18), params)
    for computed in (18, 2):
        backend.batches.clear()
        assert beam_search(backend, text(1, 18), params, kv=kv) == expected
        assert len(backend.batches[0].token_ids) == computed
    assert len(kv._kept) == kv.pool.num_blocks - kv.pool.num_free == 4


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    cache = PrefixCache(MockBackend(), 2, 100)
    remember(cache, [1, 2, 3, 4])
    assert cache.match([9, 9, 3, 4, 5]).length == 0
    assert cache.match([3, 4, 5]).length == 0
    assert cache.match([1, 2, 3, 4, 5]).length == 4


def test_tokens_are_compared_and_not_hashes() -> None:
    """-1 and -2 have one hash in CPython: no token ids, but two texts that only comparing tells apart."""
    assert hash((-1,)) == hash((-2,))
    cache = PrefixCache(MockBackend(), 1, 100)
    remember(cache, [-1])
    assert cache.match([-2, 0]).length == 0
    assert cache.match([-1, 0]).length == 1


def test_what_is_kept_for_one_is_not_found_for_another() -> None:
    cache = PrefixCache(MockBackend(), 2, 100)
    remember(cache, [1, 2, 3, 4])
    table = cache.match([], "me")
    assert cache.make_room(2)
    table.append(4)
    cache.keep([1, 2, 3, 4], table, "me")
    assert cache.match([1, 2, 3, 4, 5], "me").blocks == table.blocks
    assert cache.match([1, 2, 3, 4, 5]).length == 4  # its own
    assert not set(cache.match([1, 2, 3, 4, 5]).blocks) & set(table.blocks)
    # Neither a name that is like a serial number, nor one that has the hash of another.
    for other in ("you", 1, 2, ("me",), -2):
        assert cache.match([1, 2, 3, 4, 5], other).length == cache.match([3, 4, 5], other).length == 0


def test_the_least_recently_used_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    cache = PrefixCache(MockBackend(), 2, 12)  # 6 blocks
    remember(cache, [1, 1, 2, 2, 3, 3])
    remember(cache, [4, 4, 5, 5, 6, 6])
    cache.match([1, 1, 2, 2, 3, 3, 0]).free()
    remember(cache, [7, 7])
    assert cache.match([4, 4, 5, 5, 6, 6, 0]).length == 4
    assert cache.match([1, 1, 2, 2, 3, 3, 0]).length == 6
    assert cache.pool.num_blocks == 6


def test_what_a_table_names_is_not_evicted() -> None:
    cache = PrefixCache(MockBackend(), 2, 8)
    remember(cache, [1, 1, 2, 2])
    held = cache.match([1, 1, 2, 2, 0])
    assert cache.available(max_blocks=4) == 2
    assert not cache.make_room(3, max_blocks=4)
    assert cache.make_room(2, max_blocks=4)
    held.free()
    assert cache.available(max_blocks=4) == 4
    assert cache.make_room(4, max_blocks=4)
    assert cache.match([1, 1, 2, 2, 0]).length == 0


def test_it_grows_past_its_limit_only_when_nothing_can_be_evicted() -> None:
    cache = PrefixCache(MockBackend(), 2, 8)
    remember(cache, [1] * 8)
    assert cache.pool.num_blocks == 4
    remember(cache, [2] * 8)
    assert cache.pool.num_blocks == 4
    remember(cache, [3] * 10)
    assert cache.pool.num_blocks > 4
    assert cache.oversized


def test_a_block_known_after_an_evicted_one_is_found_again() -> None:
    """Two sequences computed the same beginning; the blocks of one are kept, and evicted while the other goes on."""
    cache = PrefixCache(MockBackend(), 1, 4)
    first, second = BlockTable(cache.pool), BlockTable(cache.pool)
    first.append(1)
    second.append(2)
    cache.keep([1, 2], first)
    cache.keep([1, 2], second)  # its second block comes after the first one's
    first.free()
    assert cache.make_room(2, max_blocks=4)
    assert cache.match([1, 2, 0]).length == 0
    cache.keep([1, 2], second)
    second.free()
    table = cache.match([1, 2, 0])
    assert table.length == 2
    table.free()
    assert len(cache._kept) == len(cache._keys) == cache.pool.num_blocks - cache.pool.num_free == 2


class Interrupted(MockKV):
    def resize(self, num_blocks: int) -> None:
        raise KeyboardInterrupt


class FailsToCompute(MockBackend):
    def forward(self, batch, kv):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("backend", "settled"), [(MockBackend(VOCAB, kv_type=Interrupted), False), (FailsToCompute(VOCAB), True)]
)
def test_a_scheduler_goes_on_after_a_pass_failed_but_not_after_bookkeeping_did(
    backend: MockBackend, settled: bool
) -> None:
    kv = PrefixCache(backend, 4, 1000)
    scheduler = Scheduler(backend, kv=kv)
    scheduler.add(text(1, 40), SamplingParams(), 1)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert scheduler.settled == settled


def test_room_is_made_by_doubling_up_to_the_limit() -> None:
    cache, sizes = PrefixCache(MockBackend(), 2, first_blocks=1), []
    table = BlockTable(cache.pool)
    while cache.make_room(table.blocks_needed(1), max_blocks=7):
        table.append(1)
        sizes.append(cache.storage.num_blocks)
        assert cache.storage.num_blocks == cache.pool.num_blocks
    assert sizes == [1] * 2 + [2] * 2 + [4] * 4 + [7] * 6
    assert not cache.make_room(1, max_blocks=7)
    assert cache.make_room(0, max_blocks=7)


def test_room_for_more_than_double_is_made_at_once() -> None:
    cache = PrefixCache(MockBackend(), 2, first_blocks=1)
    assert cache.make_room(5, max_blocks=100)
    assert (cache.pool.num_blocks, cache.storage.num_blocks) == (5, 5)
