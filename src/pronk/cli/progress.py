"""Progress on stderr: a bar on a terminal, a line now and then on one that cannot draw, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from pronk.cli import console

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Callable[[int, int], str]  # how much of how much is done, in words

PATIENCE = 1.0  # seconds of work before it is worth a sign
LINES_APART = 5.0  # seconds


def of_bytes(done: int, total: int) -> str:
    return f"{console.size(done)} of {console.size(total)}"


def of_tokens(done: int, total: int) -> str:
    return f"{done} of {total} tokens"


@contextmanager
def shown(label: str = "", unit: Unit = of_bytes, patience: float = PATIENCE) -> Iterator[Callable[..., None]]:
    """A callback (name, done, total). `label` "": what is being done is the name; another name begins anew."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    kind = _Lines if console.is_dumb() else _Bar
    display = kind(label, unit, patience)
    try:
        yield display
    finally:
        display.hide()


class _Display:
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
            left = f", {_duration(elapsed * (total - done) / done)} left" if done else ""
            self.show(done, total, self.unit(done, total) + left)

    def show(self, done: int, total: int, amount: str) -> None:
        raise NotImplementedError

    def hide(self) -> None:
        """Leave no trace."""


class _Lines(_Display):
    last: float | None = None

    def show(self, done: int, total: int, amount: str) -> None:
        now = time.monotonic()
        if self.last is None or now - self.last >= LINES_APART:
            click.echo(f"{self.title}: {amount}", err=True)
            self.last = now

    def hide(self) -> None:
        self.last = None


class _Bar(_Display):
    bar: Progress | None = None

    def show(self, done: int, total: int, amount: str) -> None:
        if self.bar is None:
            self.bar = _rich_bar()
            self.bar.start()
            self.bar.add_task(str(self.title), amount="")
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, amount=amount)

    def hide(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _rich_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
