"""Reward modelling: one number for a text, higher for the answer that people like better (2009.01325, 2307.09288).

    r(x, y) = score . h, of the last token's last hidden state,   loss = -log sigmoid(r(chosen) - r(rejected) - margin)

which is Bradley and Terry's model of who wins. Both answers to a prompt are runs of one batch. The loss knows
differences alone: `center_rewards` (r(chosen) + r(rejected))^2 keeps the numbers themselves around zero (2312.09244).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.errors import BadRequest
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import of_texts
from pronk.train.data.examples import Encoder, Example, Pair
from pronk.train.data.records import Record
from pronk.train.objectives.objective import Objective

_MOST = 1e9  # of a coefficient, so that products are still float32


@dataclass(frozen=True)
class Answers:
    """The answers of P pairs as a micro-batch."""

    batch: TorchBatch  # 2P runs: chosen and rejected of the first pair, of the second, ...; wants the last row of each
    margins: Tensor  # [P]
    tokens: int

    @property
    def weight(self) -> int:
        return len(self.margins)

    @classmethod
    def of(cls, pairs: Sequence[Pair], device: torch.device) -> Answers:
        texts = [answer.ids.tolist() for pair in pairs for answer in pair.answers.values()]
        lengths = [len(text) for text in texts]
        margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32, device=device)
        return cls(of_texts(texts, np.cumsum(lengths) - 1, device), margins, sum(lengths))


@dataclass(frozen=True)
class Reward(Objective):
    """Its weight is in pairs; what it shows are rewards and their margins, under the names that DPO has. The model must
    have a score head. `center_rewards` is TRL's center_rewards_coefficient."""

    name = "reward"
    kinds = ("preference",)
    marked = "scored"

    center_rewards: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.center_rewards <= _MOST:
            raise BadRequest(f"center_rewards must be from 0 to {_MOST:g}, not {self.center_rewards!r}")

    @property
    def slack(self) -> float:
        return 20 * math.log(2)  # times what indifference costs

    def encode(self, record: Record, encoder: Encoder) -> list[Pair]:
        """Marked is the token whose hidden state is scored: the last."""
        margin = record.values.get("margin", 0.0)
        return [Pair(_at_last(one.chosen), _at_last(one.rejected), margin) for one in encoder.preference(record.values)]

    def collate(self, examples: Sequence[Pair], device: torch.device) -> Answers:
        return Answers.of(examples, device)

    def loss(self, model: Llama, batch: Answers) -> tuple[Tensor, Mapping[str, float]]:
        rewards = _rewards(model, batch)
        return losses(rewards, batch.margins, self.center_rewards).sum(), _seen(rewards.detach())


def losses(rewards: Tensor, margins: Tensor, center: float = 0.0) -> Tensor:
    """[P], of rewards [P, 2] of chosen and rejected answers, and by how much they are to differ [P]."""
    chosen, rejected = rewards.unbind(-1)
    cost = -F.logsigmoid(chosen - rejected - margins)
    return cost + center * (chosen + rejected).square() if center else cost


def _rewards(model: Llama, batch: Answers) -> Tensor:
    """[P, 2], summed in float32 whatever the blocks are computed in: near 100, bfloat16 knows halves."""
    last = model.hidden(batch.batch)[: 2 * batch.weight].float()  # [2P, C]
    return (last * model.score.weight[0]).sum(-1).view(-1, 2)


def _seen(rewards: Tensor) -> dict[str, float]:
    """Sums. Rewards that are equal are half right."""
    chosen, rejected = rewards.unbind(-1)
    margins = chosen - rejected
    sums = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": (margins.sign() + 1) / 2,
    }
    return dict(zip(sums, torch.stack(list(sums.values())).sum(-1).tolist(), strict=True))


def _at_last(example: Example) -> Example:
    return replace(example, loss_mask=np.arange(len(example)) == len(example) - 1)
