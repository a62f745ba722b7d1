"""Turned rows: what is large in a few numbers of a row is spread over many, which rounds to whole numbers better.

A row [K] is cut into blocks of the largest power of two, up to 256, that divides K, and each block x becomes H x with
Sylvester's Hadamard matrix: H = [[H', H'], [H', -H']] / sqrt(2). H is orthogonal, and its own inverse: turned
activations times turned weights are the product that they were, and what is turned twice is itself again, but for
rounding. (QuaRot, arXiv 2404.00456, turns what a model's last MLP matrix reads so, and folds all else into weights;
here each product has its own, so that nothing between two products is changed, and no model is left out. Where K is
odd, a block is one number, and nothing is turned.)

float32 throughout, its sums and differences in one order: src/native/turn.h and the torch engine give the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST = 256  # numbers of a block
_PIECE = 1 << 16  # numbers that are turned at once: they stay in the second-level cache


def together(columns: int) -> int:
    """Numbers of a block."""
    return min(columns & -columns, MOST)


def turn(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., K] float32. What overflows becomes infinite, or NaN."""
    block = together(rows.shape[-1])
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, block)
    turned = np.empty_like(blocks)
    step = max(1, _PIECE // block)
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, len(blocks), step):
            turned[at : at + step] = _turned(blocks[at : at + step])
    return turned.reshape(rows.shape)


def _turned(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, block]"""
    block, stages = blocks.shape[1], blocks
    for _ in range(block.bit_length() - 1):
        following = np.empty_like(blocks)
        first, second = stages[:, : block // 2], stages[:, block // 2 :]
        np.add(first, second, out=following[:, 0::2])
        np.subtract(first, second, out=following[:, 1::2])
        stages = following
    turned: NDArray[np.float32] = stages * (np.float32(1) / np.sqrt(np.float32(block)))
    return turned
