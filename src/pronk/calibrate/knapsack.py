"""Which parts of a model should lose bits, so that the most bytes are saved for a given harm: a knapsack.

Of each part's ways down (16 bits, 8, 4) only those on the lower convex hull of harm over size are of use: each of its
steps costs more harm a byte than the one before. Taking all parts' steps in the order of harm a byte saved then gives,
wherever one stops, the smallest model of all that do as little harm (what Lagrange multipliers find), and each such
model is no larger than the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class Part:
    """Matrices that have one format."""

    name: str  # that all its tensors' names begin with
    nbytes: Mapping[str, int]  # by format


@dataclass(frozen=True)
class Step:
    """A part given fewer bits: what that costs beyond what it had before, and what it saves."""

    part: str
    format: str
    harm: float  # mean KLD
    saved: int  # bytes


class _Point(NamedTuple):
    nbytes: int
    harm: float
    format: str


def in_order(parts: Sequence[Part], wide: str, harms: Mapping[str, Mapping[str, float]]) -> list[Step]:
    """All steps down from `wide` that are of use, those that do the least harm a byte first. `harms`: of each part in
    each smaller format alone."""
    steps = (step for part in parts for step in _steps(part, wide, harms[part.name]))
    return sorted(steps, key=lambda step: step.harm / step.saved)


def _steps(part: Part, wide: str, harms: Mapping[str, float]) -> list[Step]:
    hull = [_Point(part.nbytes[wide], 0.0, wide)]
    for format in sorted(harms, key=lambda format: (-part.nbytes[format], harms[format])):
        # Measured harm may come out below nothing; a part must not seem to heal what others have done.
        point = _Point(part.nbytes[format], max(harms[format], 0.0), format)
        if point.nbytes == hull[-1].nbytes and point.harm >= hull[-1].harm:  # short rows, filled up
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [
        Step(part.name, small.format, small.harm - large.harm, large.nbytes - small.nbytes)
        for large, small in pairwise(hull)
    ]


def _slope(large: _Point, small: _Point) -> float:
    """Harm a byte saved."""
    return (small.harm - large.harm) / (large.nbytes - small.nbytes)
