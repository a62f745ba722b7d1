"""AutoRound (arXiv 2309.05516): a layer's matrices rounded together, in view of what comes out of the layer.

Which way each weight is rounded, and how wide the range of each group is, is learned (rounding.py), a layer at a time.
The layer that is rounded is fed what those before it, rounded as well, have made of a text; what it gives is to be what
the layer as it is gives where nothing was rounded. The error is the sum of squares over a few of the texts, drawn anew
for each step, and of its gradient the sign alone counts (SignSGD): every step moves everything by as much, 1 / steps at
first and in the end nothing, so that what keeps its direction gets just as far as it may. Of all steps that is kept
which has the least of plain rounding's error on the same texts.

The embedding and lm_head are in no layer: they are rounded as calibrate/calibrated.py does. Where torch has as many
threads, the same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from pronk.calibrate import STEPS
from pronk.calibrate.calibrated import Walk, codes, weights_of, windows
from pronk.calibrate.cores import a_thread_a_call
from pronk.calibrate.grids import RULES
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.config import ModelConfig
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Block, Rope
from pronk.train.rounding import Rounding

_TOKENS = 2048  # of a step: as many whole texts as that takes
_TINY = 1e-30


def autorounded(
    checkpoint: Checkpoint,
    kinds: dict[str, str],
    ids: Sequence[int],
    progress: Progress | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> Checkpoint:
    """In the place of calibrated.calibrated, which see. `steps`: of each layer, which in none is rounded plainly.

    Raises BadRequest for steps below 0, for types whose codes stand for no even grid, and for a text too short.
    """
    if steps < 0:
        raise BadRequest(f"steps must be 0 or more, not {steps}")
    if curved := sorted({kind for kind in kinds.values() if kind in RULES and RULES[kind].curved}):
        raise BadRequest(f"AutoRound does not make {', '.join(curved)}: what codes stand for is no even grid there")
    texts = windows(ids, checkpoint.config.max_position_embeddings)
    with a_thread_a_call():
        return _Walk(checkpoint, kinds, texts, progress or (lambda *_: None), steps, seed).made()


class _Walk(Walk):
    def __init__(
        self,
        checkpoint: Checkpoint,
        kinds: dict[str, str],
        texts: Sequence[Sequence[int]],
        progress: Progress,
        steps: int,
        seed: int,
    ) -> None:
        super().__init__(checkpoint, kinds, texts, progress)
        self.steps, self.draws = steps, np.random.default_rng(seed)
        self.net = _Layer(self.config, [len(text) for text in texts])
        self.exact = torch.from_numpy(self.stream)  # [T, C]: the stream where nothing is rounded

    def layer(self, prefix: str) -> None:
        weights = {name: weights_of(self.checkpoint, prefix + name) for name in self.net.names}
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        target = self.net.all(tensors, self.exact)
        learned = {}
        for name, kind in ((name, self.kinds.get(prefix + name)) for name in weights):
            if kind and prefix + name in self.rounds:
                plain = codes(weights[name], None, kind, prefix + name)
                learned[name] = Rounding(tensors[name], plain)
            elif kind:
                tensors[name] = torch.from_numpy(self.keep(prefix + name, weights[name], None))
        self._learn(prefix, tensors, learned, target)
        for name, rounding in learned.items():
            tensors[name] = torch.from_numpy(self.keep(prefix + name, weights[name], rounding.rounded()))
        self.progress("calibrating", self.done, self.total)
        self.stream, self.exact = self.net.all(tensors, torch.from_numpy(self.stream)).numpy(), target

    def _learn(self, prefix: str, tensors: dict[str, Tensor], learned: dict[str, Rounding], target: Tensor) -> None:
        stream, net = torch.from_numpy(self.stream), self.net
        with torch.no_grad():
            plainly = {name: rounding() for name, rounding in learned.items()}
            wrong = (net.all(tensors | plainly, stream) - target).square().sum(1)
        self.check(f"layer {prefix.split('.')[-2]}", bool(torch.isfinite(wrong).all()))
        plain = np.array([float(wrong[text].sum()) for text in net.texts])
        size = sum(self.checkpoint.tensors[prefix + name].nbytes for name in learned)
        least, best = 1.0, _moves(learned)
        for step in range(self.steps + 1 if learned else 0):
            some = np.sort(self.draws.choice(len(net.texts), net.at_once, replace=False))
            made = {name: rounding() for name, rounding in learned.items()}
            error = (net(tensors | made, stream, some) - net.of(target, some)).square().sum()
            share = float(error.detach()) / max(float(plain[some].sum()), _TINY)
            if share < least:
                least, best = share, _moves(learned)
            if step == self.steps:
                break
            error.backward()
            for rounding in learned.values():
                rounding.move((1 - step / self.steps) / self.steps)
            self.progress("calibrating", self.done + size * step // self.steps, self.total)
        for name, rounding in learned.items():
            rounding.load_state_dict(best[name])


def _moves(learned: dict[str, Rounding]) -> dict[str, dict[str, Any]]:
    return {name: deepcopy(rounding.state_dict()) for name, rounding in learned.items()}


class _Layer:
    """Any layer of a model, computed with weights that are handed in, over texts that stand one after another."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        with torch.device("meta"):
            self.block = Block(config, "flash")
        self.rope = Rope(config, config.max_position_embeddings)
        self.names = tuple(name for name, _ in self.block.named_parameters())
        self.lengths, ends = lengths, np.cumsum(lengths).tolist()
        self.texts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.at_once = min(len(lengths), max(1, _TOKENS // max(lengths)))

    def __call__(self, weights: dict[str, Tensor], stream: Tensor, some: NDArray[np.int64]) -> Tensor:
        """What comes of `some` of the texts."""
        batch = TorchBatch.of(
            Batch.of([Run([0] * self.lengths[n], logits="none") for n in some]), torch.device("cpu"), block_size=None
        )
        rope = self.rope(batch.positions, batch.furthest)
        return functional_call(self.block, weights, (self.of(stream, some), rope, batch, None))

    @torch.no_grad()
    def all(self, weights: dict[str, Tensor], stream: Tensor) -> Tensor:
        numbers = np.arange(len(self.texts))
        some = [numbers[at : at + self.at_once] for at in range(0, len(numbers), self.at_once)]
        return torch.cat([self(weights, stream, part) for part in some])

    def of(self, stream: Tensor, some: NDArray[np.int64]) -> Tensor:
        return torch.cat([stream[self.texts[n]] for n in some])
