"""What tells of work, for its progress: a count of what is done, and a Backend that tells of its forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.engine.backend import Backend
from pronk.engine.batch import Batch

if TYPE_CHECKING:
    from pronk.engine.backend import KVStorage

    Delegating = Any  # a Backend, of which mypy sees nothing
else:
    Delegating = object


class Told:
    """A count: called with how many more are done, it tells `progress` how many of `total` are."""

    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self._progress, self._what, self._done, self._total = progress, what, 0, total

    def __call__(self, more: int = 1) -> None:
        self._done += more
        if self._progress:
            self._progress(self._what, self._done, self._total)


class WatchedBackend(Delegating):  # type: ignore[misc]
    """A Backend that calls `tell` with each batch once it is computed."""

    predict = Backend.predict  # by its own forward

    def __init__(self, backend: Backend, tell: Callable[[Batch], None]) -> None:
        self._backend, self._tell = backend, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def perturbed(self) -> WatchedBackend:
        return WatchedBackend(self._backend.perturbed(), self._tell)

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        logits = self._backend.forward(batch, kv)
        self._tell(batch)
        return logits
