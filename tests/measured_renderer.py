"""A Renderer that knows what its process took: of the processor, and of memory."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.tokenizer.renderer import Renderer

SLACK = 0.5  # seconds: to start the process, and for its clock's ticks
MEGABYTES = 500


class MeasuredRenderer(Renderer):
    """`longest`: seconds of the processor that one answer took at most; `largest`: MB that the process ever had."""

    longest, largest, over = 0.0, 0.0, 0

    def ask(self, source: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        before = self._used()
        try:
            return super().ask(source, given)
        finally:
            took = self._used() - before
            self.longest = max(self.longest, took)
            self.over += took > self.seconds + SLACK

    def check(self) -> None:
        assert self.longest < self.seconds + SLACK, f"{self.longest:.2f} s"
        assert self.largest < MEGABYTES, f"{self.largest:.0f} MB"

    def __enter__(self) -> MeasuredRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            return super()._exchange(request)
        finally:
            self._weigh()

    def _weigh(self) -> None:
        """The peak of one that lives; one that was killed had no more than its limit, which is looked up before."""
        if self.process and self.process.returncode is None and sys.platform == "linux":
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            peak = [line.split()[1] for line in status.splitlines() if line.startswith("VmPeak")]
            self.largest = max(self.largest, *(int(kilobytes) / 1e3 for kilobytes in peak), 0.0)

    def _await_ready(self) -> None:
        super()._await_ready()
        if self.process and sys.platform == "linux":
            soft, _ = resource.prlimit(self.process.pid, resource.RLIMIT_AS)
            assert soft == self.memory

    def _used(self) -> float:
        """By all processes so far: those that ended, and the one that lives."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = ended.ru_utime + ended.ru_stime
        if self.process and self.process.returncode is None and sys.platform == "linux":
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used
