"""Direct preference optimization (arXiv 2305.18290): to like one answer better than another, as people did.

    reward(y) = beta * (log p(y | x) - log p_ref(y | x)),      loss = -log sigmoid(reward(chosen) - reward(rejected))

Both answers to a prompt are runs of one batch. The reference is the model as it was before training (reference.py).

Two losses on the same pairs need none. With m the mean of log p over an answer's tokens:

    simpo    -log sigmoid(beta (m(chosen) - m(rejected)) - gamma)                                  (arXiv 2405.14734)
    orpo     -mean log p(prompt and chosen) - beta log sigmoid(o(chosen) - o(rejected)),      o = m - log(1 - e^m)
                                                                                                   (arXiv 2403.07691)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Encoder, Pair
from pronk.train.data.records import Record
from pronk.train.distributed import Group
from pronk.train.objectives.objective import Objective
from pronk.train.objectives.reference import Reference, of_texts, of_tokens

LossType = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"]
_WITHOUT_REFERENCE = ("simpo", "orpo")
_OF_MEANS = ("ipo", "simpo", "orpo")  # over an answer's tokens
_GAMMA = 0.5
_BETA = 1e9  # ipo squares what it divides by it


@dataclass(frozen=True)
class PairBatch:
    pairs: tuple[Pair, ...]  # P
    answers: MicroBatch  # 2P runs: chosen and rejected of the first pair, of the second, ...
    lengths: tuple[int, ...]  # [2P], tokens of each answer
    of_answer: tuple[NDArray[np.bool_], ...]  # [2P]: of what is foretold of each, which is the answer's

    @property
    def tokens(self) -> int:
        return self.answers.tokens

    @property
    def weight(self) -> int:
        return len(self.pairs)

    @classmethod
    def of(cls, pairs: Sequence[Pair], device: torch.device, *, prompts: bool = False) -> PairBatch:
        """`prompts`: of chosen texts all tokens are foretold."""
        answers = [answer for pair in pairs for answer in pair.answers.values()]
        lengths = tuple(answer.targets for answer in answers)
        foretold = [
            replace(answer, loss_mask=np.arange(len(answer)) > 0) if prompts and number % 2 == 0 else answer
            for number, answer in enumerate(answers)
        ]
        of_answer = tuple(one.loss_mask[own.loss_mask] for one, own in zip(answers, foretold, strict=True))
        return cls(tuple(pairs), MicroBatch.of(foretold, device), lengths, of_answer)


@dataclass(frozen=True)
class DPO(Objective):
    """Names and defaults of its settings are TRL's. Its weight is in pairs; what it shows are rewards, their margins,
    and log-likelihoods (nats).

    `loss_type`: sigmoid (arXiv 2305.18290), hinge (2305.10425), ipo (2310.12036, whose tau is `beta`), simpo or orpo
    (whose lambda is `beta`). `label_smoothing`, for sigmoid and simpo: how probable it is that a record has its answers
    the wrong way round. `simpo_gamma`: by how much simpo wants the chosen answer to be better.
    """

    name = "dpo"
    kinds = ("preference",)

    beta: float = 0.1  # the larger, the dearer is each nat away from the reference
    label_smoothing: float = 0.0
    loss_type: LossType = "sigmoid"
    simpo_gamma: float = _GAMMA

    def __post_init__(self) -> None:
        if not 1 / _BETA <= self.beta <= _BETA:
            raise BadRequest(f"beta must be from {1 / _BETA:g} to {_BETA:g}, not {self.beta!r}")
        if not 0 <= self.label_smoothing < 0.5:
            raise BadRequest(f"label_smoothing must be from 0 to less than 0.5, not {self.label_smoothing!r}")
        if self.loss_type not in get_args(LossType):
            raise BadRequest(f"the loss must be one of {', '.join(get_args(LossType))}, not {self.loss_type!r}")
        if self.label_smoothing and self.loss_type not in ("sigmoid", "simpo"):
            raise BadRequest(f"label_smoothing is for the sigmoid loss and simpo; with {self.loss_type} leave it out")
        if not 0 <= self.simpo_gamma <= _BETA:
            raise BadRequest(f"simpo_gamma must be from 0 to {_BETA:g}, not {self.simpo_gamma!r}")
        if self.simpo_gamma != _GAMMA and self.loss_type != "simpo":
            raise BadRequest(f"simpo_gamma is for the simpo loss; with {self.loss_type} leave it out")

    @cached_property
    def reference(self) -> Reference[Pair]:
        return Reference(_of_model)

    @property
    def refers(self) -> bool:
        return self.loss_type not in _WITHOUT_REFERENCE

    @property
    def without_reference(self) -> str:
        return "" if self.refers else f"{self.loss_type} needs no reference: no example is read before the first step."

    @property
    def slack(self) -> float:
        if self.loss_type == "orpo":
            return 1 + 20 * self.beta * math.log(2)  # of the likelihood, as sft has it, and of indifference
        return 20 * float(losses(torch.zeros(1, 2), (1, 1), self))  # times what indifference costs

    def encode(self, record: Record, encoder: Encoder) -> list[Pair]:
        encoder.unused.update(key for key in ("margin",) if key in record.values)
        return encoder.preference(record.values)

    def prepare(
        self, model: Llama, examples: Sequence[Pair], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        if self.refers:
            self.reference.prepare(model, examples, group, watch)

    def collate(self, examples: Sequence[Pair], device: torch.device) -> PairBatch:
        return PairBatch.of(examples, device, prompts=self.loss_type == "orpo")

    def loss(self, model: Llama, batch: PairBatch) -> tuple[Tensor, Mapping[str, float]]:
        if self.loss_type == "orpo":
            return self._odds(model, batch)
        if not self.refers:
            likelihoods = _log_likelihoods(model, batch)  # [P, 2]
            means = likelihoods / likelihoods.new_tensor(batch.lengths).view(-1, 2)
            return losses(likelihoods, batch.lengths, self).sum(), self._seen(likelihoods.detach(), means.detach())
        reference = self.reference.of(model, batch.pairs)
        likelihoods = _log_likelihoods(model, batch)  # [P, 2]
        ratios = likelihoods - reference
        return losses(ratios, batch.lengths, self).sum(), self._seen(likelihoods.detach(), ratios.detach())

    def _odds(self, model: Llama, batch: PairBatch) -> tuple[Tensor, Mapping[str, float]]:
        """Of chosen texts all tokens are there, and of these and of rejected ones which are the answer's."""
        rows = [len(mask) for mask in batch.of_answer]
        every = of_tokens(model, batch.answers, sum(rows))
        of_answer = torch.from_numpy(np.concatenate(batch.of_answer)).to(every.device)
        answers = [part.sum() for part in (every * of_answer).split(rows)]
        likelihoods = torch.stack(answers).view(-1, 2)
        whole = torch.stack([part.mean() for part in every.split(rows)[::2]])  # [P], of prompts and chosen answers
        costs = losses(likelihoods, batch.lengths, self) - whole
        means = likelihoods / likelihoods.new_tensor(batch.lengths).view(-1, 2)
        return costs.sum(), self._seen(likelihoods.detach(), means.detach())

    def _seen(self, likelihoods: Tensor, ratios: Tensor) -> dict[str, float]:
        """Sums, under TRL's names; without a reference rewards are of means. Rewards that are equal, as all are before
        training where there is one, are half right."""
        chosen, rejected = (self.beta * ratios).unbind(-1)
        margins = chosen - rejected
        sums = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": margins,
            "rewards/accuracies": (margins.sign() + 1) / 2,
            "logps/chosen": likelihoods[:, 0],
            "logps/rejected": likelihoods[:, 1],
        }
        return dict(zip(sums, torch.stack(list(sums.values())).sum(-1).tolist(), strict=True))


