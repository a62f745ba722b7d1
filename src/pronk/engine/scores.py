"""Scores: what a reward model says of whole texts, its score head's product with each one's last hidden state.

The products are summed in float64, in one order: a text's score is a function of its last state alone, which on an
engine that is invariant to batches is the same to the bit alone, among others, and in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pronk.engine.backend import Backend
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import PronkError


def scores(
    backend: Backend,
    weight: NDArray[np.float32],
    texts: Sequence[Sequence[int]],
    adapter: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[float]:
    """Of token ids, at least one a text. `weight` [C]: the score head's. `progress` is told of tokens.

    Raises PronkError where a score is no number.
    """
    found, direction = np.empty(len(texts)), weight.astype(np.float64)
    done, total = 0, sum(map(len, texts))
    for some in _passes(texts, alone=backend.shares_scales):
        one = texts[some[0]]
        if len(one) > PASS_TOKENS and not backend.shares_scales:
            last = _in_pieces(backend, one, adapter)
        else:
            last = backend.hidden(Batch.of([Run(texts[i], adapter=adapter) for i in some]), None)  # [texts, C]
        found[some] = (last.astype(np.float64) * direction).sum(-1)
        done += sum(len(texts[i]) for i in some)
        if progress:
            progress("", done, total)
    if not np.isfinite(found).all():
        number = int(np.flatnonzero(~np.isfinite(found))[0])
        raise PronkError(f"the score of text {number + 1} is not a number; compute in a wider type (--quantize f32)")
    return [float(score) for score in found]


def _passes(texts: Sequence[Sequence[int]], *, alone: bool) -> Iterator[list[int]]:
    """Numbers of texts that share a pass: in order, as many as have its tokens; a longer one by itself."""
    some: list[int] = []
    tokens = 0
    for number, text in enumerate(texts):
        if some and (alone or tokens + len(text) > PASS_TOKENS):
            yield some
            some, tokens = [], 0
        some.append(number)
        tokens += len(text)
    if some:
        yield some


def _in_pieces(backend: Backend, text: Sequence[int], adapter: int | None) -> NDArray[np.float32]:
    """The last hidden state of a text longer than a pass, [1, C]."""
    kv = backend.new_kv(-(-len(text) // BLOCK_SIZE), BLOCK_SIZE)
    for at in range(0, len(text), PASS_TOKENS):
        part = text[at : at + PASS_TOKENS]
        end = at + len(part)
        run = Run(part, at, range(-(-end // BLOCK_SIZE)), "last" if end == len(text) else "none", adapter)
        last = backend.hidden(Batch.of([run]), kv)
    return last
