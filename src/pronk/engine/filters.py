"""FILTERS: which tokens may be drawn, as one ordered table; and their functions, over vocabularies of any size.

Each has one plain meaning, which tests/engine/plain_sampling.py states in full sorts, and is made fast by leaving out,
with certainty, what cannot matter. The survivors are the same to the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]

_SMALL = 4096  # so many are sorted as they are
_COLUMN = 64
_PIECE = 1 << 14
_BINS = (0x3F800000 >> 17) + 1  # the bits of 1.0
_BIN_SHIFT = np.uint32(17)  # leaves sign, exponent and 6 bits of a float32's mantissa: bins 1.6% wide at most


class Filter(NamedTuple):
    name: str  # of the field of SamplingParams
    off: float  # what it is set to where it is not wanted
    keep: Callable[[Float32, float], Ids]  # scores [V], divided by the temperature, to those that stay, ascending
    # What it may be set to, in words and as a test, which NaN fails; None: whole numbers from `off` on.
    allowed: tuple[str, Callable[[float], bool]] | None = None


def survivors(scores: Float32, filters: Iterable[tuple[Filter, float]]) -> Ids | None:
    """The tokens that filters leave of scores [V], ascending, each of what the one before left; None: all of them."""
    kept = None
    for filter_, value in filters:
        places = filter_.keep(scores if kept is None else scores[kept], value)
        kept = places if kept is None else kept[places]
    return kept


def top_k(scores: Float32, k: int) -> Ids:
    """Indices, ascending, of the k largest; of those tied at the edge the lowest."""
    if k >= len(scores):
        return np.arange(len(scores))
    candidates = np.flatnonzero(scores >= _at_most_kth(scores, k))
    values = scores[candidates]
    edge = np.partition(values, len(values) - k)[len(values) - k]
    above, tied = candidates[values > edge], candidates[values == edge]
    return np.sort(np.concatenate([above, tied[: k - len(above)]]))


def _at_most_kth(scores: Float32, k: int) -> float:
    """A number that at least k scores reach. The k-th largest of the columns' maxima is one, each being a score."""
    columns = len(scores) // _COLUMN
    if columns < 2 * k:
        return -np.inf
    maxima = scores[: columns * _COLUMN].reshape(_COLUMN, columns).max(axis=0)
    return float(np.partition(maxima, columns - k)[columns - k])


def _top_p(probs: Float32, top_p: float) -> Ids:
    """Indices, ascending, of the fewest likeliest tokens whose probabilities exceed top_p.

    As transformers does it: drop from the unlikely end while what is dropped is at most 1 - top_p, in float32.
    """
    spare = np.float32(1.0 - top_p)
    kept = _top_p_in_bins(probs, spare) if len(probs) > _SMALL else None
    if kept is not None:
        return kept
    order = np.argsort(-probs, kind="stable")[::-1]
    dropped = np.cumsum(probs[order], dtype=np.float64)
    first = min(int(dropped.astype(np.float32).searchsorted(spare, side="right")), len(order) - 1)
    return np.sort(order[first:])


def _top_p_in_bins(probs: Float32, spare: np.float32) -> Ids | None:
    """The same, sorting only the bin of nearly equal probabilities in which the edge lies.

    None where the edge is closer than two ways of adding may differ.
    """
    # A double rounds to a float32 of at most `spare` when it is below this.
    limit = (float(spare) + float(np.nextafter(spare, np.float32(2)))) / 2
    sums = _bin_sums(probs).cumsum()
    edge_bin = int(sums.searchsorted(limit, side="right"))
    if edge_bin == len(sums):
        return None
    base = float(sums[edge_bin - 1]) if edge_bin else 0.0
    low, high = (np.array([edge_bin, edge_bin + 1], np.uint32) << _BIN_SHIFT).view(np.float32)
    inside = np.sort(probs[(probs >= low) & (probs < high)])
    dropped = np.cumsum(inside, dtype=np.float64) + base
    first = int(dropped.searchsorted(limit, side="right"))
    margin = 1e-10 * limit  # a sum of 10 ** 6 doubles in any order is within 1.2e-10 of the true one
    if (
        first == len(inside)
        or dropped[first] - limit < margin
        or limit - (dropped[first - 1] if first else base) < margin
    ):
        return None
    edge = inside[first]
    kept = np.flatnonzero(probs >= edge)
    if surplus := first - int(inside.searchsorted(edge)):  # tied with the edge, and dropped before it
        kept = np.delete(kept, np.flatnonzero(probs[kept] == edge)[-surplus:])
    return kept


def _bin_sums(probs: Float32) -> NDArray[np.float64]:
    """Of bins that share sign, exponent and 6 bits: a positive number's bits are in its order.

    In pieces, for bincount's operands, in the types it wants, take fresh memory, which costs more than the sums.
    """
    sums = np.zeros(_BINS)
    for at in range(0, len(probs), _PIECE):
        piece = probs[at : at + _PIECE]
        bins = (piece.view(np.uint32) >> _BIN_SHIFT).astype(np.intp)
        sums += np.bincount(bins, weights=piece.astype(np.float64), minlength=_BINS)
    return sums


def exponentials(scores: Float32) -> Float32:
    """Of the scores less the largest; in one piece of memory."""
    shifted: Float32 = scores - scores.max()
    return np.exp(shifted, out=shifted)


def _softmax(scores: Float32) -> Float32:
    exps = exponentials(scores)
    exps /= exps.sum()
    return exps


def _min_p(scores: Float32, min_p: float) -> Ids:
    """Indices, ascending, of the tokens with at least that share of the likeliest one's probability."""
    probs = _softmax(scores)
    return np.flatnonzero(probs >= np.float32(min_p) * probs.max())


# In transformers' order, after the penalties and the temperature. Of tokens tied at an edge the lowest ids stay.
FILTERS = (
    Filter("top_k", 0, lambda scores, k: top_k(scores, int(k))),
    Filter(
        "top_p",
        1.0,
        lambda scores, p: _top_p(_softmax(scores), p),
        ("above 0 and at most 1 (off)", lambda p: 0 < p <= 1),
    ),
    Filter("min_p", 0.0, _min_p, ("from 0 (off) to 1", lambda p: 0 <= p <= 1)),
)
FILTER_NAMES = tuple(filter_.name for filter_ in FILTERS)
