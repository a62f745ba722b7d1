"""FILTERS: which tokens may be drawn, as one ordered table; and their functions, over vocabularies of any size.

Each has one plain meaning, which tests/plain_sampling.py states in full sorts, and is made fast by leaving out,
with certainty, what cannot matter. The survivors are the same to the last token, here and in src/native/sampling.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Ids = NDArray[np.intp]

ONE = 1 << 38  # the weight of the likeliest token; those of 2**24 tokens fit into 63 bits
_COLUMN = 64
_REACHES = (4, 8, 16, np.inf)  # how far below the largest the scores lie that are sorted, if that is enough


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


def _top_p(scores: Float32, top_p: float) -> Ids:
    """Indices, ascending, of the fewest likeliest tokens whose probabilities exceed top_p.

    As transformers does it: drop from the unlikely end while what is dropped is at most 1 - top_p, in float32.
    """
    spare, weigh = np.float32(1.0 - top_p), weights(scores)
    total = weigh.sum()
    for reach in _REACHES:
        candidates = np.flatnonzero(scores >= scores.max() - np.float32(reach))
        if _share(total - weigh[candidates].sum(), total) <= spare:
            break
    best_first = candidates[np.argsort(-scores[candidates], kind="stable")]
    enough = _share(total - weigh[best_first].cumsum(), total) <= spare
    return np.sort(best_first[: int(enough.argmax()) + 1])


def _share(part: Any, total: Any) -> Any:
    return (part / total).astype(np.float32)


def _min_p(scores: Float32, min_p: float) -> Ids:
    """Indices, ascending, of the tokens with at least that share of the likeliest one's probability."""
    return np.flatnonzero(exponentials(scores) >= np.float32(min_p))


def exponentials(scores: Float32) -> Float32:
    """Of the scores less the largest, within 2 units in the last place; of less than -40, of that.

    From sums and products alone, each rounded once: so every processor has the same bits, and src/native, too.
    """
    x = np.maximum(scores - scores.max(), np.float32(-40))
    n = np.rint(x * np.float32(1.44269504))
    x -= n * np.float32(0.693359375)  # of 10 bits, so that the product is exact
    x -= n * np.float32(-2.12194440e-4)
    power = np.full_like(x, np.float32(1 / 5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        power *= x
        power += np.float32(1 / factorial)
    found: Float32 = np.ldexp(power, n.astype(np.int32))
    return found


def weights(scores: Float32) -> NDArray[np.int64]:
    """Probabilities, but for their sum: exponentials in whole 2**-38ths, which add up to the same in any order.

    What is not half of that beside the likeliest token weighs nothing, and is never drawn.
    """
    found: NDArray[np.int64] = np.rint(exponentials(scores) * np.float64(ONE)).astype(np.int64)
    return found


# In transformers' order, after the penalties and the temperature. Of tokens tied at an edge the lowest ids stay.
FILTERS = (
    Filter("top_k", 0, lambda scores, k: top_k(scores, int(k))),
    Filter(
        "top_p",
        1.0,
        _top_p,
        ("above 0 and at most 1 (off)", lambda p: 0 < p <= 1),
    ),
    Filter("min_p", 0.0, _min_p, ("from 0 (off) to 1", lambda p: 0 <= p <= 1)),
)
FILTER_NAMES = tuple(filter_.name for filter_ in FILTERS)
