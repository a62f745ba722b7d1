"""Grids: what GGUF's block types can hold.

A group of weights shares a scale and, in some types, a minimum: w ~ scale * q + minimum, with whole numbers q. Older
types store both in float16. The K types gather groups in blocks of 256 and store whole numbers for them, a few bits
each, beside one or two float16 that these multiply: scale = d * n, minimum = -dmin * m.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    block: int  # weights of a block
    group: int  # weights with a scale of their own
    low: int  # codes
    high: int
    minimum: bool = False
    scales: tuple[int, int] | None = None  # numbers that d is multiplied by (dmin likewise, from 0); None: no d

    @property
    def bits(self) -> int:
        return (self.high - self.low).bit_length()


RULES = {
    "Q4_0": Rule(32, 32, -8, 7),
    "Q4_1": Rule(32, 32, 0, 15, minimum=True),
    "Q5_0": Rule(32, 32, -16, 15),
    "Q5_1": Rule(32, 32, 0, 31, minimum=True),
    "Q8_0": Rule(32, 32, -127, 127),
    "Q2_K": Rule(256, 16, 0, 3, minimum=True, scales=(0, 15)),
    "Q3_K": Rule(256, 16, -4, 3, scales=(-32, 31)),
    "Q4_K": Rule(256, 32, 0, 15, minimum=True, scales=(0, 63)),
    "Q5_K": Rule(256, 32, 0, 31, minimum=True, scales=(0, 63)),
    "Q6_K": Rule(256, 16, -32, 31, scales=(-128, 127)),
}
