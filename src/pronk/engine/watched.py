"""WatchedBackend: tells of forward passes, for the progress of work that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk.engine.backend import Backend
from pronk.engine.batch import Batch

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.engine.backend import KVStorage

    Delegating = Any  # a Backend, of which mypy sees nothing
else:
    Delegating = object

READING, SEARCHING = "reading the prompt", "beam search"


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


def beam_progress(progress: Progress, prompt_tokens: int, steps: int) -> Callable[[Batch], None]:
    """For WatchedBackend: first the prompt's tokens, then the steps of the search, one a forward pass."""
    read, step = 0, 1
    progress(READING, read, prompt_tokens)

    def tell(batch: Batch) -> None:
        nonlocal read, step
        if read < prompt_tokens:
            read = min(read + len(batch.token_ids), prompt_tokens)
            progress(READING, read, prompt_tokens)
        else:
            step += 1
            progress(SEARCHING, step, steps)

    return tell
