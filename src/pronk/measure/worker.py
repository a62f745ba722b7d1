"""Worker: a process that measures models, and does nothing until it is told to.

In processes of their own, variants have their own memory, threads and peaks; only one works at a time, and the others
wait in a read that costs nothing. A ProcessPoolExecutor tells of no progress, does not say which signal ended a
process, and cannot end one in the middle of its work; hence a Process and a Pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.errors import PronkError, out_of_memory

_SPAWN = multiprocessing.get_context("spawn")  # a forked process would hold what this one holds
_LESS = "fewer bits, fewer variants at once or a smaller context size (--ctx-size) take less"
_PATIENCE = 5.0  # seconds that a worker has to end when nobody needs it any more


class WorkerDied(PronkError):
    """A worker that ended in the middle of its work: killed, for memory perhaps, or crashed."""


class OutOfMemory(PronkError):
    """Memory ran out in a worker, which said so: `said`."""

    def __init__(self, name: str, said: str) -> None:
        self.said = said
        super().__init__(f"{name}: {said}; {_LESS}")


class WorkerFailed(Exception):
    """A mistake of pronk's own in a worker, with the worker's traceback."""


@dataclass
class Held:
    """What a worker has: whom to tell of progress, and, from one call to the next, the model that it measures."""

    progress: Progress
    model: Any = None


class Worker:
    """The caller's end. `name` is what errors call it: the variant that it measures."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._said = tempfile.NamedTemporaryFile(prefix="pronk-")  # noqa: SIM115 -- until `kill`
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, self._said.name), daemon=True)
        try:
            with _deaf_to_ctrl_c():
                self.process.start()
        except BaseException:
            self.kill()
            raise
        finally:
            theirs.close()

    def call(self, function: Callable[..., Any], *, progress: Progress | None = None, **arguments: Any) -> Any:
        """What `function`, which can be imported, returns there of the worker's Held and these arguments. Raises what
        it raised, as PronkError where it was one; OutOfMemory; WorkerDied; and WorkerFailed.
        """
        kind, what = self._answer((function, arguments))
        while kind == "progress":
            if progress:
                progress(*what)
            kind, what = self._answer()
        if kind == "refused":
            raise PronkError(what)
        if kind == "memory":
            raise OutOfMemory(self.name, what)
        if kind == "failed":
            raise WorkerFailed(f"{self.name}:\n{what}")
        return what

    def close(self) -> None:
        """Let it end where it waits for work; end it by force where it is in the middle of some."""
        self._pipe.close()
        self.process.join(_PATIENCE)
        self.kill()

    def kill(self) -> None:
        if self.process.pid:
            self.process.kill()
            self.process.join()
        self._pipe.close()
        self._said.close()

    def _answer(self, question: Any = None) -> tuple[str, Any]:
        try:
            if question:
                self._pipe.send(question)
            answer: tuple[str, Any] = self._pipe.recv()
            return answer
        except (EOFError, OSError):
            pass
        self.process.join(_PATIENCE)
        self.process.kill()  # if it only closed its end, it is of no use either
        self.process.join()
        last = self._said.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
        why = "; ".join([_how_it_ended(self.process.exitcode or 0), *last])
        raise WorkerDied(f"{self.name}: the process that measured it ended: {why}")


def asks(function: Callable[..., Any], **arguments: Any) -> Callable[[Worker, Progress], Any]:
    """What is asked of a worker that is still to be started."""
    return lambda worker, progress: worker.call(function, progress=progress, **arguments)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started here stays so. Ctrl-C reaches the whole group, and what it means is the caller's business.

    A signal that comes meanwhile waits, where one that is ignored would be lost.
    """
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    memory = ", which is what the system does where memory runs out" if name == "SIGKILL" else ""
    return f"killed by signal {-code} ({name}){memory}"


def _serve(pipe: Connection, said: str) -> None:
    """The worker's end: call functions until the caller closes the pipe."""
    with Path(said).open("wb") as file:  # libraries print where they like
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    held = Held(lambda *what: pipe.send(("progress", what)))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the caller is gone
        while True:
            function, arguments = pipe.recv()
            pipe.send(_answered(function, held, arguments))


def _answered(function: Callable[..., Any], held: Held, arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "result", function(held, **arguments)
    except PronkError as error:
        return "refused", str(error)
    except Exception as error:
        said = out_of_memory(error)
        return ("memory", said) if said else ("failed", traceback.format_exc())
