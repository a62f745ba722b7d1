"""WatchedBackend: tells of forward passes, for the progress of work that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pronk.engine.batch import Batch

if TYPE_CHECKING:
    from pronk.engine.backend import Backend, KVStorage


class WatchedBackend:
    """A Backend that calls `tell` with each batch once it is computed."""

    def __init__(self, backend: Backend, tell: Callable[[Batch], None]) -> None:
        self.config, self.ctx_size = backend.config, backend.ctx_size
        self.device, self.dtype = backend.device, backend.dtype
        self.engine, self.exact, self.shares_scales = backend.engine, backend.exact, backend.shares_scales
        self.new_kv, self.nbytes = backend.new_kv, backend.nbytes
        self._backend, self._tell = backend, tell

    def perturbed(self) -> WatchedBackend:
        return WatchedBackend(self._backend.perturbed(), self._tell)

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        logits = self._backend.forward(batch, kv)
        self._tell(batch)
        return logits
