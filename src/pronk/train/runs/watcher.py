"""Who is told what a run does, while it does it: nobody, unless somebody watches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pronk.train.trainer import Trainer

_LOG = logging.getLogger("pronk.train")

Advance = Callable[[str, int, int], None]
Work = Literal["reading", "planning", "loading", "preparing", "writing"]
Of = Literal["bytes", "records", "characters", "examples", "tokens"]


class Watcher:
    """What needs to be known of the data and the run goes to the log "pronk.train", as information."""

    def note(self, text: str) -> None:
        _LOG.info(text)

    def progress(self, work: Work, of: Of = "bytes") -> AbstractContextManager[Advance]:
        """What is told what is being done, how much of it is, and how much there is."""
        return nullcontext(lambda name, done, total: None)

    def training(self, run: Trainer) -> AbstractContextManager[None]:
        """Entered before the first step, and left after the last."""
        return nullcontext()

    def looking(self, done: int, total: int) -> None:
        """At held-out data: how many examples have been read, and of how many."""
