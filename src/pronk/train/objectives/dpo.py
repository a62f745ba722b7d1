"""Direct preference optimization (arXiv 2305.18290): to like one answer better than another, as people did.

    reward(y) = beta * (log p(y | x) - log p_ref(y | x)),      loss = -log sigmoid(reward(chosen) - reward(rejected))

Both answers to a prompt are runs of one batch. The reference is the model as it was before training. What it says of a
pair never changes, so it is asked once, each pair alone, and two numbers are kept: no second copy of the model, and no
third pass in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.data.batches import MicroBatch
from pronk.train.data.examples import Pair
from pronk.train.objectives.loss import log_likelihoods
from pronk.train.settings import Preference


@dataclass(frozen=True)
class PairBatch:
    pairs: tuple[Pair, ...]  # P
    answers: MicroBatch  # 2P runs: chosen and rejected of the first pair, of the second, ...
    lengths: tuple[int, ...]  # [2P], learned tokens of each

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
            if not any(True for _ in lora.layers(model)):
                raise LookupError("the reference was not asked of this pair before its weights were trained")
            with lora.disabled(model):
                self._known[pair] = _of_model(model, pair)
        return torch.stack([self._known[pair] for pair in pairs])


class Preferences:
    """The objective: its work is counted in pairs. `cost` shows rewards, their margins, and log-likelihoods (nats)."""

    def __init__(self, settings: Preference) -> None:
        self.settings = settings
        self.reference = Reference()
        self.slack = 20 * float(losses(torch.zeros(1, 2), (1, 1), settings))  # times what indifference costs

    def work(self, examples: Sequence[Pair], device: torch.device) -> PairBatch:
        return PairBatch.of(examples, device)

    def cost(self, model: Llama, work: PairBatch) -> tuple[Tensor, Mapping[str, float]]:
        reference = self.reference.of(model, work.pairs)
        likelihoods = _log_likelihoods(model, work)  # [P, 2]
        ratios = likelihoods - reference
        return losses(ratios, work.lengths, self.settings).sum(), self._seen(likelihoods.detach(), ratios.detach())

    def _seen(self, likelihoods: Tensor, ratios: Tensor) -> dict[str, float]:
        """Sums, under TRL's names. Rewards that are equal, as all are before training, are half right."""
        chosen, rejected = (self.settings.beta * ratios).unbind(-1)
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


def losses(ratios: Tensor, lengths: Sequence[int], settings: Preference) -> Tensor:
    """[P], of log p - log p_ref of both answers [P, 2], nats, and of how many tokens each has [2P]."""
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss == "ipo":  # of means over tokens, or its target would depend on the answers' lengths
        chosen, rejected = (ratios / ratios.new_tensor(lengths).view(-1, 2)).unbind(-1)
        return (chosen - rejected - 1 / (2 * beta)).square()
    chosen, rejected = ratios.unbind(-1)
    margins = beta * (chosen - rejected)
    if settings.loss == "hinge":
        return F.relu(1 - margins)
    return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


@torch.no_grad()
def _of_model(model: Llama, pair: Pair) -> Tensor:
    return _log_likelihoods(model, PairBatch.of([pair], model.model.embed_tokens.weight.device))[0]


def _log_likelihoods(model: Llama, work: PairBatch) -> Tensor:
    """[P, 2]: of each answer, the sum over its learned tokens, nats."""
    hidden = model.hidden(work.answers.batch)
    each = log_likelihoods(hidden.to(compute_type(hidden)), model.lm_head.weight, work.answers.targets)
    return torch.stack([part.sum() for part in each[: sum(work.lengths)].split(work.lengths)]).view(-1, 2)