def losses(ratios: Tensor, lengths: Sequence[int], settings: DPO) -> Tensor:
    """[P], of log p - log p_ref of both answers [P, 2], nats, or of log p where there is no reference, and of how many
    tokens each has [2P]. Of orpo what is added to the likelihood of the chosen text."""
    beta, smoothing, loss = settings.beta, settings.label_smoothing, settings.loss_type
    if loss in _OF_MEANS:
        ratios = ratios / ratios.new_tensor(lengths).view(-1, 2)
    chosen, rejected = ratios.unbind(-1)
    if loss == "ipo":  # of sums its target would depend on the answers' lengths
        return (chosen - rejected - 1 / (2 * beta)).square()
    if loss == "orpo":
        return -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    margins = beta * (chosen - rejected)
    if loss == "simpo":
        margins = margins - settings.simpo_gamma
    if loss == "hinge":
        return F.relu(1 - margins)
    return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


def _log_odds(likelihoods: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p; where p is all but 1, of what float32 still tells from it."""
    below = likelihoods.clamp(max=-torch.finfo(torch.float32).eps)
    rest = torch.where(below > -math.log(2), torch.log(-torch.expm1(below)), torch.log1p(-torch.exp(below)))
    return below - rest


def _of_model(model: Llama, pair: Pair) -> Tensor:
    return _log_likelihoods(model, PairBatch.of([pair], model.model.embed_tokens.weight.device))[0]


def _log_likelihoods(model: Llama, batch: PairBatch) -> Tensor:
    """[P, 2]: of each answer, the sum over its loss mask, nats."""
    return of_texts(model, batch.answers, batch.lengths).view(-1, 2)
