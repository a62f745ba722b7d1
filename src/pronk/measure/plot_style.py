"""What plots and tables of a report share: values with how far they reached, and a colour for each name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any

# Okabe and Ito's colours, which people with any of the common colour blindnesses tell apart, in an order that keeps
# neighbours far from each other; yellow, which vanishes on paper, is darker, and a purple is added. The original is
# grey: it is the ground.
ORIGINAL = "#7A8190"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B5A642", "#AA3377")


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
        return max(self.value, self.value if self.high is None else self.high)


def colours(
    names: Sequence[str], original: str | None = None, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """A colour for each name; the original's is the grey one. After eight the palette begins again.

    `known`: the colours that some have elsewhere. They keep these, and no other gets one while there is a free one.
    """
    have = {name: known[name] for name in names if name in known} | ({} if original is None else {original: ORIGINAL})
    others = [name for name in dict.fromkeys(names) if name not in have]
    free = [colour for colour in PALETTE if colour not in have.values()]
    return have | dict(zip(others, cycle(free or PALETTE), strict=False))


def as_value(given: Any) -> Value | None:
    """A Value of a number, or of {"median", "min", "max"}; None of None."""
    if isinstance(given, Mapping):
        return Value(given["median"], given["min"], given["max"])
    return None if given is None else Value(given)
