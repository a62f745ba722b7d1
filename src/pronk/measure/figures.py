"""Figures of a report: found by their path, with how far they reached, and one beside another.

The schema has been asked before: what a path does not lead to is absent or null, and reads as None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

Path = str | Sequence[str | tuple[str, Any]]  # "latency.decode.0.tok_s"; a tuple where a key may have a dot in it


@dataclass(frozen=True)
class Value:
    """A number and how far it reached: `low` and `high` are None where nothing is known of that."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Where an error bar begins and ends, with the value between them; None where there is nothing to show."""
        if self.low is None or self.high is None or self.low == self.high:
            return None
        return min(self.low, self.value), max(self.high, self.value)

    @property
    def top(self) -> float:
        return self.ends[1] if self.ends else self.value

    def in_units(self, unit: float) -> Value:
        low, high = (None if end is None else end / unit for end in (self.low, self.high))
        return Value(self.value / unit, low, high)


def at(given: Any, path: Path) -> Any:
    """What lies there. A step into a list is a place, or (key, value) of the entry that is meant."""
    for step in path.split(".") if isinstance(path, str) else path:
        if isinstance(step, tuple):
            given = next((one for one in given or () if one[step[0]] == step[1]), None)
        elif isinstance(given, list):
            given = given[int(step)] if int(step) < len(given) else None
        elif given is not None:
            given = given.get(step)
    return given


def as_value(given: Any) -> Value | None:
    """Of a number, or of {"median", "min", "max"}; None of None."""
    if isinstance(given, Mapping):
        return Value(given["median"], given["min"], given["max"])
    return None if given is None else Value(given)


def value(given: Any, path: Path) -> Value | None:
    return as_value(at(given, path))


def number(given: Any, path: Path) -> float | None:
    """A number, or the median of a summary."""
    found = value(given, path)
    return None if found is None else found.value


def ratio(own: Any, base: Any) -> Value | None:
    """own / base. Where both have the same number of rounds, round by round: what slowed a round slowed both.

    Between two middle rounds lies their geometric mean: a rate and the time that it is the inverse of say the same.
    """
    ours, theirs = (one.get("rounds", ()) if isinstance(one, Mapping) else () for one in (own, base))
    if len(ours) == len(theirs) > 1:
        each = [x / y for x, y in zip(ours, theirs, strict=True)]
        low, high = median_low(each), median_high(each)
        return Value(low if low == high else math.sqrt(low) * math.sqrt(high), min(each), max(each))
    x, y = as_value(own), as_value(base)
    if x is None or y is None:
        return None
    if x.low is None or x.high is None or not y.low or not y.high:
        return Value(x.value / y.value)
    return Value(x.value / y.value, x.low / y.high, x.high / y.low)
