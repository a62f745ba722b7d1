"""Predictions: what a pass says of the next tokens, and how they are drawn from it, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pronk.engine.filters import Float32
from pronk.engine.grammar import Bools
from pronk.engine.params import SamplingParams
from pronk.engine.sampling import Sampled, sample


class Predictions:
    """Logits [R, V] on the host. An engine that has them elsewhere may draw there: the same tokens, to the last."""

    def __init__(self, logits: Float32) -> None:
        self._logits = logits

    def logits(self, first: int, count: int) -> Float32:
        """[count, V], of the rows from `first` on."""
        return self._logits[first : first + count]

    def sample(
        self,
        row: int,
        params: SamplingParams,
        history: Sequence[int],
        generated: Sequence[int],
        uniform: float | Callable[[], float],
        allowed: Bools | None = None,
    ) -> Sampled:
        """See pronk.engine.sampling.sample. Raises NotNumbers."""
        return sample(self._logits[row], params, history, generated, uniform, allowed)
