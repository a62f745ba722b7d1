"""What training is after: what a micro-batch is made of its examples, and what it costs.

The loop knows nothing of it but a sum and what that is divided by: the loss of a step is the sum of its micro-batches'
costs over the sum of their weights, however examples were dealt out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Example
from pronk.train.objectives.loss import cross_entropy


class Work(Protocol):
    """A micro-batch on its device."""

    @property
    def tokens(self) -> int:
        """That are read."""

    @property
    def weight(self) -> int:
        """What its cost counts for: learned tokens, or pairs."""


class Objective(Protocol):
    slack: float  # how far over four times its recent mean a loss may be before it is taken for a leap

    def work(self, examples: Sequence[Any], device: torch.device) -> Work:
        """For `cost` of the same objective."""

    def cost(self, model: Llama, work: Any) -> tuple[Tensor, Mapping[str, float]]:
        """The sum over the micro-batch, with its gradient; and sums of whatever else is to be seen of it."""


class Imitation:
    """To foretell each learned token: its negative log-likelihood, in nats."""

    slack = 1.0

    def work(self, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        return MicroBatch.of(examples, device)

    def cost(self, model: Llama, work: MicroBatch) -> tuple[Tensor, Mapping[str, float]]:
        hidden = model.hidden(work.batch)
        return cross_entropy(hidden.to(compute_type(hidden)), model.lm_head.weight, work.targets), {}
