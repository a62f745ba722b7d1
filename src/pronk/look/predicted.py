"""Predicted: of rows of logits, what they say of the tokens that came, and which tokens were likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk.engine.filters import top_k
from pronk.engine.sampling import NotNumbers

Float64 = NDArray[np.float64]
Int = NDArray[np.int64]

_ROWS = 8  # taken to float64 at once


@dataclass(frozen=True, eq=False)
class Predicted:
    """Of N rows, each a distribution. Logarithms are natural, entropies in bits."""

    logprobs: Float64  # [N], of the tokens that came; NaN where none did
    ranks: Int  # [N], 1: the likeliest came; 0 where none did. Of equals the lowest id is the likeliest
    entropies: Float64  # [N]
    top_ids: Int  # [N, k], the likeliest first
    top_logprobs: Float64  # [N, k]

    @classmethod
    def empty(cls, rows: int, k: int) -> Predicted:
        return cls(
            np.full(rows, np.nan),
            np.zeros(rows, np.int64),
            np.full(rows, np.nan),
            np.zeros((rows, k), np.int64),
            np.full((rows, k), np.nan),
        )

    def fill(self, first: int, logits: NDArray[np.float32], came: Sequence[int | None]) -> None:
        """Rows `first` and on, from logits [n, V] and the token that came after each. Raises NotNumbers."""
        for at in range(0, len(logits), _ROWS):
            part = logits[at : at + _ROWS].astype(np.float64)  # [n, V]
            if not np.isfinite(part).all():
                raise NotNumbers
            part -= part.max(-1, keepdims=True)
            exps = np.exp(part)
            sums = exps.sum(-1)
            logs = np.log(sums)
            exps *= part
            own = slice(first + at, first + at + len(part))
            self.entropies[own] = np.maximum(0.0, logs - exps.sum(-1) / sums) / np.log(2)
            for row, (scores, log) in enumerate(zip(part, logs, strict=True)):
                place, token = first + at + row, came[at + row]
                ids = top_k(logits[at + row], self.top_ids.shape[1])
                ids = ids[np.argsort(-logits[at + row, ids], kind="stable")]
                self.top_ids[place], self.top_logprobs[place] = ids, scores[ids] - log
                if token is not None:
                    before = (scores > scores[token]).sum() + (scores[:token] == scores[token]).sum()
                    self.logprobs[place], self.ranks[place] = scores[token] - log, 1 + before
