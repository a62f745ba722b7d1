"""Direct preference optimization (arXiv 2305.18290): to like one answer better than another, as people did.

    reward(y) = beta * (log p(y | x) - log p_ref(y | x)),      loss = -log sigmoid(reward(chosen) - reward(rejected))

Both answers to a prompt are runs of one batch. The reference is the model as it was before training. What it says of a
pair never changes, so it is asked once, each pair alone, and two numbers are kept: no second copy of the model, and no
third pass in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.errors import BadRequest
from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Encoder, Pair
from pronk.train.data.records import Record
from pronk.train.distributed import Group
from pronk.train.objectives.loss import log_likelihoods
from pronk.train.objectives.objective import Objective

LossType = Literal["sigmoid", "hinge", "ipo"]
_BETA = 1e9  # ipo squares what it divides by it


@dataclass(frozen=True)
class PairBatch:
    pairs: tuple[Pair, ...]  # P
    answers: MicroBatch  # 2P runs: chosen and rejected of the first pair, of the second, ...
    lengths: tuple[int, ...]  # [2P], tokens of each in the loss mask

    @property
    def tokens(self) -> int:
        return self.answers.tokens

    @property
    def weight(self) -> int:
        return len(self.pairs)

    @classmethod
    def of(cls, pairs: Sequence[Pair], device: torch.device) -> PairBatch:
        answers = [answer for pair in pairs for answer in pair.answers.values()]
        return cls(tuple(pairs), MicroBatch.of(answers, device), tuple(answer.targets for answer in answers))


class Reference:
    """What the model said of each pair before it was trained: log-likelihoods of both answers.

    With LoRA that can be asked at any time, with the adapter switched off. Otherwise `ask` before the first step.
    """

    def __init__(self) -> None:
        self._known: dict[Pair, Tensor] = {}  # [2]

    def ask(self, model: Llama, pairs: Sequence[Pair], watch: Callable[[int, int], None] | None = None) -> None:
        """The model as it is now, without dropout. `watch` is told how many pairs are done, and of how many."""
        training = model.training
        model.eval()
        for done, pair in enumerate(pairs):
            if watch:
                watch(done, len(pairs))
            self._known[pair] = _of_model(model, pair)
        model.train(training)

    def of(self, model: Llama, pairs: Sequence[Pair]) -> Tensor:
        """[P, 2]. Raises LookupError for a pair of which it was not asked, and now is too late to."""
        for pair in pairs:
            if pair in self._known:
                continue
            if not lora.has(model):
                raise LookupError("the reference was not asked of this pair before its weights were trained")
            with lora.disabled(model):
                self._known[pair] = _of_model(model, pair)
        return torch.stack([self._known[pair] for pair in pairs])


@dataclass(frozen=True)
class DPO(Objective):
    """Names and defaults of its settings are TRL's. Its weight is in pairs; what it shows are rewards, their margins,
    and log-likelihoods (nats).

    `loss_type`: sigmoid (arXiv 2305.18290), hinge (2305.10425) or ipo (2310.12036, whose tau is `beta`).
    `label_smoothing`, for sigmoid: how probable it is that a record has its answers the wrong way round.
    """

    name = "dpo"
    kinds = ("preference",)

    beta: float = 0.1  # the larger, the dearer is each nat away from the reference
    label_smoothing: float = 0.0
    loss_type: LossType = "sigmoid"

    def __post_init__(self) -> None:
        if not 1 / _BETA <= self.beta <= _BETA:
            raise BadRequest(f"beta must be from {1 / _BETA:g} to {_BETA:g}, not {self.beta!r}")
        if not 0 <= self.label_smoothing < 0.5:
            raise BadRequest(f"label_smoothing must be from 0 to less than 0.5, not {self.label_smoothing!r}")
        if self.loss_type not in get_args(LossType):
            raise BadRequest(f"the loss must be one of {', '.join(get_args(LossType))}, not {self.loss_type!r}")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise BadRequest(f"label_smoothing is for the sigmoid loss; with {self.loss_type} leave it out")

    @cached_property
    def reference(self) -> Reference:
        return Reference()

    @property
    def slack(self) -> float:
        return 20 * float(losses(torch.zeros(1, 2), (1, 1), self))  # times what indifference costs

    def encode(self, record: Record, encoder: Encoder) -> list[Pair]:
        encoder.unused.update(key for key in ("margin",) if key in record.values)
        return encoder.preference(record.values)

    def prepare(
        self, model: Llama, examples: Sequence[Pair], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        """One process can switch LoRA off at any time; several must not do so at different times. An adapter that the
        run begins from is part of the reference."""
        if group.size > 1 or not lora.has(model) or lora.begun(model):
            self.reference.ask(model, examples, watch)

    def collate(self, examples: Sequence[Pair], device: torch.device) -> PairBatch:
        return PairBatch.of(examples, device)

    def loss(self, model: Llama, batch: PairBatch) -> tuple[Tensor, Mapping[str, float]]:
        reference = self.reference.of(model, batch.pairs)
        likelihoods = _log_likelihoods(model, batch)  # [P, 2]
        ratios = likelihoods - reference
        return losses(ratios, batch.lengths, self).sum(), self._seen(likelihoods.detach(), ratios.detach())

    def _seen(self, likelihoods: Tensor, ratios: Tensor) -> dict[str, float]:
        """Sums, under TRL's names. Rewards that are equal, as all are before training, are half right."""
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
    """[P], of log p - log p_ref of both answers [P, 2], nats, and of how many tokens each has [2P]."""
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss_type == "ipo":  # of means over tokens, or its target would depend on the answers' lengths
        chosen, rejected = (ratios / ratios.new_tensor(lengths).view(-1, 2)).unbind(-1)
        return (chosen - rejected - 1 / (2 * beta)).square()
    chosen, rejected = ratios.unbind(-1)
    margins = beta * (chosen - rejected)
    if settings.loss_type == "hinge":
        return F.relu(1 - margins)
    return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


@torch.no_grad()
def _of_model(model: Llama, pair: Pair) -> Tensor:
    return _log_likelihoods(model, PairBatch.of([pair], model.model.embed_tokens.weight.device))[0]


def _log_likelihoods(model: Llama, batch: PairBatch) -> Tensor:
    """[P, 2]: of each answer, the sum over its loss mask, nats."""
    hidden = model.hidden(batch.answers.batch)
    each = log_likelihoods(hidden.to(compute_type(hidden)), model.lm_head.weight, batch.answers.targets)
    return torch.stack([part.sum() for part in each[: sum(batch.lengths)].split(batch.lengths)]).view(-1, 2)
