"""A Backend without a model: logits are a hash of the whole prefix, read through the KV blocks it was given.

So a wrong block table, a wrong position, a missing copy or a write into another sequence's block changes the tokens or
trips an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tiny import tiny_config

from pronk.engine.backend import Backend, KVStorage
from pronk.engine.batch import Batch
from pronk.engine.params import SamplingParams
from pronk.engine.rng import stream
from pronk.engine.sampling import sample


@lru_cache(maxsize=1 << 16)
def prefix_logits(tokens: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
    """[V], a fixed function of the tokens and their order."""
    state = 0
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
    return np.random.Generator(np.random.Philox(key=state)).normal(0, 2, vocab_size).astype(np.float32)


def alone(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
    index: int = 0,
    *,
    vocab_size: int,
    ctx_size: int,
    eos_ids: Sequence[int] = (),
) -> tuple[list[int], str]:
    """The oracle: what one sample of a request gives, from whole prefixes, without a scheduler or a cache."""
    tokens, draws = list(prompt), stream(params.rng, seed, index)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    for step in range(params.max_new_tokens):
        logits = prefix_logits(tuple(tokens), vocab_size)
        generated = tokens[len(prompt) :]
        tokens.append(sample(logits, params, tokens, generated, draws.uniform(step)).token)
        if tokens[-1] in ends:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == ctx_size:
            break
    return tokens[len(prompt) :], "length"


def habitual_logits(tokens: tuple[int, ...], vocab_size: int) -> NDArray[np.float32]:
    """Those of a model that often repeats itself: the last token decides more than all that came before."""
    whole = prefix_logits(tokens, vocab_size)
    return prefix_logits(tokens[-1:], vocab_size) * np.float32(3) + whole * np.float32(0.5)


class MockKV(KVStorage):
    """Tokens and their positions in place of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tokens = np.full((num_blocks, block_size), -1)
        self.positions = np.full((num_blocks, block_size), -1)

    def resize(self, num_blocks: int) -> None:
        assert num_blocks > self.num_blocks
        extra = np.full((num_blocks - self.num_blocks, self.block_size), -1)
        self.tokens = np.concatenate([self.tokens, extra])
        self.positions = np.concatenate([self.positions, extra])
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.tokens[destination] = self.tokens[source]
            self.positions[destination] = self.positions[source]


class MockBackend(Backend):
    batch_invariant = True

    def __init__(
        self,
        vocab_size: int = 50,
        ctx_size: int = 1000,
        kv_type: type[MockKV] = MockKV,
        logits: Callable[[tuple[int, ...], int], NDArray[np.float32]] = prefix_logits,
    ) -> None:
        self.config, self.logits = tiny_config(vocab_size=vocab_size), logits
        self.ctx_size = ctx_size
        self.kv_type = kv_type
        self.batches: list[Batch] = []

    def new_kv(self, num_blocks: int, block_size: int) -> MockKV:
        return self.kv_type(num_blocks, block_size)

    def forward(self, batch: Batch, kv: MockKV | None) -> NDArray[np.float32]:
        self.batches.append(batch)
        wanted = set(batch.logits_rows.tolist())
        logits = []
        runs = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), batch.tables, strict=True))
        # As on a real engine, a layer writes the keys of all runs before any run reads.
        for begin, end, blocks in runs if kv else ():
            for row in range(begin, end):
                block, slot = divmod(int(batch.positions[row]), kv.block_size)
                kv.tokens[blocks[block], slot] = batch.token_ids[row]
                kv.positions[blocks[block], slot] = batch.positions[row]
        for begin, end, blocks in runs:
            if kv is None:
                assert batch.positions[begin] == 0
                assert len(blocks) == 0
                prefix = batch.token_ids[begin:end]
            else:
                length = int(batch.positions[end - 1]) + 1
                assert len(blocks) == -(-length // kv.block_size), "as many blocks as the tokens need"
                prefix = kv.tokens[blocks].reshape(-1)[:length]
                assert (kv.positions[blocks].reshape(-1)[:length] == np.arange(length)).all()
            for row in range(begin, end):
                if row in wanted:
                    past = prefix[: int(batch.positions[row]) + 1]
                    logits.append(self.logits(tuple(past.tolist()), self.config.vocab_size))
        return np.stack(logits) if logits else np.zeros((0, self.config.vocab_size), np.float32)
