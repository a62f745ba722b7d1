"""Progress on stderr: a bar on a terminal, a line now and then on one that cannot draw, nothing elsewhere; but of work
that takes hours, and is left alone, a file or a pipe gets a line now and then, too."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pronk.cli import console
from pronk.system import human_size

Unit = Callable[[int, int], str]  # how much of how much is done, in words

PATIENCE = 1.0  # seconds of work before it is worth a sign
LINES_APART = 5.0  # seconds
LOGGED_APART = 30.0  # seconds between two lines in a file or a pipe
REDRAWN = 0.1  # seconds between two states of a bar
BAR = 40  # characters, where the terminal has room


def of_bytes(done: int, total: int) -> str:
    return f"{human_size(done)} of {human_size(total)}"


def of_tokens(done: int, total: int) -> str:
    return f"{done} of {total} tokens"


@contextmanager
def shown(
    label: str = "",
    unit: Unit = of_bytes,
    patience: float = PATIENCE,
    logged: bool = False,
    ends: float = math.inf,
) -> Iterator[Callable[..., None]]:
    """A callback (name, done, total). `label` "": what is being done is the name; another name begins anew.

    `logged`: say it in a file or a pipe as well. `ends`: when the work is left whatever is done (time.monotonic).
    """
    display: _Display
    if sys.stderr.isatty():
        display = (_Lines if console.is_dumb() else _Bar)(label, unit, patience)
    elif logged:
        display = _Log(label, unit, LOGGED_APART)
    else:
        yield lambda name, done, total: None
        return
    display.ends = ends
    try:
        yield display
    finally:
        display.hide()


class _Display:
    ends = math.inf

    def __init__(self, label: str, unit: Unit, patience: float) -> None:
        self.label, self.unit, self.patience = label, unit, patience
        self.title: str | None = None
        self.begun = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self.title != (title := self.label or name):
            self.hide()
            self.title, self.begun = title, now
        elapsed = now - self.begun
        if done >= total:  # what comes next, a text perhaps, has the terminal for itself
            self.hide()
        elif elapsed >= self.patience:
            left = f", {duration(min(elapsed * (total - done) / done, self.ends - now))} left" if done else ""
            self.show(done, total, self.unit(done, total) + left)

    def show(self, done: int, total: int, amount: str) -> None:
        raise NotImplementedError

    def hide(self) -> None:
        """Leave no trace."""


class _Lines(_Display):
    last: float | None = None
    apart = LINES_APART

    def show(self, done: int, total: int, amount: str) -> None:
        now = time.monotonic()
        if self.last is None or now - self.last >= self.apart:
            console.say(f"{self.title}: {amount}")
            self.last = now

    def hide(self) -> None:
        self.last = None


class _Log(_Lines):
    apart = LOGGED_APART

    def hide(self) -> None:
        """What was said stays said: the next line is due as long after it as any."""


class _Bar(_Display):
    drawn: float | None = None

    def show(self, done: int, total: int, amount: str) -> None:
        now = time.monotonic()
        if self.drawn is None or now - self.drawn >= REDRAWN:
            full, empty = "━╌" if sys.stderr.encoding.lower().startswith("utf") else "#-"
            columns = _columns() - 1  # a line that is longer could not be taken back
            width = min(BAR, max(0, columns - len(f"{self.title}  {amount}")))
            filled = width * done // total
            line = f"{self.title} {full * filled}{empty * (width - filled)} {amount}"
            console.draw(line[:columns])
            self.drawn = now

    def hide(self) -> None:
        if self.drawn is not None:
            console.draw("")
            self.drawn = None


def _columns() -> int:
    """The width of the terminal on stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0 is one that does not know
    except (OSError, ValueError):
        return 80


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
