"""Predictions: what a pass says of the next tokens, and how they are drawn from it, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pronk.engine.filters import Float32
from pronk.engine.grammar import Bools
from pronk.engine.params import SamplingParams
from pronk.engine.sampling import NotNumbers, Sampled, Tokens, sample


@dataclass(frozen=True, slots=True)
class Ask:
    """One token that is to be drawn."""

    row: int  # of the logits
    params: SamplingParams
    uniform: Callable[[], float]  # gives the number that decides, if one is needed
    tokens: Tokens = ()  # prompt and generated; empty where no penalty looks at them
    prompt_tokens: int = 0  # how many of these are the prompt's
    allowed: Bools | None = None  # [V], which may be drawn; None: all


class Predictions:
    """Logits [R, V] on the host. An engine that has them elsewhere may draw there: the same tokens, to the last."""

    def __init__(self, logits: Float32) -> None:
        self._logits = logits

    def logits(self, first: int, count: int) -> Float32:
        """[count, V], of the rows from `first` on."""
        return self._logits[first : first + count]

    def draw(self, asks: Sequence[Ask]) -> list[Sampled | None]:
        """Every token that a pass is asked for, at once; None where the logits are not numbers."""
        drawn: list[Sampled | None] = []
        for ask in asks:
            try:
                drawn.append(self.sample(ask))
            except NotNumbers:
                drawn.append(None)
        return drawn

    def sample(self, ask: Ask) -> Sampled:
        """See pronk.engine.sampling.sample. Raises NotNumbers."""
        generated = ask.tokens[ask.prompt_tokens :]
        return sample(self._logits[ask.row], ask.params, ask.tokens, generated, ask.uniform, ask.allowed)
