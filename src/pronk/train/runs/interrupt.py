"""Ctrl-C in the midst of a step: it is finished and saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_END = object()


def unbroken(lines: Generator[T]) -> Generator[T]:
    """The same, but none is broken off: a KeyboardInterrupt waits until it is there, and `lines` are closed.

    A second Ctrl-C does not wait. Whoever handles the signal already goes on to do so.
    """
    try:
        while True:
            with _noted() as interrupted:
                line = next(lines, _END)
            if interrupted:
                lines.close()
                raise KeyboardInterrupt
            if line is _END:
                return
            yield line  # type: ignore[misc]
    finally:
        lines.close()


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Holds something once Ctrl-C was pressed."""
    found: list[int] = []
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield found
        return

    def note(number: int, frame: FrameType | None) -> None:
        if found:
            raise KeyboardInterrupt
        found.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
