"""Micro-batches: examples put together for one pass, in an order that a seed and an epoch decide.

A pass takes a ragged batch: examples lie side by side as runs, with no padding between, and attention never crosses
from one to the next. So packing is nothing but taking as many examples as fit into a number of tokens.

What a pass reads is filled up to a round number of tokens. oneDNN, which multiplies on CPUs, makes a program for each
number of rows that it meets, in a millisecond, and keeps half a megabyte of it: over a hundred lengths that is
hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.torch_engine.batch import Rows, TorchBatch
from pronk.train.data.examples import Example
from pronk.train.objectives.loss import IGNORED

_BUCKET = 64  # micro-batches whose examples are sorted by length together


@dataclass(frozen=True)
class MicroBatch:
    batch: TorchBatch  # wants what the head is given where the next token is learned
    targets: Tensor  # [R] int64, those next tokens; at last some that are IGNORED
    tokens: int  # of examples that are read
    weight: int  # of them, how many are in the loss mask

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> MicroBatch:
        """The last token of each example foretells nothing, and is not read."""
        texts = [example.ids[:-1].tolist() for example in examples]
        mask = np.concatenate([example.loss_mask[1:] for example in examples])
        weight = int(mask.sum())
        following = np.concatenate([example.ids[1:] for example in examples])[mask]
        targets = np.pad(following.astype(np.int64), (0, filled(weight) - weight), constant_values=IGNORED)
        batch = of_texts(texts, np.flatnonzero(mask), device)
        return cls(batch, torch.from_numpy(targets).to(device), sum(map(len, texts)), weight)


def of_texts(texts: Sequence[list[int]], rows: NDArray[np.int64], device: torch.device) -> TorchBatch:
    """A run each, and which rows of all go through the head: behind these come some that are to be overlooked.

    What fills up stands behind the last text, where no other token looks.
    """
    tokens = sum(map(len, texts))
    filler = [0] * (filled(tokens) - tokens)
    batch = Batch.of([Run(text, logits="none") for text in (*texts[:-1], texts[-1] + filler)])
    wanted = np.pad(rows, (0, filled(len(rows)) - len(rows)), constant_values=len(batch.token_ids) - 1)
    return TorchBatch.of(replace(batch, logits_rows=wanted.astype(np.int32)), device, None)


def of_groups(groups: Sequence[tuple[list[int], Sequence[list[int]]]], device: torch.device) -> TorchBatch:
    """A prompt and what goes on from it, several times: a run each, so that a prompt is read once for its group.

    Rows for the head are those of each answer in turn, from the prompt's last token on, and then as in `of_texts`.
    """
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    runs: list[Rows] = []
    for prompt, answers in groups:
        begin, end = len(ids), len(ids) + len(prompt)
        runs.append(Rows(begin, end, 0, None))
        ids += prompt
        positions += range(len(prompt))
        for answer in answers:
            at = len(ids)
            ids += answer
            positions += range(len(prompt), len(prompt) + len(answer))
            rows += [end - 1, *range(at, len(ids))]
            if answer:
                runs.append(Rows(at, len(ids), len(prompt), None, (begin, end)))
    spare = filled(len(ids)) - len(ids)
    positions += range(positions[-1] + 1, positions[-1] + 1 + spare)
    ids += [0] * spare
    runs[-1] = replace(runs[-1], end=len(ids))
    rows += [len(ids) - 1] * (filled(len(rows)) - len(rows))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return TorchBatch(tensor(ids), tensor(positions), tensor(rows), tuple(runs), None, max(positions))


def filled(count: int) -> int:
    """The next multiple of 16; of many, of a 16th to a 32nd of them, so that there are few such numbers."""
    step = max(16, 1 << count.bit_length() - 5 if count >= 512 else 0)
    return -(-count // step) * step


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

    def passes(self, batches: Sequence[list[int]]) -> list[list[int]]:
        """Micro-batches of a step, put together where no pass becomes longer than the largest of an epoch is alone.

        What they add up to is the same, the memory is needed in any case, and few long passes take less time than many
        short ones.
        """
        found: list[list[int]] = []
        room: list[int] = []  # tokens that each of them could still take
        for batch in sorted(batches, key=self._tokens, reverse=True):  # the longest first, each where there is room
            tokens = self._tokens(batch)
            at = next((at for at, left in enumerate(room) if left >= tokens), None)
            if at is None:
                found.append(list(batch))
                room.append(self._most - tokens)
            else:
                found[at] += batch
                room[at] -= tokens
        return found

    @cached_property
    def _most(self) -> int:
        return max(map(self._tokens, self.epoch(0)))

    def _tokens(self, batch: Sequence[int]) -> int:
        return sum(self.lengths[i] for i in batch)

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
