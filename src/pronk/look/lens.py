"""Lens: what each layer would have said in a token's place, had it been the last (nostalgebraist's logit lens)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pronk.look.predicted import Float64, Int
from pronk.look.spelling import Spelling


@dataclass(frozen=True, eq=False)
class Lens:
    """Row 0 is of the token's embedding, row n + 1 of what layer n left of it, each through the model's last norm and
    head; the last row is what the model said. L layers, counted from 0.
    """

    token: int  # in whose place
    came: int | None  # the id of that token; None: the text ends before it
    ids: Int  # [L + 1, k], the likeliest first
    probabilities: Float64  # [L + 1, k]
    entropies: Float64  # [L + 1], bits
    came_probabilities: Float64  # [L + 1], NaN where none came
    came_ranks: Int  # [L + 1], 1: the likeliest; 0 where none came
    spelling: Spelling

    @property
    def pieces(self) -> list[list[str]]:
        """Of `ids`."""
        return [[self.spelling.piece(id_) for id_ in row] for row in self.ids.tolist()]

    def to_dict(self) -> dict[str, Any]:
        came = self.came is not None
        return {
            "token": self.token,
            "came": self.spelling.to_dict(self.came) if self.came is not None else None,
            "layers": [
                {
                    "layer": layer - 1,
                    "entropy": float(self.entropies[layer]),
                    "probability": float(self.came_probabilities[layer]) if came else None,
                    "rank": int(self.came_ranks[layer]) if came else None,
                    "top": [
                        {**self.spelling.to_dict(id_), "probability": probability}
                        for id_, probability in zip(ids, row, strict=True)
                    ],
                }
                for layer, (ids, row) in enumerate(
                    zip(self.ids.tolist(), np.asarray(self.probabilities).tolist(), strict=True)
                )
            ],
        }

    def svg(self) -> str:
        """A drawing, as a file."""
        from pronk.look import picture

        return picture.of_lens(self)

    def _repr_html_(self) -> str:
        from pronk.look import picture

        return picture.element(self.svg(), "what each layer would have said")
