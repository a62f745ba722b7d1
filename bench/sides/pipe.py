"""A side of a comparison: a process of its own that does nothing until it is told to, one line of JSON at a time.

In processes of their own, sides have their own memory, threads and Python environments, and only one works at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent


class SideError(RuntimeError):
    """What went wrong in a side, with its traceback."""


class Side:
    """The caller's end: `side.prefill(ids=[...])` runs in the other process and gives back what it returns."""

    def __init__(self, script: str, python: str = sys.executable) -> None:
        self.script = script
        try:
            self._process = subprocess.Popen(
                [python, str(HERE / f"{script}.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            sys.exit(
                f"there is no {python}; bench/README.md says how to make the peers' environment, and "
                "PRONK_BENCH_PYTHON names a Python elsewhere"
            )

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("_"):
            raise AttributeError(operation)
        return lambda **arguments: self._call(operation, arguments)

    def _call(self, operation: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([operation, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SideError(f"{self.script} ended in {operation}, with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.script}, in {operation}:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        self._process.communicate()  # closes the pipe, which ends it

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve(engine: Any) -> None:
    """The side's end: call `engine`'s methods until the caller closes the pipe."""
    # Libraries print where they like: file 1 becomes stderr, and answers go through a copy of what it was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        try:
            answer = {"result": getattr(engine, operation)(**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def memory_mb() -> dict[str, float]:
    """What this process holds now, and the most it has held; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": kib["VmRSS"] * 1024 / 1e6, "peak": kib["VmHWM"] * 1024 / 1e6}


def forget_peak() -> None:
    """The most this process has held is from now on what it holds now; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
