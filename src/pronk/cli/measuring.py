"""What a comparison shows while it measures: a bar that names the step; and how to go on where it ends early."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pronk.cli import console, progress
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.measure.journal import Journal


@contextmanager
def shown(journal: Journal, *again: str) -> Iterator[Callable[[str, int, int], None]]:
    """Hear of progress. `again`: the command that goes on with what `journal` has."""
    now = ""

    def amount(done: int, total: int) -> str:
        return f"{100 * done // total}%, {now}"

    with progress.shown("measuring", amount) as show:

        def advance(what: str, done: int, total: int) -> None:
            nonlocal now
            now = what
            show("", done, total)

        try:
            yield advance
        except (KeyboardInterrupt, PronkError) as error:
            show("", 1, 1)
            if journal.steps:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped by an error"
                console.note(f"\n{why}; what is finished is in {journal.path}; go on with: {shlex.join(again)}")
            raise
