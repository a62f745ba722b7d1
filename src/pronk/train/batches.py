"""Micro-batches: examples put together for one pass, in an order that a seed and an epoch decide.

A pass takes a ragged batch: examples lie side by side as runs, without padding, and attention never crosses from one to
the next. So packing is nothing but taking as many examples as fit into a number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.torch_engine.batch import TorchBatch
from pronk.train.examples import Example

_BUCKET = 64  # micro-batches whose examples are sorted by length together


@dataclass(frozen=True)
class MicroBatch:
    batch: TorchBatch  # wants what the head is given where the next token is learned
    targets: Tensor  # [R] int64, those next tokens
    tokens: int  # T

    @property
    def weight(self) -> int:
        """Learned tokens."""
        return len(self.targets)

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        """The last token of each example foretells nothing, and is not read."""
        runs = [Run(example.ids[:-1].tolist(), logits="none") for example in examples]
        batch = Batch.of(runs)
        learned = np.concatenate([example.learned[1:] for example in examples])
        following = np.concatenate([example.ids[1:] for example in examples])
        wanted = replace(batch, logits_rows=np.flatnonzero(learned).astype(np.int32))
        targets = torch.from_numpy(following[learned].astype(np.int64)).to(device)
        return cls(TorchBatch.of(wanted, device, None), targets, len(batch.token_ids))


@dataclass(frozen=True)
class Batches:
    """How examples of the given lengths are put together.

    `size`: examples of a micro-batch. `pack`: instead, as many as fit into so many tokens. `bucket`: examples of like
    length together, so that the passes of an epoch are long or short as a whole; their order is shuffled again.
    """

    lengths: Sequence[int]
    size: int = 1
    pack: int | None = None
    bucket: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths:
            raise BadRequest("there are no examples to train on")
        for name, value in (("batch size", self.size), ("number of tokens to pack", self.pack)):
            if value is not None and (type(value) is not int or value < 1):
                raise BadRequest(f"the {name} must be a whole number from 1 on, not {value!r}")
        if self.pack is not None and (longest := max(self.lengths)) > self.pack:
            raise BadRequest(f"an example has {longest} tokens and does not fit into {self.pack}; pack more, or cut it")

    def epoch(self, number: int) -> list[list[int]]:
        """Every example once: the indices of each micro-batch's. The same for the same seed and number, always."""
        draw = np.random.Generator(np.random.PCG64([self.seed, number]))
        order = draw.permutation(len(self.lengths)).tolist()
        if self.bucket:
            step = self.size * _BUCKET
            order = [i for at in range(0, len(order), step) for i in sorted(order[at : at + step], key=self._length)]
        batches = (
            self._fill(order) if self.pack else [order[at : at + self.size] for at in range(0, len(order), self.size)]
        )
        return [batches[i] for i in draw.permutation(len(batches))] if self.bucket else batches

    def _length(self, index: int) -> int:
        return self.lengths[index]

    def _fill(self, order: Sequence[int]) -> list[list[int]]:
        """In order, a new micro-batch wherever the next example would not fit."""
        assert self.pack
        batches: list[list[int]] = [[]]
        tokens = 0
        for index in order:
            if batches[-1] and tokens + self.lengths[index] > self.pack:
                batches.append([])
                tokens = 0
            batches[-1].append(index)
            tokens += self.lengths[index]
        return batches
