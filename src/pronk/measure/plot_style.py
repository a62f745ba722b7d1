"""A colour for each name, in all plots and tables of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from types import MappingProxyType

# Okabe and Ito's colours, which people with any of the common colour blindnesses tell apart, in an order that keeps
# neighbours far from each other; yellow, which vanishes on paper, is darker, and a purple is added. The original is
# grey: it is the ground.
ORIGINAL = "#7A8190"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B5A642", "#AA3377")


def colours(
    names: Sequence[str], original: str | None = None, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """A colour for each name; the original's is the grey one. After eight the palette begins again.

    `known`: the colours that some have elsewhere. They keep these, and no other gets one while there is a free one.
    """
    have = {name: known[name] for name in names if name in known} | ({} if original is None else {original: ORIGINAL})
    others = [name for name in dict.fromkeys(names) if name not in have]
    free = [colour for colour in PALETTE if colour not in have.values()]
    return have | dict(zip(others, cycle(free or PALETTE), strict=False))
