"""A matrix in one of GGUF's block types, whose rounding is learned: what of it is moved, and what comes of that.

Each weight has an offset, added before it is rounded: half of a code up or down, at most, so that it becomes the number
above or below. Each group of weights has a range, whose ends move by shares of half of it (of the whole, where the type
has no minimum). So AutoRound has it (arXiv 2309.05516, section 3.2); but ranges begin where plain rounding found them
best, not at the largest and the smallest weight, and may grow as well. While nothing has moved, this is plain rounding.

Whatever is rounded on the way (codes, scales in float16, the K types' numbers) has the gradient of what it was before
(arXiv 1308.3432); codes at their limits have none. What `forward` gives is, to the bit, what a file gives back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from pronk.calibrate.gptq import Rounded
from pronk.calibrate.grids import RULES

FARTHEST = 0.5  # that anything moves


class _Parts(NamedTuple):
    codes: Tensor  # [N, G, weights of a group]
    step: Tensor  # [N, G], as it is stored
    minimum: Tensor | None  # [N, G], likewise
    n: Tensor  # [N, G]
    m: Tensor  # [N, G]


class Rounding(nn.Module):
    """Of `weights` [N, K], beginning with `plain`, as gptq.rounded gives it without inputs."""

    def __init__(self, weights: Tensor, plain: Rounded) -> None:
        super().__init__()
        self.plain, self.rule = plain, RULES[plain.kind]
        self.weights = weights.unflatten(1, (-1, self.rule.group))
        self.d, self.dmin = self._of_groups(plain.d), self._of_groups(plain.dmin)
        self.step, self.minimum = self.d, self.dmin
        if self.rule.scales:
            n, m = (torch.from_numpy(numbers.astype(np.float32)) for numbers in (plain.n, plain.m))
            self.step, self.minimum = self.d * n, -(self.dmin * m)
        self.offset = nn.Parameter(torch.zeros_like(self.weights))
        self.top = nn.Parameter(torch.zeros_like(self.step))
        self.bottom = nn.Parameter(torch.zeros_like(self.step)) if self.rule.minimum else None

    def forward(self) -> Tensor:
        """[N, K]"""
        parts = self._parts()
        made = parts.codes * parts.step[..., None]
        if parts.minimum is not None:
            made = made + parts.minimum[..., None]
        return made.flatten(1)

    @torch.no_grad()
    def rounded(self) -> Rounded:
        parts = self._parts()
        codes = parts.codes.flatten(1).to(torch.int8).numpy()
        if self.rule.scales:
            n, m = (numbers.to(torch.int16).numpy() for numbers in (parts.n, parts.m))
            return replace(self.plain, codes=codes, n=n, m=m)
        made = replace(self.plain, codes=codes, d=parts.step.half().numpy())
        return made if parts.minimum is None else replace(made, dmin=parts.minimum.half().numpy())

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """Everything by `rate`, against its gradient's sign."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=rate).clamp_(-FARTHEST, FARTHEST)
                parameter.grad = None

    def _of_groups(self, heads: Any) -> Tensor:
        """float16 [N, B] to float32 [N, G]"""
        numbers = torch.from_numpy(heads.astype(np.float32))
        return numbers.repeat_interleave(self.rule.block // self.rule.group, 1)

    def _parts(self) -> _Parts:
        rule, minimum = self.rule, None
        m = torch.zeros_like(self.step)
        if self.bottom is None:
            step, n = _stored(self.step * (1 + self.top), self.d, rule.scales)
            code = self.weights
        else:
            step, n = _stored(self.step * (1 + (self.top - self.bottom) / 2), self.d, rule.scales)
            lowest = self.minimum + self.bottom * self.step * (rule.high / 2)
            minimum, m = _stored(lowest, -self.dmin, (0, rule.scales[1]) if rule.scales else None)
            code = self.weights - minimum[..., None]
        code = (code * _inverse(step)[..., None] + self.offset).clamp(rule.low, rule.high)
        return _Parts(_through(code, code.round()), step, minimum, n, m)


def _stored(wanted: Tensor, head: Tensor, bounds: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """What can be stored of it, in float16 or as a whole number of heads, and that number."""
    if bounds is None:
        return _through(wanted, wanted.half().float()), torch.ones_like(wanted)
    number = (wanted * _inverse(head)).detach().round().clamp(*bounds)
    return _through(wanted, head * number), number


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0"""
    return 1 / torch.where(x != 0, x, torch.inf)


def _through(x: Tensor, instead: Tensor) -> Tensor:
    return cast(Tensor, _Through.apply(x, instead))


class _Through(torch.autograd.Function):
    """Another value in the place of x; the gradient goes through to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, instead: Tensor) -> Tensor:
        return instead.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
