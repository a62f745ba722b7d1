"""Replay: the logits that a backend gave once, given again; Yardstick: a reference that many models are held against.

Mixed precision and sweeps measure dozens of models against one. Its logits are computed once, before there is another
model in memory, and kept, which for few windows is less than the model itself; that is let go. Of many windows they are
computed each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk.engine.batch import Batch
from pronk.llm import LLM
from pronk.measure.divergence import divergence
from pronk.measure.windows import Reader, begins_with, watched, windows

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.engine.backend import Backend, KVStorage


KEPT = 1 << 29  # bytes of logits, at most


class Yardstick:
    """Divergence from `reference` on a text, in windows of `ctx` tokens (`count`: of that many)."""

    def __init__(
        self,
        reference: LLM,
        ids: Sequence[int],
        ctx: int,
        count: int | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """`progress`: of reading the text, which may be done here or, with each model, later."""
        self._ids, self._ctx, self._count = ids, ctx, count
        texts = windows(ids, ctx, count=count, bos=begins_with(reference))
        rows = sum(len(window.targets) for window in texts)
        self._replay = Replay(reference.backend) if 4 * rows * reference.config.vocab_size <= KEPT else None
        if self._replay:
            reader = Reader(self._replay, max(len(window.ids) for window in texts))
            for window in watched(texts, progress):
                deque(reader.read(window), maxlen=0)
            del reader
            self._replay.rewind()
        tokenizer = reference.tokenizer if reference.has_tokenizer else None
        backend = self._replay or reference.backend
        self._reference = LLM(reference.name, reference.checkpoint, tokenizer, backend, prefix_cache=0)

    def divergence(self, llm: LLM, progress: Progress | None = None) -> dict[str, Any]:
        """See pronk.measure.divergence."""
        found = divergence(self._reference, llm, self._ids, ctx=self._ctx, count=self._count, progress=progress)
        if self._replay:
            self._replay.rewind()
        return found


class Replay:
    """A Backend that computes each pass of a round once, and then answers the same round again and again."""

    def __init__(self, backend: Backend) -> None:
        self.config, self.ctx_size = backend.config, backend.ctx_size
        self.device, self.dtype = backend.device, backend.dtype
        self.engine, self.exact, self.shares_scales = backend.engine, backend.exact, backend.shares_scales
        self.nbytes = backend.nbytes
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

    def quiesce(self) -> None:
        pass
