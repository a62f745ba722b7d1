"""Dropout as what is left out, which is little, instead of as what is kept.

Between two elements that are dropped lies a number of others that is distributed geometrically: at a share of 0.05 a
twentieth of the random numbers is enough, and of memory a tenth of what x takes. torch draws a number for each element,
one by one on most CPUs, which was a tenth of a training step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def drop(x: Tensor, share: float) -> Tensor:
    """Which elements of x to drop, each with probability `share`: on CPUs indices [D], elsewhere a mask like x."""
    if x.device.type != "cpu":
        return torch.rand_like(x, dtype=torch.float32) < share
    count, rate = x.numel(), -math.log1p(-share)
    expected = count * share
    found = torch.empty(0, dtype=torch.int64)
    while not len(found) or found[-1] < count:  # once, but for one time in a thousand million
        kept = torch.empty(int(expected + 6 * expected**0.5) + 8).exponential_(rate).long()  # before each that is not
        found = torch.cat((found, (kept + 1).cumsum(0) + (found[-1] if len(found) else -1)))
    return found[found < count]


def without(x: Tensor, dropped: Tensor | None) -> Tensor:
    """A copy of x with zeros where `drop` says; x itself where nothing is dropped."""
    if dropped is None:
        return x
    if dropped.dtype == torch.bool:
        return x.masked_fill(dropped, 0)
    return x.flatten().index_fill(0, dropped, 0).view_as(x)
