"""Noise: the one rule by which two models cannot be told apart, for `pronk divergence` and the verdicts of a report.

A divergence is held against a noise floor: how far a model lies from itself when only its rounding changes
(divergence.py). Why it may be `TIMES` floors: docs/quality.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

TIMES = 3.0  # the noise floor
RULE = (
    f"Two models cannot be told apart on a text where the mean KLD between them is under {TIMES:g} times the noise "
    "floor (how far a model lies from itself when only its rounding changes), even with twice the standard error of "
    "both against it; they differ where it is over that with twice the error in its favour; and between the two, only "
    "more text tells."
)
LOWER = (
    "The floor taken is the lower of the two models': a coarse model has a high floor of its own, which makes it no "
    "closer to anything."
)

Standing = Literal["within", "above", "unclear", "unknown"]  # of noise; the last: there is no standard error


class Mean(NamedTuple):
    """Of a figure of predictions, in nats; the standard error of a single window's is not known."""

    value: float
    error: float | None

    @property
    def upper(self) -> float:
        """With a standard error to spare."""
        return self.value + (self.error or 0.0)

    @property
    def clear(self) -> bool | None:
        """Whether it is more than chance, on either side of 0: over two standard errors. None: nobody knows."""
        return None if self.error is None else abs(self.value) > 2 * self.error


def over_windows(means: Sequence[float], rows: Sequence[int]) -> Mean:
    """The mean over all predictions, of which there are `rows` in each window, with these `means`.

    Predictions of one window share their context, so what goes wrong in it goes wrong for many of them at once: they
    are no independent samples. Windows lie apart. So the error is that of a mean over windows, which may be unequal in
    length (the cluster-robust estimate).
    """
    count, windows = sum(rows), len(rows)
    value = math.fsum(n * mean for n, mean in zip(rows, means, strict=True)) / count
    if windows < 2:
        return Mean(value, None)
    squares = math.fsum((n * (mean - value)) ** 2 for n, mean in zip(rows, means, strict=True))
    return Mean(value, math.sqrt(windows / (windows - 1) * squares) / count)


def mean(values: Sequence[float]) -> Mean:
    """Of values that are independent samples, each of a window of its own."""
    return over_windows(values, [1] * len(values))


def paired(own: Sequence[float], base: Sequence[float], rows: Sequence[int]) -> Mean:
    """By how much `own` is over `base` on the same windows: a hard window is hard for both, and is no error of that."""
    return over_windows([x - y for x, y in zip(own, base, strict=True)], rows)


def standing(found: Mean, floors: Iterable[Mean]) -> Standing:
    """Where a divergence lies beside the lowest of `floors`, of which there is one at least."""
    floor = min(floors, key=lambda floor: floor.value)
    if found.error is None:
        return "unknown"
    border, reach = TIMES * floor.value, 2 * math.hypot(found.error, TIMES * (floor.error or 0.0))
    if found.value + reach <= border:
        return "within"
    return "above" if found.value - reach >= border else "unclear"
