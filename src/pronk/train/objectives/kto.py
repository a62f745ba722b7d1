"""Kahneman-Tversky optimization (arXiv 2402.01306): answers that people call good or bad, each by itself.

    r = log p(y | x) - log p_ref(y | x)
    loss = w_good (1 - sigmoid(beta (r - z))) of a good answer,  w_bad (1 - sigmoid(beta (z - r))) of a bad one

z is how far the model has gone from the reference anyway: the mean r of answers to other prompts than theirs, at least
0, without a gradient. Each prompt has, once for all, the answer of the nearest example before it with another prompt. z
is estimated before a step, of all its examples, so that it does not depend on how they are dealt out. TRL estimates it
of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Encoder, Example, Judged
from pronk.train.data.records import Record
from pronk.train.distributed import Group
from pronk.train.objectives.objective import Objective
from pronk.train.objectives.reference import Reference, of_texts

_MOST = 1e9  # of a coefficient, so that products are still float32


@dataclass(frozen=True)
class JudgedBatch:
    judged: tuple[Judged, ...]  # P
    texts: MicroBatch  # P runs
    good: Tensor  # [P] bool

    @property
    def tokens(self) -> int:
        return self.texts.tokens

    @property
    def weight(self) -> int:
        return len(self.judged)


@dataclass
class Elsewhere:
    """Answers to other prompts than theirs, and the estimate that is made of them."""

    of: dict[Judged, Example]
    estimate: float = 0.0


@dataclass(frozen=True)
class KTO(Objective):
    """Names and defaults of its settings are TRL's. Its weight is in examples. It shows z as "kl"; "rewards/signed",
    beta r of good answers and -beta r of bad ones; "rewards/accuracies", how many answers are on their side of z; and
    log-likelihoods (nats). Of pairs both answers are learned, each by itself."""

    name = "kto"
    kinds = ("judged", "preference")
    by_prompt = True  # or else a pair's other answer would be trained on, and what is held out would be known

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 / _MOST <= self.beta <= _MOST:
            raise BadRequest(f"beta must be from {1 / _MOST:g} to {_MOST:g}, not {self.beta!r}")
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= (value := getattr(self, name)) <= _MOST:
                raise BadRequest(f"{name} must be from 0 to {_MOST:g}, not {value!r}")
        if not self.desirable_weight and not self.undesirable_weight:
            raise BadRequest("desirable_weight and undesirable_weight are both 0: nothing would be learned")

    @cached_property
    def reference(self) -> Reference[Judged]:
        """[2]: of each example its own answer, and the other's."""
        return Reference(self._of_model)

    @cached_property
    def elsewhere(self) -> Elsewhere:
        return Elsewhere({})

    @property
    def refers(self) -> bool:
        return True

    @property
    def slack(self) -> float:
        return max(self.desirable_weight, self.undesirable_weight)  # the most that an answer costs

    def encode(self, record: Record, encoder: Encoder) -> list[Judged]:
        values = record.values
        if record.kind == "preference":
            encoder.unused.update(key for key in ("margin",) if key in values)
            pairs = encoder.preference(values)
            return [one for pair in pairs for one in (Judged(pair.chosen, True), Judged(pair.rejected, False))]
        if "messages" in values:
            example = encoder.conversation(values)
        else:
            encoder.unused.update(key for key in ("tools",) if key in values)  # a text is no chat template's
            example = encoder.answer(values["prompt"], values["completion"])
        return [Judged(fitted, values["label"]) for fitted in encoder.fitted(example)]

    def prepare(
        self, model: Llama, examples: Sequence[Judged], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        """The texts are no longer than the longest example."""
        own = list(dict.fromkeys(examples))
        most = max(map(len, own))
        self.elsewhere.of.update({one: crossed(one, other, most) for one, other in zip(own, others(own), strict=True)})
        self.reference.prepare(model, own, group, watch)

    def collate(self, examples: Sequence[Judged], device: torch.device) -> JudgedBatch:
        good = torch.tensor([one.good for one in examples], device=device)
        return JudgedBatch(tuple(examples), MicroBatch.of([one.example for one in examples], device), good)

    @torch.no_grad()
    def begin(
        self, model: Llama, passes: Sequence[Sequence[Judged]], group: Group, counted: Sequence[bool] = ()
    ) -> None:
        """Estimate z, without dropout."""
        training = model.training
        model.eval()
        total, count = 0.0, 0
        for number, examples in enumerate(passes):
            reference = self.reference.of(model, examples)[:, 1]
            others = [self.elsewhere.of[one] for one in examples]
            found = float((_likelihoods(model, others) - reference).sum())
            if not counted or counted[number]:
                total, count = total + found, count + len(examples)
        if group.size > 1:
            group.rest(model)
        total, count = group.sum(total, count)  # type: ignore[assignment]
        self.elsewhere.estimate = max(0.0, total / count)
        model.train(training)

    def loss(self, model: Llama, batch: JudgedBatch) -> tuple[Tensor, Mapping[str, float]]:
        reference = self.reference.of(model, batch.judged)[:, 0]
        likelihoods = of_texts(model, batch.texts, [one.targets for one in batch.judged])
        ratios, z = likelihoods - reference, self.elsewhere.estimate
        costs = losses(ratios, batch.good, z, self)
        signs = batch.good.float() * 2 - 1
        seen = {
            "rewards/signed": self.beta * signs * ratios.detach(),
            "rewards/accuracies": ((signs * (ratios.detach() - z)).sign() + 1) / 2,
            "logps": likelihoods.detach(),
        }
        sums = dict(zip(seen, torch.stack(list(seen.values())).sum(-1).tolist(), strict=True))
        return costs.sum(), {**sums, "kl": z * batch.weight}

    def _of_model(self, model: Llama, one: Judged) -> Tensor:
        return torch.cat([_likelihoods(model, [text]) for text in (one.example, self.elsewhere.of[one])])


def losses(ratios: Tensor, good: Tensor, z: float, settings: KTO) -> Tensor:
    """[P], of log p - log p_ref [P], nats, and which answers are good [P]."""
    signs = torch.where(good, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(good, settings.desirable_weight, settings.undesirable_weight).to(ratios.dtype)
    return weights * torch.sigmoid(-settings.beta * signs * (ratios - z))  # 1 - sigmoid(x) is sigmoid(-x)


def others(examples: Sequence[Judged]) -> list[Judged]:
    """Of each the nearest before it, around the end, that has another prompt: a prompt's good and bad answers often
    stand beside each other. Where there is only one prompt, the one before."""
    prompts = [_prompt(one).tobytes() for one in examples]
    last = next((at for at in reversed(range(len(examples))) if prompts[at] != prompts[0]), None)
    if last is None:
        return [examples[at - 1] for at in range(len(examples))]
    found = []
    for at, prompt in enumerate(prompts):
        if at and prompts[at - 1] != prompt:
            last = at - 1
        found.append(examples[last])
    return found


def _prompt(one: Judged) -> NDArray[np.int32]:
    return one.example.ids[: int(one.example.loss_mask.argmax())]


def crossed(one: Judged, other: Judged, most: int) -> Example:
    """The prompt of one with the answer of another, of at most so many tokens; as much of a prompt is left out at its
    beginning as it takes to have one of the answer's."""
    prompt = _prompt(one)
    begin = int(other.example.loss_mask.argmax())
    prompt = prompt[-(most - 1) :]
    ids = np.concatenate([prompt, other.example.ids[begin:]])[:most]
    mask = np.concatenate([np.zeros(len(prompt), np.bool_), other.example.loss_mask[begin:]])[:most]
    return Example(ids, mask)


def _likelihoods(model: Llama, texts: Sequence[Example]) -> Tensor:
    """[P], nats."""
    batch = MicroBatch.of(texts, model.model.embed_tokens.weight.device)
    return of_texts(model, batch, [text.targets for text in texts])
