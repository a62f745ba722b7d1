"""What a model said before it was trained, which dpo and kto hold it against.

It never changes, so it is asked once of each text, each alone, and a few numbers are kept: no second copy of the model,
and no further pass in every step. With LoRA it can be asked at any time, with the adapter switched off. Otherwise `ask`
before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.data.batches import MicroBatch
from pronk.train.distributed import Group
from pronk.train.objectives.loss import log_likelihoods

T = TypeVar("T")


class Reference(Generic[T]):
    """Of examples that are told apart by identity; `of_model`: what it is asked of one of them."""

    def __init__(self, of_model: Callable[[Llama, T], Tensor]) -> None:
        self._of_model = of_model
        self._known: dict[T, Tensor] = {}

    def prepare(
        self, model: Llama, examples: Sequence[T], group: Group, watch: Callable[[int, int], None] | None = None
    ) -> None:
        """One process can switch LoRA off at any time; several must not do so at different times. An adapter that the
        run begins from is part of the reference."""
        if group.size > 1 or not lora.has(model) or lora.begun(model):
            self.ask(model, examples, watch)

    def ask(self, model: Llama, examples: Sequence[T], watch: Callable[[int, int], None] | None = None) -> None:
        """The model as it is now, without dropout. `watch` is told how many examples are done, and of how many."""
        training = model.training
        model.eval()
        for done, example in enumerate(examples):
            if watch:
                watch(done, len(examples))
            self._known[example] = self._asked(model, example)
        model.train(training)

    def of(self, model: Llama, examples: Sequence[T]) -> Tensor:
        """[P, ...]. Raises LookupError for one of which it was not asked, and now is too late to."""
        for example in examples:
            if example in self._known:
                continue
            if not lora.has(model):
                raise LookupError("the reference was not asked of this example before its weights were trained")
            with lora.disabled(model):
                self._known[example] = self._asked(model, example)
        return torch.stack([self._known[example] for example in examples])

    @torch.no_grad()
    def _asked(self, model: Llama, example: T) -> Tensor:
        return self._of_model(model, example)


def of_tokens(model: Llama, texts: MicroBatch, rows: int) -> Tensor:
    """[rows]: log-likelihoods of the tokens in the loss masks of all texts, nats."""
    hidden = model.hidden(texts.batch)
    return log_likelihoods(hidden.to(compute_type(hidden)), model.lm_head.weight, texts.targets)[:rows]


def of_texts(model: Llama, texts: MicroBatch, lengths: Sequence[int]) -> Tensor:
    """[P]: of each text the sum over its loss mask, of `lengths` tokens."""
    return torch.stack([part.sum() for part in of_tokens(model, texts, sum(lengths)).split(list(lengths))])
