"""Budget: the time, memory and work that one rendering of a chat template may take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, MappingView
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Cycler, Namespace

SECONDS = 2.0
BYTES = 8 << 20  # created during a render, besides 16 times what it was given
STEPS = 20_000_000  # nodes of the syntax tree run in loops
INTEGER_BITS = 4096
DEPTH = 200  # of containers in containers: Python's hash and repr recurse in C
NODES = 1 << 20  # in one value, shared parts counted each time

CONTAINERS = (list, tuple, dict, set, MappingView)
_UNWRITABLE = 1 << 60


class OverBudget(Exception):
    """What a template ran out of."""


class Budget:
    """What one render has used; every method raises OverBudget."""

    def __init__(self, given: object) -> None:
        self.deadline = time.thread_time() + SECONDS  # the processor's: on a busy machine the clock's say little
        self.left, self.steps = BYTES, STEPS
        # Containers never change in here, so each is weighed once; holding them keeps their ids from being reused.
        self._weights: dict[int, tuple[object, int, int]] = {}
        self._depths: dict[int, int] = {}
        self.left += 16 * self.weigh(given)[1]

    def step(self, cost: int) -> str:
        self.steps -= cost
        if self.steps < 0:
            raise OverBudget(f"loops on, beyond {STEPS} steps")
        if time.thread_time() > self.deadline:
            raise OverBudget(f"takes more than {SECONDS:g} s")
        return ""

    def reserve(self, size: int) -> None:
        """Bytes that an operation will create."""
        if size > self.left:
            raise OverBudget("makes more text than fits its size budget")

    def charge(self, value: Any) -> Any:
        """The value, after counting it as newly created."""
        self.step(1)
        self.left -= sys.getsizeof(value)
        self.reserve(0)
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise OverBudget("computes with numbers that are too large")
        if isinstance(value, CONTAINERS):
            self.weigh(value)
        return value

    def gather(self, value: Any) -> Any:
        """The values that an iterator has yet to give, as a list; anything else as it is."""
        if not isinstance(value, Iterator):
            return value
        gathered, count = [], 0
        for part in value:
            count += self.weigh(part)[0]
            if count > NODES:
                raise OverBudget("builds a value that is too large")
            gathered.append(self.charge(part))
        return self.charge(gathered)

    def weigh(self, value: Any) -> tuple[int, int]:
        """(nodes, characters) of a value written out in full, parts that are shared counted each time."""
        if isinstance(value, str):
            return 1, len(value)
        if isinstance(value, int):
            return 1, value.bit_length() // 3 + 1
        if not isinstance(value, CONTAINERS):
            # These may hold anything, themselves included: they can be kept, but never be written out.
            return 1, _UNWRITABLE if isinstance(value, Namespace | Cycler) else 64
        if known := self._weights.get(id(value)):
            return known[1:]
        parts: Any = (part for item in value.items() for part in item) if isinstance(value, dict) else value
        count, characters, depth = 1, 2, 1
        for part in parts:
            inner = self.weigh(part)
            depth = max(depth, 1 + self._depths.get(id(part), 0))
            count, characters = count + inner[0], characters + inner[1] + 4
            if count > NODES:
                raise OverBudget("builds a value that is too large")
        if depth > DEPTH:
            raise OverBudget("builds a value that is nested too deeply")
        self._weights[id(value)] = value, count, characters
        self._depths[id(value)] = depth
        return count, characters

    def text(self, value: Any) -> str:
        """str(value), weighed first."""
        if isinstance(value, str):
            return value
        self.reserve(2 * self.weigh(value)[1])
        return str(value)


current: ContextVar[Budget] = ContextVar("budget")  # of the render under way
