"""Figures as people read them, in reports and in what the command line prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pronk.measure.figures import Value

NONE = "—"


def digits(value: float, count: int = 3) -> str:
    """`count` digits that count, never in powers of ten while fewer than six zeros do: 1,234, 45.6, 0.00289."""
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{count - 1}e}"
    places = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def count(value: float) -> str:
    """Of things that are counted, or half of one: 31, 34.5."""
    return f"{value:,.1f}".removesuffix(".0")


def percent(share: float, places: int = 1) -> str:
    """97.1%; nearer to 0 or to 1 with as many digits as tell it from them."""
    while places < 4 and 0 < share < 1 and f"{100 * share:.{places}f}" in (f"{0:.{places}f}", f"{100:.{places}f}"):
        places += 1
    return f"{100 * share:.{places}f}%"


def error(value: float | None) -> str:
    """± 0.26: a standard error, in two digits."""
    return f"± {digits(value, 2)}" if value else ""


def change(ratio: float, error: float | None) -> str:
    """+0.62% ± 0.18%: of a ratio and the standard error of its logarithm."""
    return f"{100 * (ratio - 1):+.2f}%" + (f" ± {100 * ratio * error:.2f}%" if error else "")


def spread(value: Value | None) -> str:
    """16.8 to 19.0; nothing where no spread is known, or there is none."""
    return " to ".join(map(digits, value.ends)) if value and value.ends else ""


def scale(values: list[float | None]) -> tuple[str, float]:
    """One unit for all sizes of a table: (its name, its bytes)."""
    largest = max((value for value in values if value is not None), default=0.0)
    return next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= size), ("B", 1.0))


def faster(times: Value | None, *, ranged: bool = False) -> str:
    """What a ratio of speeds, own to the original's, is called: 1.9× faster, 4% slower, no clear difference.

    No difference is clear where the ratio fell on both sides of 1 in the rounds measured; `ranged` says how far.
    """
    if times is None or times.value <= 0:
        return ""
    if times.low is not None and times.high is not None and times.low <= 1 <= times.high:
        return "no clear difference" + (f" ({digits(times.low, 2)} to {digits(times.high, 2)}×)" if ranged else "")
    gain, word = (times.value, "faster") if times.value >= 1 else (1 / times.value, "slower")
    return f"{gain:.1f}× {word}" if gain >= 1.15 else f"{100 * (gain - 1):.0f}% {word}" if gain > 1.005 else "as fast"


def smaller(own: float | None, base: float | None) -> str:
    """What a size is called beside the original's: 53% smaller, 2.1× larger, the same."""
    if own is None or not base or own < 0:
        return ""
    change = own / base - 1
    if abs(change) < 0.005:
        return "the same"
    by = f"{change + 1:.1f}×" if change >= 1 else f"{100 * abs(change):.0f}%"
    return f"{by} {'larger' if change > 0 else 'smaller'}"


def listed(items: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def plain(given: str, most: int = 60) -> str:
    """A name that somebody else chose, as one short line of characters that can be seen."""
    shown = "".join(c if c.isprintable() else "�" for c in given)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def name_of(variant: Mapping[str, Any]) -> str:
    return plain(variant["name"]) or "unnamed"
