"""A tensor's rows, some at a time, as its file has them or as the numbers they stand for: no other loop reads them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.containers import gguf_blocks, mapped
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import PLAIN_DTYPES, LazyTensor

MAPPED = 1 << 24  # bytes of files that stay mapped while their tensors are read


class Rows(NamedTuple):
    first: int
    array: NDArray[Any]  # [n, K] numbers, or [n, bytes a row] as stored
    dtype: str  # of a number: "F32", "F16" or "BF16"; or what is stored


def rows(tensor: LazyTensor, most: int, stored: Collection[str] = (), *, unit: int = 1) -> Iterator[Rows]:
    """All rows of a tensor [N, ...], at most `most` weights at a time, but at least `unit` rows and a multiple of it.

    A tensor of a type in `stored` comes as stored. Of others with blocks a piece at a time is decoded; all else is what
    `read` gives. What was mapped of a file is given back as it goes.
    """
    array, in_blocks = _source(tensor, stored)
    as_stored = in_blocks and tensor.dtype in stored
    dtype = tensor.dtype if as_stored or tensor.dtype in PLAIN_DTYPES else "F32"
    step = max(1, most // max(1, math.prod(tensor.shape[1:])) // unit) * unit
    touched = 0
    for first in range(0, len(array), step):
        piece = array[first : first + step]
        yield Rows(first, _numbers(tensor.dtype, piece) if in_blocks and not as_stored else piece, dtype)
        touched += piece.nbytes
        if touched >= MAPPED:
            mapped.let_go()
            touched = 0


def picked(tensor: LazyTensor, which: list[int]) -> NDArray[np.float32]:
    """Some rows of a matrix, as numbers."""
    array, in_blocks = _source(tensor)
    return _numbers(tensor.dtype, array[which]) if in_blocks else array[which].astype(np.float32)


def _source(tensor: LazyTensor, stored: Collection[str] = ()) -> tuple[NDArray[Any], bool]:
    """What rows are taken from: the stored blocks, where wanted or decodable in part, else the numbers."""
    if tensor.read_blocks and tensor.dtype in (*stored, *gguf_blocks.BLOCK_TYPES, *int8_rows.LAYOUTS):
        return tensor.read_blocks(), True
    return tensor.read(), False


def _numbers(dtype: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    if dtype in int8_rows.LAYOUTS:
        return int8_rows.numbers(dtype, blocks)
    return gguf_blocks.decode(dtype, blocks)
