"""CpuKV: storage for keys and values. Which block belongs to whom is engine/kv_blocks.py's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pronk import system
from pronk.engine.backend import KVStorage
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import NotEnoughMemory, PronkError

if TYPE_CHECKING:
    from pronk import _native


class CpuKV(KVStorage):
    def __init__(self, storage: _native.KV) -> None:
        self.storage, self.block_size, self.num_blocks = storage, BLOCK_SIZE, storage.num_blocks

        self._reserved = 0  # blocks: up to there it grows where it is

    def reserve(self, num_blocks: int) -> int:
        """See KVStorage. Sets aside addresses, so that growing moves nothing."""
        if (free := system.free_memory()) is not None:
            num_blocks = min(num_blocks, self.num_blocks + free // self.storage.block_bytes)
        self._reserved = self.storage.reserve(num_blocks)
        return self._reserved

    def resize(self, num_blocks: int) -> None:
        """Grow; blocks already there keep their content. Raises NotEnoughMemory, having changed nothing."""
        # Where it moves, the old one stays until it is copied.
        lacking = num_blocks - self.num_blocks if num_blocks <= self._reserved else num_blocks
        with enough_memory(num_blocks, lacking * self.storage.block_bytes):
            self.storage.resize(num_blocks)
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.storage.copy(np.asarray(pairs, np.int32).reshape(-1, 2))

    def ended(self, blocks: Sequence[int]) -> None:
        self.storage.quiesce()  # what was begun ahead for it need not be finished


@contextmanager
def enough_memory(num_blocks: int, need: int) -> Iterator[None]:
    """For a cache of so many blocks, which takes `need` more bytes. Raises NotEnoughMemory: before memory is taken, or,
    where a limit was not seen, then."""
    what = f"a KV cache of {num_blocks * BLOCK_SIZE} tokens"
    way_out = "shorten the text, lower --ctx-size, or take smaller keys and values: kv_dtype='q4' (--kv-dtype q4)"
    system.check_memory(need, what, way_out)
    try:
        yield
    except MemoryError:
        raise NotEnoughMemory(f"memory ran out for {what}", way_out) from None
    except RuntimeError as error:  # while a pass is under way that cannot be waited for
        raise PronkError(f"{error}") from None
