"""Reading what a report.json holds, of which the schema has been asked: what is absent or null reads as None, or as
empty."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median_high, median_low
from typing import Any

from pronk.measure import schema
from pronk.measure.plot_style import Value, as_value

# Control characters but newlines and tabs, what turns the direction of writing, halves of surrogates, and what is no
# character: XML may not hold them, or no reader sees them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def read(path: Path, shape: Any, *, anew: str) -> Any:
    """A report as it may be drawn: what cannot be seen in its texts is shown by its number. Raises BadFile."""
    return _visible(schema.read(path, shape, anew=anew))


def _visible(given: Any) -> Any:
    if isinstance(given, str):
        return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), given)
    if isinstance(given, dict):
        return {_visible(key): _visible(value) for key, value in given.items()}
    return [_visible(value) for value in given] if isinstance(given, list) else given


def at(given: Any, *path: str | int) -> Any:
    """The value at a path of keys and places; None where the path leads nowhere."""
    for step in path:
        if given is None:
            return None
        given = given.get(step) if isinstance(step, str) else given[step] if step < len(given) else None
    return given


def number(given: Any, *path: str | int) -> float | None:
    """A number, or the median of a summary."""
    found: Any = at(given, *path)
    own: float | None = found["median"] if isinstance(found, Mapping) else found
    return own


def value(given: Any, *path: str | int) -> Value | None:
    """A number with the spread of its rounds, if it has one."""
    return as_value(at(given, *path))


def text(given: Any, *path: str | int) -> str:
    """A string, or a number as one; else the empty one."""
    found = at(given, *path)
    if found is None or isinstance(found, str):
        return found or ""
    return f"{found:,}" if abs(found) >= 10_000 else f"{found}"


def entries(given: Any, *path: str | int) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return at(given, *path) or []


def numbers(given: Any, *path: str | int) -> list[float]:
    """A list of numbers; empty where any of them is null."""
    found = at(given, *path) or []
    return [] if None in found else found


def ratio(own: Any, base: Any) -> Value | None:
    """own / base. Where both have the same number of rounds, round by round: what slowed a round slowed both.

    Between two middle rounds lies their geometric mean: a rate and the time that it is the inverse of say the same.
    """
    ours, theirs = (numbers(one, "rounds") if isinstance(one, Mapping) else [] for one in (own, base))
    if len(ours) == len(theirs) > 1:
        each = [x / y for x, y in zip(ours, theirs, strict=True)]
        low, high = median_low(each), median_high(each)
        return Value(low if low == high else math.sqrt(low) * math.sqrt(high), min(each), max(each))
    x, y = value(own), value(base)
    if x is None or y is None:
        return None
    if x.low is None or x.high is None or not y.low or not y.high:
        return Value(x.value / y.value)
    return Value(x.value / y.value, x.low / y.high, x.high / y.low)
