"""Worker: a process that measures one model at a time, and does nothing until it is told to.

In processes of their own, variants have their own memory, threads and peaks; only one works at a time, and the others
wait in a read that costs nothing. What is said is a line of JSON each: an operation with its arguments to the worker,
progress and then an answer back. `python -m pronk.measure.worker` is the worker's end; what it can do is subject.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pronk.errors import PronkError, out_of_memory

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress

_COMMAND = (sys.executable, "-m", "pronk.measure.worker")
_LESS = "fewer bits, fewer variants at once or a smaller context size (--ctx-size) take less"
_PATIENCE = 5.0  # seconds that a worker has to end when nobody needs it any more


class WorkerDied(PronkError):
    """A worker that ended in the middle of its work: killed, for memory perhaps, or crashed."""


class WorkerFailed(Exception):
    """A mistake of pronk's own in a worker, with the worker's traceback."""


class Worker:
    """The caller's end. `name` is what errors call it: the variant that it measures.

    `call` raises what the worker raised, as PronkError where it was one; WorkerDied; and WorkerFailed.
    """

    def __init__(self, name: str, command: Sequence[str] = _COMMAND) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        # Without the current folder on its path, where a file may have the name of a library.
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8",
            env=environment,
        )  # fmt: skip

    def call(self, operation: str, *, progress: Progress | None = None, **arguments: Any) -> Any:
        """What the worker's method of that name returns."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([operation, arguments]) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._died(operation) from None
        for line in self.process.stdout:
            said = _parsed(line)
            if "progress" in said:
                if progress:
                    progress(*said["progress"])
            elif "refused" in said:
                raise PronkError(said["refused"])
            elif "failed" in said:
                raise WorkerFailed(f"{self.name}, in {operation}:\n{said['failed']}")
            elif "result" in said:
                return said["result"]
            else:  # half a line, of one that died in the middle of it
                break
        raise self._died(operation)

    def close(self) -> None:
        """End it: by closing its input where it waits for work, by force where it is in the middle of some."""
        if self.process.stdin and not self.process.stdin.closed:
            with suppress(OSError):  # where it is gone, with a line unread
                self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
        self._let_go()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._let_go()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # an interrupt, perhaps: it is not to go on working for minutes
            self.kill()

    def _let_go(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with suppress(OSError):
                if stream:
                    stream.close()

    def _died(self, operation: str) -> WorkerDied:
        self.process.kill()  # if it only closed its output, it is of no use either
        code = self.process.wait()
        self._errors.seek(0)
        last = self._errors.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
        why = "; ".join([_how_it_ended(code), *last])
        return WorkerDied(f"{self.name}: the process that measured it ended in {operation!r}: {why}")


def _parsed(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    memory = ", which is what the system does where memory runs out" if name == "SIGKILL" else ""
    return f"killed by signal {-code} ({name}){memory}"


def serve(subject: Any) -> None:
    """The worker's end: call `subject`'s methods until the caller closes the pipe. `subject.progress` tells it more."""
    if hasattr(signal, "SIGINT"):  # Ctrl-C reaches the whole group: what it means is the caller's business
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print where they like: file 1 becomes stderr, and answers go through a copy of what it was.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    subject.progress = lambda name, done, total: say(progress=[name, done, total])
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        try:
            say(result=getattr(subject, operation)(**arguments))
        except PronkError as error:
            say(refused=str(error))
        except BrokenPipeError:  # the caller is gone
            return
        except Exception as error:
            if said := out_of_memory(error):
                say(refused=f"in {operation!r}: {said}; {_LESS}")
            else:
                say(failed=traceback.format_exc())


def main() -> None:
    from pronk.measure.subject import Subject

    try:
        serve(Subject())
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
