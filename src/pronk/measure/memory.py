"""Memory: what a variant will take, known before anything is loaded. Bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pronk import engines
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS


@dataclass(frozen=True)
class Prediction:
    """What a variant adds to a process that has its libraries and its tokenizer loaded already."""

    weights: int
    kv_a_token: int
    besides: int  # what a forward pass needs, and what else there is at the peak

    def total(self, baseline: int, tokens: int) -> int:
        """The peak of a process that held `baseline` before loading and then runs one text of `tokens` tokens."""
        return baseline + self.weights + kv_blocks(tokens) * BLOCK_SIZE * self.kv_a_token + self.besides


def kv_blocks(tokens: int, texts: int = 1) -> int:
    """The most blocks of keys and values that `texts` hold side by side on their way to so many tokens each.

    A cache doubles as it fills (PrefixCache.make_room), and the smaller one stays until it is copied.
    """
    needed, size, most = texts * -(-tokens // BLOCK_SIZE), FIRST_BLOCKS, 0
    while size < needed:
        most = 2 * size
        size *= 2
    return max(needed, most)


def predict(checkpoint: Checkpoint, engine: str, options: Mapping[str, Any]) -> Prediction:
    """`options`: those of pronk.load. Raises BadRequest for a format that the engine does not have."""
    found = engines.named(engine).plan(checkpoint, options)
    return Prediction(found.weights, found.kv_a_token, found.besides)
