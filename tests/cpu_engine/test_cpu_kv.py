"""Blocks of keys and values: their size, how they grow, and memory that the system says is free and then refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk import system
from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.kv import CpuKV
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import NotEnoughMemory, PronkError
from pronk.session import Session


def test_blocks_are_as_large_as_the_kernels_have_them() -> None:
    config = tiny_config(head_dim=64)  # a whole panel of values, which others are filled up to
    backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), kv_dtype="f32", threads=1)
    a_token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert backend.new_kv(1, BLOCK_SIZE).storage.block_bytes == BLOCK_SIZE * a_token


def test_a_cache_that_the_system_refuses_is_a_clean_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    backend = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1)
    monkeypatch.setattr(system, "free_memory", lambda: None)
    kv = backend.new_kv(1, BLOCK_SIZE)
    huge = (1 << 31) - 1
    for ask in (lambda: backend.new_kv(huge, BLOCK_SIZE), lambda: kv.resize(huge)):
        with pytest.raises(PronkError, match=r"memory ran out for a KV cache of .*-c"):
            ask()
    assert kv.num_blocks == 1


def made(**fields: Any) -> CpuBackend:
    config = tiny_config(**fields)
    return CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), kv_dtype="f32", threads=1)


def grown(backend: CpuBackend, blocks: int, reserved: int) -> tuple[int, int]:
    """Bytes that the process holds at its peak, more than before, while a full cache grows to twice its size; and once
    all of it is full."""
    kv = backend.new_kv(1, BLOCK_SIZE)
    assert not reserved or kv.reserve(reserved) == reserved
    kv.resize(blocks)
    kv.copy([(0, block) for block in range(blocks)])  # which touches all of it
    if not system.reset_peak_memory() or (before := system.peak_memory()) is None:
        pytest.skip("the system does not tell the peak of a while")
    kv.resize(2 * blocks)
    growing = system.peak_memory()
    kv.copy([(0, block) for block in range(blocks, 2 * blocks)])
    full = system.peak_memory()
    assert growing is not None
    assert full is not None
    return growing - before, full - before


@pytest.mark.alone
def test_a_cache_grows_where_it_is_and_never_is_there_twice() -> None:
    backend = made(num_hidden_layers=4, head_dim=64, num_attention_heads=4, num_key_value_heads=4, hidden_size=256)
    block = backend.new_kv(1, BLOCK_SIZE).storage.block_bytes
    blocks = 80_000_000 // block
    size = blocks * block
    growing, full = grown(backend, blocks, 4 * blocks)
    assert growing < 0.1 * size
    assert 0.9 * size < full < 1.15 * size
    growing, _ = grown(backend, blocks, 0)  # the inverse: what sets nothing aside must move
    assert growing > 0.9 * size


def test_as_much_is_set_aside_as_there_is_memory_and_no_more_than_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made()
    kv = backend.new_kv(2, BLOCK_SIZE)
    monkeypatch.setattr(system, "free_memory", lambda: 10 * kv.storage.block_bytes)
    assert kv.reserve(7) == 7
    assert kv.reserve(1000) == 12
    kv.resize(12)
    with pytest.raises(NotEnoughMemory):
        kv.resize(13)  # it would move, and be there twice
    monkeypatch.setattr(system, "free_memory", lambda: None)
    kv = backend.new_kv(2, BLOCK_SIZE)
    assert kv.reserve((1 << 31) - 1) >= 1 << 20  # 40 TB: or as many addresses as there are
    kv.resize(100)


class Refusing:
    """Some growths fail, in one way or another, as where others take memory and give it back."""

    def __init__(self, seed: int) -> None:
        self.rng, self.refused = np.random.default_rng(seed), 0
        self.resize = CpuKV.resize

    def __call__(self, kv: CpuKV, num_blocks: int) -> None:
        what = self.rng.integers(8)
        if num_blocks > 6 and what < 7:
            self.refused += 1
            raise MemoryError if what < 3 else NotEnoughMemory("others have it", "wait")
        self.resize(kv, num_blocks)


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_equal_to_the_bit_however_their_cache_grows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(max_position_embeddings=256)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 90, int(rng.integers(1, 120))).tolist() for _ in range(10)]
    params = SamplingParams(max_new_tokens=100, temperature=1.0, top_p=0.9, seed=seed, logprobs=1)

    def texts(**limits: Any) -> tuple[list[Any], Session]:
        session = Session(backend, prefix_cache=0, **limits)
        handles = [session.submit(prompt, params) for prompt in prompts]
        found: dict[Any, list[Any]] = {handle: [] for handle in handles}
        while session.has_work:
            for handle, chunk in session.step():
                assert chunk.error is None, "who gives way goes on later"
                found[handle].append((chunk.token, chunk.logprob, chunk.top))
        return [found[handle] for handle in handles], session

    expected, _ = texts(max_sequences=1)
    assert texts()[0] == expected
    refusing = Refusing(seed)
    monkeypatch.setattr(CpuKV, "resize", lambda kv, num_blocks: refusing(kv, num_blocks))
    found, session = texts()
    assert found == expected
    assert refusing.refused > 3
    assert session.load.counters.preemptions > 0
