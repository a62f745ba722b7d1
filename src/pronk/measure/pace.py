"""Pace: how far a series of steps has come, of all that it costs, and how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress

Note = Callable[[str], None]
_TICKS = 100  # a unit of cost: progress counts in whole numbers


class Pace:
    """`costs`: of each step, in any unit. `note` is told once how long all of it takes, as soon as that can be said."""

    def __init__(
        self, costs: Mapping[str, float], progress: Progress | None = None, note: Note = lambda line: None
    ) -> None:
        self._costs, self._progress, self._note, self._done = dict(costs), progress, note, 0.0
        self._total = sum(costs.values())
        self._known = False

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
        begun = time.perf_counter()
        yield lambda _, done, total: self.say(what, cost * done / max(total, 1))
        self.learn(time.perf_counter() - begun, cost)
        self._done += cost
        self.say(what)

    def learn(self, seconds: float, cost: float) -> None:
        """What something of known cost took."""
        if not self._known and cost:
            self._known = True
            left = (self._total - self._done) * seconds / cost
            self._note(
                f"this takes about {max(left, 1):.0f} s" if left < 90 else f"this takes about {left / 60:.0f} min"
            )
