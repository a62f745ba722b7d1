"""A run that is broken off, by Ctrl-C in the midst of a step or by the program's end: it is saved first. Its plan is
not broken off at all, which torch would not survive."""

from __future__ import annotations

import atexit
import inspect
import signal
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_END = object()


def closed_at_exit(lines: Generator[T]) -> Generator[T]:
    """The same; a program that ends amid them closes them while there is an interpreter left to save anything."""
    reference = weakref.ref(lines)

    def close() -> None:
        left = reference()
        if left is not None and inspect.getgeneratorstate(left) == inspect.GEN_SUSPENDED:  # no thread is at it
            left.close()

    atexit.register(close)
    return lines


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
def held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until this is done, and are then heeded as they would have been; a second does not wait.

    For what calls back from torch's C++: an exception that a signal's handler raises there aborts the process.
    """
    found: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        if found:
            before[signal.Signals(number)](number, frame)
        found.append(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if found:
            before[signal.Signals(found[0])](found[0], None)


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
