"""Packing: codes, scales and minima as the bytes of GGUF's blocks, the inverse of gguf_blocks.py's decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate.gptq import Rounded
from pronk.calibrate.grids import RULES
from pronk.checkpoint.containers import gguf_blocks

Bytes = NDArray[Any]  # uint8, and so is all that is shifted and masked of it


def blocks(made: Rounded) -> Bytes:
    """uint8 [N, bytes a row]"""
    rule = RULES[made.kind]
    rows = len(made.codes)
    q = made.codes.astype(np.int8, copy=False).view(np.uint8).reshape(-1, rule.block)
    q = _OF_IQ4[q] if rule.curved else q + np.uint8(_ORIGIN.get(made.kind, 0))
    d, dmin = (half.reshape(-1, 1).astype("<f2").view(np.uint8) for half in (made.d, made.dmin))
    n, m = (number.reshape(len(q), -1).astype(np.int8).view(np.uint8) for number in (made.n, made.m))
    parts = _LAYOUTS[made.kind](q, d, dmin, n, m)
    return np.concatenate(parts, axis=1).reshape(rows, -1)


_OF_IQ4 = np.zeros(256, np.uint8)  # the code of each of its numbers, whose bytes these are found by
_OF_IQ4[gguf_blocks.IQ4.astype(np.int8).view(np.uint8)] = np.arange(16)
_ORIGIN = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}  # what stands for 0


def _nibbles(q: Bytes, group: int) -> Bytes:
    """[B, E] to [B, E / 2]: of each 2 `group` codes the first in the low halves, the others in the high ones."""
    pairs = q.reshape(len(q), -1, 2, group)
    packed: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return packed.reshape(len(q), -1)


def _pairs(q: Bytes, group: int) -> Bytes:
    """[B, E] to [B, E / 4]: of each 4 `group` codes of two bits the first in the lowest, and so on."""
    fours = q.reshape(len(q), -1, 4, group)
    packed: Bytes = fours[:, :, 0] | fours[:, :, 1] << 2 | fours[:, :, 2] << 4 | fours[:, :, 3] << 6
    return packed.reshape(len(q), -1)


def _bits(q: Bytes, bit: int) -> Bytes:
    """[B, 256] to [B, 32]: one bit of each code; that of code 32 i + j is bit i of byte j."""
    eights = q.reshape(len(q), 8, 32) >> bit & 1
    return np.packbits(eights, axis=1, bitorder="little")[:, 0]


def _fifth(q: Bytes) -> Bytes:
    """[B, 32] to [B, 4]: the fifth bit of each code."""
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _numbers(n: Bytes, m: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit minima in twelve bytes."""
    first, last = slice(4), slice(4, 8)
    low = n[:, first] | n[:, last] >> 4 << 6
    middle = m[:, first] | m[:, last] >> 4 << 6
    return np.concatenate((low, middle, n[:, last] & 15 | (m[:, last] & 15) << 4), axis=1)


def _q2_k(q: Bytes, d: Bytes, dmin: Bytes, n: Bytes, m: Bytes) -> tuple[Bytes, ...]:
    return n | m << 4, _pairs(q, 32), d, dmin


def _q3_k(q: Bytes, d: Bytes, dmin: Bytes, n: Bytes, m: Bytes) -> tuple[Bytes, ...]:
    n = n + np.uint8(32)  # from 0 to 63
    return _bits(q, 2), _pairs(q & 3, 32), _nibbles(n & 15, 8), _pairs(n >> 4, 4), d


def _q5_k(q: Bytes, d: Bytes, dmin: Bytes, n: Bytes, m: Bytes) -> tuple[Bytes, ...]:
    return d, dmin, _numbers(n, m), _bits(q, 4), _nibbles(q & 15, 32)


def _iq4_xs(q: Bytes, d: Bytes, dmin: Bytes, n: Bytes, m: Bytes) -> tuple[Bytes, ...]:
    n = n + np.uint8(32)  # from 0 to 63
    return d, _pairs(n >> 4, 1), _nibbles(n & 15, 1), _nibbles(q, 16)


_LAYOUTS: dict[str, Callable[[Bytes, Bytes, Bytes, Bytes, Bytes], tuple[Bytes, ...]]] = {
    "Q4_0": lambda q, d, dmin, n, m: (d, _nibbles(q, 16)),
    "Q4_1": lambda q, d, dmin, n, m: (d, dmin, _nibbles(q, 16)),
    "Q5_0": lambda q, d, dmin, n, m: (d, _fifth(q), _nibbles(q & 15, 16)),
    "Q5_1": lambda q, d, dmin, n, m: (d, dmin, _fifth(q), _nibbles(q & 15, 16)),
    "Q8_0": lambda q, d, dmin, n, m: (d, q),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda q, d, dmin, n, m: (d, dmin, _numbers(n, m), _nibbles(q, 32)),
    "Q5_K": _q5_k,
    "Q6_K": lambda q, d, dmin, n, m: (_nibbles(q & 15, 64), _pairs(q >> 4, 32), n, d),
    "IQ4_NL": lambda q, d, dmin, n, m: (d, _nibbles(q, 16)),
    "IQ4_XS": _iq4_xs,
}
