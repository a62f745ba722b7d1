"""Grids: what GGUF's block types can hold.

A group of weights shares a scale and, in some types, a minimum: w ~ scale * q + minimum, with whole numbers q. Older
types store both in float16. The K types gather groups in blocks of 256 and store whole numbers for them, a few bits
each, beside one or two float16 that these multiply: scale = d * n, minimum = -dmin * m. Of the IQ4 types q is one of 16
numbers that lie as weights do.
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
    curved: bool = False  # codes are gguf_blocks.IQ4's numbers, which lie closer together around 0

    @property
    def bits(self) -> int:
        return 4 if self.curved else (self.high - self.low).bit_length()


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
    "IQ4_NL": Rule(32, 32, -127, 113, curved=True),
    "IQ4_XS": Rule(256, 32, -127, 113, scales=(-32, 31), curved=True),
}
