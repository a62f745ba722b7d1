"""Reading: one text in a KV cache of its own: its predictions, in pieces, and what is inside each of its tokens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pronk.engine.backend import Attached, Backend, Inspection, KVStorage
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import PronkError

Logits = NDArray[np.float32]  # [rows, V]

LOGITS_BYTES = 16 << 20  # at most, of a piece: 85 rows of a vocabulary of 49,152


class Reading:
    """Nothing is computed until it is asked for. From any thread: one pass at a time.

    Where the tokens of a pass share scales (absmax, zeropoint), every pass is one over the whole text.
    """

    def __init__(self, backend: Callable[[], Backend], ids: Sequence[int], adapter: Attached | None = None) -> None:
        """`backend`: called before each pass; it raises where the model is closed. `ids`: at least one."""
        self.ids, self._adapter, self._backend = ids, adapter, backend
        self._mine = weakref.ref(backend())
        self._kv: KVStorage | None = None
        self._read = 0  # tokens whose keys and values are there
        self._lock = threading.RLock()

    def logits(self, at: int, most: int = PASS_TOKENS) -> Logits:
        """Of rows `at` and on, as many as a piece has, and at most `most`."""
        with self._lock:
            backend = self._model()
            rows = min(most, PASS_TOKENS, max(1, LOGITS_BYTES // (4 * backend.config.vocab_size)))
            end = min(at + rows, len(self.ids))
            logits = backend.forward(self._batch(backend, at, end, range(at, end)), self._storage(backend))
            self._read = end
            return logits

    def inspect(self, position: int, layers: Sequence[int] = (), *, lens: bool = False) -> Inspection:
        """See pronk.engine.backend.Backend.inspect."""
        with self._lock:
            backend = self._model()
            storage, (own, slot) = self._storage(backend), divmod(position, BLOCK_SIZE)
            if backend.shares_scales:
                return backend.inspect(self._batch(backend, 0, 0, [position]), storage, layers, lens=lens)
            while self._read < position:
                end = min(self._read + PASS_TOKENS, len(self.ids))
                backend.forward(self._batch(backend, self._read, end, []), storage)
                self._read = end
            # The token is computed again, in a copy of its block: what stands behind it is not to be lost.
            spare = storage.num_blocks - 1
            if slot:
                storage.copy([(own, spare)])
            run = Run([self.ids[position]], position, [*range(own), spare], "last", self._number)
            return backend.inspect(Batch.of([run]), storage, layers, lens=lens)

    @property
    def _number(self) -> int | None:
        return self._adapter.number if self._adapter else None

    def _batch(self, backend: Backend, at: int, end: int, wanted: Sequence[int]) -> Batch:
        """Of tokens `at` to `end`, or of all; `wanted`: positions whose logits are."""
        if backend.shares_scales:
            at, end = 0, len(self.ids)
        run = Run(self.ids[at:end], at, range(-(-end // BLOCK_SIZE)), "none", self._number)
        return replace(Batch.of([run]), logits_rows=np.array(wanted, np.int32) - np.int32(at))

    def _model(self) -> Backend:
        backend = self._backend()
        if self._mine() is not backend:
            raise PronkError("the model was given another backend since this look was taken; look again")
        return backend

    def _storage(self, backend: Backend) -> KVStorage:
        if self._kv is None:
            self._kv = backend.new_kv(-(-len(self.ids) // BLOCK_SIZE) + 1, BLOCK_SIZE)
        return self._kv
