"""LimitedProcess: a process that does one kind of work for this one, within a limit of time and one of memory.

Some input can make any amount of work out of little: what that will cost is not reckoned but bounded, from outside. The
process is started when it is first asked, and kept from one request to the next. child.py is its end.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pronk.errors import PronkError, os_problem

SECONDS = 2.0  # of the processor, for one request: on a busy machine the clock's say little
MEMORY = 400 << 20  # bytes of the process, of which it needs 30 MB for itself

_FLAGS = getattr(subprocess, "CREATE_NO_WINDOW", 0) | getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
_all: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


class LimitedProcess:
    """Safe to share among threads, which wait for each other; a child of a fork starts a process of its own.

    `work`: a file whose `answer` makes a line of JSON of a line of JSON. `what` is too much where a limit is met ("the
    template"), `of`: such things, in an error that says that no process can be started ("chat templates"). `clock`:
    seconds that an answer may take besides, idle ones too; not on Windows, where nobody can wait for a pipe so long.
    """

    def __init__(
        self,
        work: Path,
        what: str,
        of: str,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        clock: float | None = None,
    ) -> None:
        self.seconds, self.memory = seconds, memory
        self.clock = clock if os.name == "posix" else None
        self.watched = sys.platform == "darwin"  # where no limit of memory is kept by the system
        self.process: subprocess.Popen[bytes] | None = None
        self._work, self._what = work, what
        self._no_process = f"{of} run in a process of their own, and none can be started"
        self._ready = False
        self._lock = threading.Lock()
        _all.add(self)

    def request(self, request: str) -> dict[str, Any]:
        """The answer to a line of JSON; {"broken": problem} where it met a limit, or ended in another way.

        Raises PronkError where no process can be started.
        """
        with self._lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                self._await_ready()
                answer = self._exchange(request.encode("utf-8", "surrogatepass") + b"\n")
            except BaseException:  # an interrupt, perhaps: the answer would be taken for the next one's
                self._end()
                raise
            if answer.pop("spent", False):
                self._end()
        return answer

    def start(self) -> None:
        """What `request` would do first, without waiting for it: for those who have something else to do meanwhile."""
        with self._lock:
            if self.process is None:
                self._start()

    def close(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In the child of a fork: the process is the parent's, and is not to wait for this one's end too."""
        process, self.process, self._ready, self._lock = self.process, None, False, threading.Lock()
        if process is not None:
            process.returncode = 0
            nothing = os.open(os.devnull, os.O_RDWR)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    os.dup2(nothing, pipe.fileno(), inheritable=False)  # nothing half-written reaches the other
                    pipe.close()
            os.close(nothing)

    def _start(self) -> None:
        self._end()
        # Isolated, so that no file in the current folder can pass for a library; what this process finds it finds too.
        program = [sys.executable or "python", "-I", "-S", str(Path(__file__).with_name("child.py"))]
        limits = [str(self.seconds), str(self.memory), self._what, str(self._work)]
        try:
            # In a session of its own: Ctrl-C is this process's business. In the C locale, whose files take no memory.
            self.process = subprocess.Popen(
                [*program, *limits, *filter(None, sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=1 << 20, env={**os.environ, "LC_ALL": "C"}, start_new_session=True, creationflags=_FLAGS,
            )  # fmt: skip
        except OSError as error:
            raise PronkError(f"{self._no_process}: {os_problem(error)}") from None

    def _await_ready(self) -> None:
        assert self.process
        assert self.process.stdout
        self._ready = self._ready or self.process.stdout.readline() == b"ready\n"
        if not self._ready:
            raise PronkError(f"{self._no_process}: it {self._how_it_ended()}")

    def _exchange(self, request: bytes) -> dict[str, Any]:
        assert self.process
        assert self.process.stdin
        assert self.process.stdout
        with suppress(OSError):  # that it ended is seen below
            self.process.stdin.write(request)
            self.process.stdin.flush()
        if limit := self._limit_met():
            return {"broken": f"{self._what} takes more than {limit}", "spent": True}
        line = self.process.stdout.readline()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
            return answer
        return {"broken": f"{self._what} {self._how_it_ended()}", "spent": True}

    def _limit_met(self) -> str | None:
        """Of the limits that are kept from here, one that the process meets before it answers, or ends."""
        assert self.process
        assert self.process.stdout
        if not (self.watched or self.clock):
            return None
        asked = ("ps", "-o", "rss=", "-p", str(self.process.pid))  # KB
        end = time.monotonic() + (self.clock or math.inf)
        with selectors.DefaultSelector() as answers:
            answers.register(self.process.stdout, selectors.EVENT_READ)
            while not answers.select(0.02 if self.watched else max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    return f"{self.clock:g} s"
                if not self.watched:
                    continue
                held = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
                if int(held.strip() or 0) << 10 > self.memory:
                    return f"{self.memory >> 20} MB"
        return None

    def _how_it_ended(self) -> str:
        assert self.process
        assert self.process.stderr
        _kill(self.process)
        code = self.process.wait()
        if code == -getattr(signal, "SIGPROF", 0):
            return f"takes more than {self.seconds:g} s"
        last = self.process.stderr.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
        return ": ".join([f"made its process end with {f'signal {-code}' if code < 0 else f'exit code {code}'}", *last])

    def _end(self) -> None:
        """By force: it has nothing to lose, and works for nobody."""
        process, self.process, self._ready = self.process, None, False
        if process is not None:
            _kill(process)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):  # a request that was not taken
                    if pipe:
                        pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it started. Nobody has waited for it yet, so that its number is still its own."""
    if process.returncode is None and hasattr(os, "killpg"):
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _each(do: Callable[[LimitedProcess], None]) -> None:
    for limited in list(_all):
        do(limited)


atexit.register(_each, LimitedProcess.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _each(LimitedProcess.forget))
