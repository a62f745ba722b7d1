"""Reading a report.json that may lack anything: what is absent, null or of another type reads as None or as empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_high, median_low
from typing import Any

from pronk.measure.plot_style import Value, as_value, finite


def at(given: Any, *path: str | int) -> Any:
    """The value at a path of keys and places; None where the path leads nowhere."""
    for step in path:
        if isinstance(given, Mapping):
            given = given.get(str(step))
        elif isinstance(given, list) and isinstance(step, int) and -len(given) <= step < len(given):
            given = given[step]
        else:
            return None
    return given


def number(given: Any, *path: str | int) -> float | None:
    """A finite number, or the median of a summary."""
    found = at(given, *path)
    return finite(found.get("median") if isinstance(found, Mapping) else found)


def value(given: Any, *path: str | int) -> Value | None:
    """A number with the spread of its rounds, if it has one."""
    return as_value(at(given, *path))


def text(given: Any, *path: str | int) -> str:
    """A string, or a number as one; else the empty one."""
    found = at(given, *path)
    if isinstance(found, str):
        return found
    return "" if finite(found) is None else f"{found:,}" if abs(found) >= 10_000 else f"{found}"


def entries(given: Any, *path: str | int) -> list[Mapping[str, Any]]:
    """The objects of a list, whatever else is in it."""
    found = at(given, *path)
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def numbers(given: Any, *path: str | int) -> list[float]:
    """A list of finite numbers; empty where any of them is none."""
    found = at(given, *path)
    known = [finite(one) for one in found] if isinstance(found, list) else []
    return [one for one in known if one is not None] if None not in known else []


def ratio(own: Any, base: Any) -> Value | None:
    """own / base. Where both have the same number of rounds, round by round: what slowed a round slowed both.

    Between two middle rounds lies their geometric mean: a rate and the time that it is the inverse of say the same.
    """
    ours, theirs = numbers(own, "rounds"), numbers(base, "rounds")
    if len(ours) == len(theirs) > 1 and min(*ours, *theirs) > 0:
        each = [x / y for x, y in zip(ours, theirs, strict=True)]
        low, high = median_low(each), median_high(each)
        return Value(low if low == high else math.sqrt(low) * math.sqrt(high), min(each), max(each))
    x, y = value(own), value(base)
    if x is None or y is None or not y.value:
        return None
    if x.low is None or x.high is None or not y.low or not y.high:
        return Value(x.value / y.value)
    return Value(x.value / y.value, x.low / y.high, x.high / y.low)
