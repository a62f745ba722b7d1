"""Replay: the logits that a backend gave once, given again: for what is compared with one reference many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pronk.engine.batch import Batch

if TYPE_CHECKING:
    from pronk.engine.backend import Backend, KVStorage


class Replay:
    """A Backend that computes each pass of a round once, and then answers the same round again and again.

    It holds all logits that were asked for. When the first round is over the model itself is let go.
    """

    def __init__(self, backend: Backend) -> None:
        self.config, self.ctx_size = backend.config, backend.ctx_size
        self.device, self.dtype = backend.device, backend.dtype
        self.engine, self.exact = backend.engine, backend.exact
        self._backend: Backend | None = backend
        self._passes: list[tuple[Batch, NDArray[np.float32]]] = []
        self._next = 0

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage:
        return self._backend.new_kv(num_blocks, block_size) if self._backend else _Nothing(num_blocks, block_size)

    def perturbed(self) -> Backend:
        raise NotImplementedError("a recording has no noise of its own")

    def rewind(self) -> None:
        """A round is over."""
        self._backend, self._next = None, 0

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        if self._backend:
            self._passes.append((batch, self._backend.forward(batch, kv)))
        then, logits = self._passes[self._next]
        for name in ("token_ids", "positions", "logits_rows"):
            if not np.array_equal(getattr(batch, name), getattr(then, name)):
                raise ValueError("this round differs from the one that was recorded")
        self._next += 1
        return logits


class _Nothing:
    """Keys and values that nobody reads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass
