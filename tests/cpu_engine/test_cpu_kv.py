"""Blocks of keys and values: their size, and memory that the system says is free and then refuses."""

from __future__ import annotations

import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk import system
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import PronkError


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
