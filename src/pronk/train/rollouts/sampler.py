"""Samplers: what writes completions, from the distribution of the model that is trained, and says how likely they were.

Completions are drawn at a temperature of 1 and without filters: the gradient of what is rewarded is that of this
distribution and of no other. What is drawn is a function of the weights, the prompt and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pronk.checkpoint.adapter import Adapter, LowRank, applied
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.backend import Backend
from pronk.engine.events import Event, Failure
from pronk.engine.params import SamplingParams
from pronk.engine.rng import stream
from pronk.engine.sampling import sample
from pronk.engine.scheduler import Scheduler
from pronk.torch_engine.functions import compute_type
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.data.examples import Prompt
from pronk.train.distributed import Group
from pronk.train.objectives.loss import logits_at, picked
from pronk.train.rollouts.texts import Answered, Completion
from pronk.train.trainer import trained

_SEQUENCES = 128  # at once

Asked = Sequence[tuple[Prompt, int]]  # each with its seed


class Sampler(Protocol):
    def sample(self, model: Llama | None, passes: Sequence[Asked]) -> list[list[Answered]]:
        """To each prompt of each pass its group. `model` None: as it was before training."""


class EngineSampler:
    """By an engine of its own in the same process: prompts are read once, and all completions share passes.

    Of LoRA it is handed the numbers, which it keeps beside weights that are packed once. Where all weights are trained,
    or DoRA, they are packed anew. Each process of a group has an engine of its own.
    """

    def __init__(
        self,
        make: Callable[[Checkpoint], Backend],
        checkpoint: Checkpoint,
        eos_ids: Sequence[int],
        group: Group | None = None,
    ) -> None:
        self._group = group or Group()
        self._make, self._checkpoint, self._eos_ids = make, checkpoint, eos_ids
        self._backend: Backend | None = make(checkpoint)
        self._attached = 0

    @property
    def backend(self) -> Backend:
        assert self._backend
        return self._backend

    def sample(self, model: Llama | None, passes: Sequence[Asked]) -> list[list[Answered]]:
        if model is not None:
            self._take(model)
        with Scheduler(self.backend, max_sequences=_SEQUENCES) as scheduler:
            asked = [one for each in passes for one in each]
            drawn = {self._add(scheduler, *one): [_Drawn() for _ in range(one[0].generations)] for one in asked}
            while scheduler.has_work:
                for event in scheduler.step():
                    if isinstance(event, Failure):
                        raise event.error
                    assert isinstance(event, Event)
                    drawn[event.request][event.sample].take(event)
        groups = (
            Answered(prompt, tuple(one.completion() for one in group))
            for (prompt, _), group in zip(asked, drawn.values(), strict=True)
        )
        return [[next(groups) for _ in each] for each in passes]

    def adopt(self, adapter: Adapter) -> None:
        """What it answers with from now on. DoRA's is merged, and the weights are packed anew."""
        if any(product.magnitude is not None for product in adapter.products.values()):
            self._backend = None  # before there is another
            self._backend = self._make(applied(self._checkpoint, adapter))
            return
        before, self._attached = self._attached, self.backend.attach(adapter)
        self.backend.adapter = self._attached
        if before:
            self.backend.detach(before)

    def _add(self, scheduler: Scheduler, prompt: Prompt, seed: int) -> int:
        params = SamplingParams(
            max_new_tokens=prompt.room, temperature=1.0, num_samples=prompt.generations, logprobs=0, seed=seed
        )
        return scheduler.add(prompt.ids.tolist(), params, seed, self._eos_ids)

    def _take(self, model: Llama) -> None:
        whole = self._group.whole
        if lora.has(model):
            products = {
                name: LowRank(
                    _array(whole(layer.lora_A)),
                    _array(whole(layer.lora_B)),
                    layer.scale,
                    None if layer.lora_magnitude_vector is None else _array(whole(layer.lora_magnitude_vector)),
                )
                for name, layer in lora.layers(model)
            }
            self.adopt(Adapter(Path("what is trained"), products, {}, 0))
        else:
            self._backend = None  # before there is another
            # All that gather a weight do so at once, and an engine reads them when and as often as it likes.
            held = {id(parameter): whole(parameter) for parameter in model.parameters()}
            self._backend = self._make(trained(self._checkpoint, model, lambda parameter: held[id(parameter)]))


