"""Reader: where chunks wait for who reads them, and the bell that wakes it."""

from __future__ import annotations

import math
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from pronk.engine.generation import Chunk

if TYPE_CHECKING:
    from pronk.session.handle import Handle


class Bell:
    """An Event. A signal that raises in the middle of threading's own leaves it with a lock that it does not hold."""

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held: it has not been rung

    def clear(self) -> None:
        self._silent.acquire(blocking=False)

    def set(self) -> None:
        with suppress(RuntimeError):  # somebody else has rung it
            self._silent.release()

    def wait(self, seconds: float) -> None:
        self._silent.acquire(timeout=seconds)


class Reader:
    """Where chunks wait for who reads them: of each sample max_new_tokens at the most, for nobody holds up the others.

    `whole`: is not woken before the last of them is there.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.chunks: deque[tuple[Handle, Chunk]] = deque()
        self.handles: list[Handle] = []
        self.left: float = math.inf  # handles that have not ended
        self.bell = Bell()

    @property
    def ready(self) -> bool:
        return not self.left or (not self.whole and bool(self.chunks))
