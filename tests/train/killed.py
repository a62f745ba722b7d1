"""`python killed.py GIVEN.json`: a run that kills itself (SIGKILL) again and again, and goes on each time.

It does so before the n-th thing that it does to files of its folder ("writes"), or at the n-th function that it calls
("calls"), which no clock decides. Each attempt is a fork of a process that has imported everything and computed
nothing. At last one is let be. The answer is how far each had come: its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pronk
from pronk.train import state
from pronk.train.folder import CHECKPOINTS

_CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_a_write(number: int, folder: Path) -> None:
    done, place = count(1), str(folder)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        changes = event in _CHANGES or (event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+"))
        if changes and place in str(given[0]) and next(done) == number:
            _kill()

    sys.addaudithook(hook)


def at_a_call(number: int, folder: Path) -> None:
    """Of the functions of the thread that trains, once its first step has begun."""
    from pronk.train.loop import Loop

    done, real = count(1), Loop.step

    def profile(frame: Any, event: str, given: Any) -> None:
        if event == "call" and next(done) == number:
            _kill()

    def step(loop: Loop) -> Any:
        sys.setprofile(profile)
        return real(loop)

    Loop.step = step  # type: ignore[method-assign]


def forked(work: Callable[[], None]) -> int:
    """How it ended: an exit code, or minus a signal."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(given: dict[str, Any]) -> None:
    folder, how = Path(given["out"]), {"writes": at_a_write, "calls": at_a_call}

    def newest() -> str:
        found = state.checkpoints(folder / CHECKPOINTS)
        return found[-1].name if found else ""

    def attempt(kill: tuple[str, int] | None) -> None:
        if kill:
            how[kill[0]](kill[1], folder)
        options = {"resume": True} if newest() else {}
        verb = getattr(pronk, given.get("verb", "grpo"))
        verb(given["model"], given["data"], folder, **given["options"], **options).run()

    ends = []
    for kill in [*given["kills"], None]:
        ends.append((forked(lambda kill=kill: attempt(kill)), newest()))  # type: ignore[misc]
    print(json.dumps(ends))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
