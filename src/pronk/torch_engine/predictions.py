"""TorchPredictions: logits that stay on their device while the likeliest tokens are all that is wanted of them."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from pronk.engine.filters import Float32
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.sampling import NotNumbers, Sampled


class TorchPredictions(Predictions):
    def __init__(self, logits: Tensor) -> None:
        self._there = logits  # [R, V], in the type that they were computed in

    def logits(self, first: int, count: int) -> Float32:
        return self._here.logits(first, count)

    def sample(self, ask: Ask) -> Sampled:
        if ask.allowed is not None or not ask.params.takes_likeliest:
            return self._here.sample(ask)
        token, is_number = self._likeliest[ask.row]
        if not is_number:
            raise NotNumbers
        return Sampled(token)

    @cached_property
    def _likeliest(self) -> list[tuple[int, bool]]:
        """Of every row, and whether its logit is finite. Of equals the lowest, and NaN before all, as numpy has it."""
        most, tokens = self._there.max(dim=-1)
        return list(zip(tokens.tolist(), most.isfinite().tolist(), strict=True))

    @cached_property
    def _here(self) -> Predictions:
        return Predictions(self._there.float().cpu().numpy())
