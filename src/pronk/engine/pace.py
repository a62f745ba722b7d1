"""Pace: how many tokens a pass may have to take no longer than so many seconds, from what the last ones took."""

from __future__ import annotations

from collections import deque

_LEAST = 32  # tokens: fewer cost about as much, for all weights are read for them too
_FIRST = 128  # before anything was measured
_PASSES = 5  # of which the middle one counts: a machine that stands still for a moment is not slow


class Pace:
    """Says only in how many passes prompts are read, never what follows them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._taken: deque[float] = deque(maxlen=_PASSES)  # seconds a token

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= _LEAST:
            self._taken.append(seconds / tokens)

    @property
    def tokens(self) -> int:
        if not self._taken:
            return _FIRST
        middle = sorted(self._taken)[len(self._taken) // 2]  # importing statistics takes 8 ms of each start
        return max(_LEAST, int(self._seconds / max(middle, 1e-9)))
