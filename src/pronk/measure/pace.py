"""Pace: how far a series of steps has come, of all that it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress

_TICKS = 100  # a unit of cost: progress counts in whole numbers


class Pace:
    """`costs`: of each step, in any unit.

    What a unit takes differs from step to step and is not known before: nobody is told beforehand how long all of it
    takes. Progress says how much is done.
    """

    def __init__(self, costs: Mapping[str, float], progress: Progress | None = None) -> None:
        self._costs, self._progress, self._done = dict(costs), progress, 0.0
        self._total = sum(costs.values())

    def say(self, what: str, more: float = 0.0) -> None:
        """What is being done now; `more` of it than of all finished steps."""
        if self._progress:
            total = max(1, round(_TICKS * self._total))
            self._progress(what, min(round(_TICKS * (self._done + more)), total - 1), total)

    @contextmanager
    def step(self, names: str | Sequence[str], what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Around one step, or several that are done at once. Gives a Progress for what is inside of it."""
        cost = sum(self._costs.get(name, 0.0) for name in ([names] if isinstance(names, str) else names))
        self.say(what)
        yield lambda _, done, total: self.say(what, cost * done / max(total, 1))
        self._done += cost
        self.say(what)
