"""Learning rates: up from zero over the warm-up, and then down as a cosine, as a line, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pronk.errors import BadRequest

Shape = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """`steps` in all, of which `warmup` first; `floor`: the share of the peak that is left at the end."""

    peak: float
    steps: int
    warmup: int = 0
    shape: Shape = "cosine"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise BadRequest(f"the learning rate must be a positive number, not {self.peak!r}")
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise BadRequest(f"a warm-up of {self.warmup} steps does not fit into {self.steps}")
        if self.shape not in get_args(Shape):
            raise BadRequest(f"the schedule must be one of {', '.join(get_args(Shape))}, not {self.shape!r}")
        if not 0 <= self.floor <= 1:
            raise BadRequest(f"the schedule ends at a share of the learning rate from 0 to 1, not {self.floor!r}")

    def at(self, step: int) -> float:
        """The rate of step 0, 1, ...: the first is 1 / warmup of the peak, as no step is to be wasted on zero."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)
