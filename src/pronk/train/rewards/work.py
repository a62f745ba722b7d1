"""What a reward's process does (pronk/limited/child.py): call somebody's function, or search for a pattern.

It imports nothing of pronk. What the function prints goes nowhere, and what programs say that it starts: nobody reads
it, and a pipe that is full would stop them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from typing import Any

_functions: dict[tuple[str, str], Callable[..., Any]] = {}
_nowhere = open(os.devnull, "w")  # noqa: PTH123, SIM115
os.dup2(_nowhere.fileno(), 2)


def answer(line: bytes) -> bytes:
    asked = json.loads(line)
    with redirect_stdout(_nowhere), redirect_stderr(_nowhere):
        try:
            found: dict[str, Any] = {"value": _value(asked)}
        except MemoryError:
            raise
        except BaseException as error:  # SystemExit, too
            found = {"problem": _problem(error, asked.get("file"))[:1000]}
    return json.dumps(found).encode() + b"\n"


class _Unfit(Exception):
    """What is wrong with a function, or with what it gave."""


def _problem(error: BaseException, file: str | None) -> str:
    """With the line of the file where it was raised, or the last one that led there."""
    if isinstance(error, _Unfit):
        return str(error)
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    place = f" in {os.path.basename(file)}, line {lines[-1]}" if file and lines else ""  # noqa: PTH119
    return f"raised {type(error).__name__}{place}: {_said(error)}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its message cannot be written"


def _value(asked: dict[str, Any]) -> float:
    if "pattern" in asked:
        return float(re.search(asked["pattern"], asked["completion"]) is not None)
    function = _function(asked["file"], asked["name"], asked["module"])
    if "completion" not in asked:  # it is only looked whether it can be called
        return 0.0
    value = function(asked["prompt"], asked["completion"], asked["record"])
    if not isinstance(value, (str, bytes)):
        with suppress(Exception):  # each library has one of its own for an array of several numbers
            return float(value)
    raise _Unfit(f"gave {value!r:.80}, and a reward is a number")


def _function(file: str, name: str, called: str) -> Callable[..., Any]:
    if (file, name) not in _functions:
        sys.path.insert(0, os.path.dirname(file))  # noqa: PTH120
        spec = spec_from_file_location(called, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        sys.modules[called] = module
        spec.loader.exec_module(module)
        if not callable(found := getattr(module, name, None)):
            near = get_close_matches(name, [own for own in dir(module) if callable(getattr(module, own))], 1)
            raise _Unfit(f"is no function of {file}" + (f"; did you mean {near[0]}?" if near else ""))
        _check_arguments(found)
        _functions[file, name] = found
    return _functions[file, name]


def _check_arguments(function: Callable[..., Any]) -> None:
    try:
        taken = signature(function)
    except (TypeError, ValueError):  # as of some that are written in C
        return
    try:
        taken.bind(None, None, None)
    except TypeError:
        raise _Unfit(f"is called with a prompt, a completion and a record, and takes {taken}") from None
