"""Memory: what a variant will take, known before anything is loaded. Bytes."""

from __future__ import annotations

from pronk.engine.declaration import Plan
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS


def total(plan: Plan, baseline: int, tokens: int) -> int:
    """The peak of a process that held `baseline`, its libraries and its tokenizer, before loading what is planned, and
    then runs one text of `tokens` tokens."""
    return baseline + plan.weights + kv_blocks(tokens) * BLOCK_SIZE * plan.kv_a_token + plan.besides


def kv_blocks(tokens: int, texts: int = 1) -> int:
    """The most blocks of keys and values that `texts` hold side by side on their way to so many tokens each.

    A cache doubles as it fills (PrefixCache.make_room), and the smaller one stays until it is copied.
    """
    needed, size, most = texts * -(-tokens // BLOCK_SIZE), FIRST_BLOCKS, 0
    while size < needed:
        most = 2 * size
        size *= 2
    return max(needed, most)
