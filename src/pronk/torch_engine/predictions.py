"""TorchPredictions: logits that stay on their device while the likeliest tokens are all that is wanted of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pronk.engine.filters import Float32
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.sampling import NotNumbers, Sampled
from pronk.torch_engine.sampling import can_sample, sample


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest token of each row [R, V], and whether its logit is finite: [2, R] int64. Of equals the lowest, and
    NaN before all, as numpy has it."""
    most, tokens = logits.max(dim=-1)
    return torch.stack((tokens, most.isfinite().to(tokens.dtype)))


class Likeliest:
    """What `likeliest` found, on its way to the host: what the device is asked to do later is not waited for."""

    def __init__(self, found: Tensor, rows: int | None = None) -> None:
        """`rows`: the first of them that count."""
        self._rows = rows
        self._there: torch.cuda.Event | None = None
        self._read: list[tuple[int, bool]] | None = None
        if not found.is_cuda:
            self._found = found
            return
        self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._found.copy_(found, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(found.device))

    @property
    def known(self) -> list[tuple[int, bool]] | None:
        """None until someone has read it."""
        return self._read

    def read(self) -> list[tuple[int, bool]]:
        """Of each row the token, and whether its logit is finite."""
        if self._read is None:
            if self._there is not None:
                self._there.synchronize()
            tokens, finite = self._found.tolist()
            self._read = list(zip(tokens, map(bool, finite), strict=True))[: self._rows]
        return self._read


class TorchPredictions(Predictions):
    def __init__(self, logits: Tensor, likeliest: Likeliest | None = None) -> None:
        """logits [R, V], in the type that they were computed in; `likeliest` of them, where that is known."""
        self._there, self._found = logits, likeliest

    def logits(self, first: int, count: int) -> Float32:
        return self._here.logits(first, count)

    def draw(self, asks: Sequence[Ask]) -> list[Sampled | None]:
        """What can be drawn on a GPU is drawn there, all of it at once: of a CPU's logits numpy is as quick."""
        there = [n for n, ask in enumerate(asks) if self._there.is_cuda and can_sample(ask)]
        ready = [n for n in there if self._likeliest[asks[n].row][1]]
        others = set(range(len(asks))).difference(there)
        drawn = super().draw([ask for n, ask in enumerate(asks) if n in others])
        if not there:
            return drawn
        tokens: list[int] = []
        if ready:
            rows = self._there[[asks[n].row for n in ready]]
            tokens = sample(rows, [asks[n].params for n in ready], [asks[n].uniform() for n in ready]).tolist()
        found: dict[int, Sampled | None] = dict.fromkeys(there)
        found.update({n: Sampled(token) for n, token in zip(ready, tokens, strict=True)})
        rest = iter(drawn)
        return [found[n] if n in found else next(rest) for n in range(len(asks))]

    def sample(self, ask: Ask) -> Sampled:
        if ask.allowed is not None or not ask.params.takes_likeliest:
            return self._here.sample(ask)
        token, is_number = self._likeliest[ask.row]
        if not is_number:
            raise NotNumbers
        return Sampled(token)

    @cached_property
    def _likeliest(self) -> list[tuple[int, bool]]:
        return (self._found or Likeliest(likeliest(self._there))).read()

    @cached_property
    def _here(self) -> Predictions:
        return Predictions(self._there.float().cpu().numpy())