def _array(parameter: Tensor) -> Any:
    """A copy: the parameter goes on changing."""
    return parameter.detach().float().cpu().numpy().copy()


class _Drawn:
    """A completion that grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ended = False

    def take(self, event: Event) -> None:
        assert event.logprob is not None
        self.tokens.append(event.token)
        self.logprobs.append(event.logprob)
        self.ended = event.is_stop_token

    def completion(self, room: int = 0) -> Completion:
        return Completion(tuple(self.tokens), tuple(self.logprobs), self.ended, room=room)


class ExactSampler:
    """By the pass that is trained on, over all that it may read: so log-probabilities are those of training to the bit.

    Of a matrix product a row may depend, in its last bits, on how many rows there are. So each token takes a pass as
    long as the longest completions, of which what is not written yet is filled up: no earlier token looks there.
    """

    def __init__(
        self,
        collate: Callable[[Sequence[Any], torch.device], Any],
        eos_ids: Sequence[int],
        group: Group | None = None,
    ) -> None:
        self._collate, self._eos_ids, self._group = collate, frozenset(eos_ids), group or Group()

    def sample(self, model: Llama | None, passes: Sequence[Asked]) -> list[list[Answered]]:
        assert model is not None
        found = [self._pass(model, asked) for asked in passes]
        self._group.rest(model)
        return found

    def _pass(self, model: Llama, asked: Asked) -> list[Answered]:
        params = SamplingParams(temperature=1.0)
        drawn = [[_Drawn() for _ in range(prompt.generations)] for prompt, _ in asked]
        streams = [stream("philox", seed, nth) for prompt, seed in asked for nth in range(prompt.generations)]
        starts = [0]
        for prompt, _ in asked:
            starts += [starts[-1] + prompt.room * number for number in range(1, prompt.generations + 1)]
        rooms = [prompt.room for prompt, _ in asked for _ in range(prompt.generations)]
        every = [one for group in drawn for one in group]
        for step in count():
            live = [n for n, one in enumerate(every) if not one.ended and step < rooms[n]]
            if not self._group.any(bool(live)):
                break
            # Who has nothing left to write takes part in the others' passes.
            rows = [starts[n] + step for n in live] or [0]
            logits = self._logits(model, asked, drawn, rows)[: len(live)]
            tokens = [
                sample(row, params, [], [], streams[n].uniform(step)).token
                for n, row in zip(live, logits.cpu().numpy(), strict=True)
            ]
            likely = picked(logits, torch.tensor(tokens, device=logits.device)).tolist()
            for n, token, logprob in zip(live, tokens, likely, strict=True):
                every[n].tokens.append(token)
                every[n].logprobs.append(logprob)
                every[n].ended = token in self._eos_ids
        return self._groups(asked, drawn)

    def _logits(self, model: Llama, asked: Asked, drawn: Sequence[Sequence[_Drawn]], rows: Sequence[int]) -> Tensor:
        """[N, V], by the code that a gradient goes through."""
        with torch.enable_grad():
            batch = self._collate(self._groups(asked, drawn), model.model.embed_tokens.weight.device)
            hidden = model.hidden(batch.batch)
            return logits_at(hidden.to(compute_type(hidden)), model.lm_head.weight, rows).detach()

    @staticmethod
    def _groups(asked: Asked, drawn: Sequence[Sequence[_Drawn]]) -> list[Answered]:
        return [
            Answered(prompt, tuple(one.completion(prompt.room) for one in group))
            for (prompt, _), group in zip(asked, drawn, strict=True)
        ]
