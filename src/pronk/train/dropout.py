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
    """Which elements of x to drop, each with probability `share`: on CPUs indices [D], elsewhere a mask like x.

    D depends on x's size alone: indices that fall behind x's end are its number of elements. That D are too few to
    reach the end happens once in a thousand million times; the rest is then kept.
    """
    if x.device.type != "cpu":
        return torch.rand_like(x, dtype=torch.float32) < share
    expected = x.numel() * share
    enough = int(expected + 6 * expected**0.5) + 8
    kept = torch.rand(enough, dtype=torch.float32).neg_().log1p_().div_(math.log1p(-share))  # before each that is not
    return kept.long().add_(1).cumsum(0).sub_(1).clamp_(max=x.numel())


def without(x: Tensor, dropped: Tensor | None) -> Tensor:
    """A copy of x with zeros where `drop` says; x itself where nothing is dropped."""
    if dropped is None:
        return x
    if dropped.dtype == torch.bool:
        return x.masked_fill(dropped, 0)
    out = x.new_empty(x.numel() + 1)  # one more, for indices behind the end
    out[:-1].view(x.shape).copy_(x)
    return out.index_fill_(0, dropped, 0)[:-1].view(x.shape)
