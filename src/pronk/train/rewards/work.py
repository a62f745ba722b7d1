"""What a reward's process does (pronk/limited/child.py): call somebody's function, or search for a pattern.

It imports nothing of pronk. What the function prints goes nowhere, and what programs say that it starts: nobody reads
it, and a pipe that is full would stop them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

_MODULE = "pronk_reward"
_functions: dict[tuple[str, str], Callable[..., Any]] = {}
_nowhere = open(os.devnull, "w")  # noqa: PTH123, SIM115
os.dup2(_nowhere.fileno(), 2)


def answer(line: bytes) -> bytes:
    asked = json.loads(line)
    with _within(asked["seconds"]), redirect_stdout(_nowhere), redirect_stderr(_nowhere):
        try:
            found: dict[str, Any] = {"value": _value(asked)}
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit, too
            found = {"problem": f"raised {type(error).__name__}: {_said(error)}"[:1000]}
    return json.dumps(found).encode() + b"\n"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its message cannot be written"


def _value(asked: dict[str, Any]) -> float:
    if "pattern" in asked:
        return float(re.search(asked["pattern"], asked["completion"]) is not None)
    value = _function(asked["file"], asked["name"])(asked["prompt"], asked["completion"], asked["record"])
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"it gave {value!r:.80}, and a reward is a number")
    return float(value)


def _function(file: str, name: str) -> Callable[..., Any]:
    if (file, name) not in _functions:
        sys.path.insert(0, os.path.dirname(file))  # noqa: PTH120
        spec = spec_from_file_location(_MODULE, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
        if not callable(found := getattr(module, name, None)):
            raise LookupError(f"{file} has no function {name}")
        _functions[file, name] = found
    return _functions[file, name]


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """By the clock; the time of the processor is limited besides. SIGALRM ends the process."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
