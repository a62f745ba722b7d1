"""CpuPredictions: tokens drawn in C++, all that a pass is asked for in one call, on the engine's threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pronk.engine.filters import Float32
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.sampling import Sampled, log_total
from pronk.errors import NotEnoughMemory

if TYPE_CHECKING:
    from pronk import _native


class CpuPredictions(Predictions):
    """What engine/sampling.py draws, to the token, and its log-probabilities to the bit."""

    def __init__(self, logits: Float32, model: _native.Model) -> None:
        super().__init__(logits)
        self._model = model

    def draw(self, asks: Sequence[Ask]) -> list[Sampled | None]:
        """See Predictions. Raises NotEnoughMemory."""
        try:
            answers = self._model.draw(self._logits, [_row(ask) for ask in asks])
        except MemoryError:
            raise NotEnoughMemory(f"memory ran out drawing {len(asks)} tokens", "ask for fewer texts at once") from None
        return [self._sampled(ask, *answer) for ask, answer in zip(asks, answers, strict=True)]

    def _sampled(self, ask: Ask, token: int, largest: float, weight: int, top: list[int]) -> Sampled | None:
        if token < 0:
            return None
        if ask.params.logprobs is None:
            return Sampled(token)
        total, logits = log_total(largest, weight), self._logits[ask.row]
        return Sampled(token, float(logits[token]) - total, tuple((i, float(logits[i]) - total) for i in top))


def _row(ask: Ask) -> _native._Row:
    coin = ask.uniform() if ask.params.temperature > 0 else 0.0
    tokens = np.asarray(ask.tokens, np.int32) if len(ask.tokens) else None
    allowed = None if ask.allowed is None else np.ascontiguousarray(ask.allowed)
    return ask.row, coin, ask.params.asked, tokens, ask.prompt_tokens, allowed
