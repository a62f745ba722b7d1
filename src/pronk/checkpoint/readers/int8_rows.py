"""INT8, TURNED_INT8 and LLM_INT8 tensors: rows of int8 codes, each row with one float32 scale; a weight is scale *
code, or, of TURNED_INT8, what that is once it is turned back (formats.turn).

`read_blocks()` of such a tensor gives uint8 [N, 4 + K]: the scale of a row, little-endian, and its K codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import LazyTensor
from pronk.errors import BadFile, Unsupported, short
from pronk.formats.turn import turn

_PIECE = 1 << 20  # weights that are multiplied out at once

_LARGEST_SCALE = np.finfo(np.float32).max / 128  # of a code of -128 it is the last that is finite

Int8s = NDArray[np.int8]
Floats = NDArray[np.float32]


class Layout(NamedTuple):
    """How a method that has such rows in folders names and scales what stands beside the codes of X.weight."""

    dtype: str  # of the tensors here
    method: str  # as config.json names it
    scale: str  # what the scale's name ends in: X.scale
    scale_dtypes: tuple[str, ...]  # it may be stored in; the first is what is written
    column: bool  # [N, 1]; else [N], which is read of both
    steps: int  # of a code that one of it stands for
    companion: str  # the end of the name of a tensor that may stand there, too, all zeros
    marked: bool  # whether it is written
    turned: bool = False


LAYOUTS = {
    layout.dtype: layout
    for layout in (
        Layout(
            "INT8", "compressed-tensors", "weight_scale", ("F32", "F16", "BF16"), True, 1, "weight_zero_point", False
        ),
        Layout(
            "TURNED_INT8",
            "compressed-tensors",
            "weight_scale",
            ("F32", "F16", "BF16"),
            True,
            1,
            "weight_zero_point",
            False,
            True,
        ),
        Layout(
            "LLM_INT8", "bitsandbytes", "SCB", ("F32",), False, 127, "weight_format", True
        ),  # SCB: of a row, max |w|
    )
}


def lazy(
    layout: Layout, path: Path, codes: LazyTensor, scale: LazyTensor, zeros: LazyTensor | None = None
) -> LazyTensor:
    """The tensor of int8 `codes` [N, K] and of `scale`, N numbers.

    `zeros`, a zero point or a number for the order of codes, must be 0, and like the scales is looked at when read:
    BadFile where a scale is negative, or it or a weight is not finite; Unsupported for another order.
    """
    rows, cols = codes.shape

    def scales() -> Floats:
        if zeros is not None and _bytes(zeros).any():
            raise Unsupported(f"{path}: tensor {short(zeros.name)} is not zero; only codes in rows, around 0, are read")
        stored: Floats = scale.read().reshape(rows).astype(np.float32)
        if not (np.isfinite(stored) & (stored >= 0)).all():
            raise BadFile(path, "holds a scale that is negative or not finite", field=f"tensor {short(scale.name)}")
        stored /= np.float32(layout.steps)
        if (stored > _LARGEST_SCALE).any():
            raise BadFile(path, "holds a scale of weights that are not finite", field=f"tensor {short(scale.name)}")
        return stored

    def read() -> Floats:
        return numbers(layout.dtype, read_blocks())

    def read_blocks() -> NDArray[np.uint8]:
        return join(scales(), _bytes(codes).view(np.int8))

    nbytes = codes.nbytes + scale.nbytes + (zeros.nbytes if zeros else 0)
    return LazyTensor(codes.name, (rows, cols), layout.dtype, nbytes, read, read_blocks)


def _bytes(tensor: LazyTensor) -> NDArray[np.uint8]:
    """Of a tensor of codes, which containers give in no other way."""
    assert tensor.read_blocks is not None
    return tensor.read_blocks()


def join(scale: Floats, codes: Int8s) -> NDArray[np.uint8]:
    """Scales [N] and codes [N, K] to blocks [N, 4 + K]."""
    blocks = np.empty((len(codes), 4 + codes.shape[1]), np.uint8)
    blocks[:, :4] = np.ascontiguousarray(scale.astype("<f4", copy=False)).view(np.uint8).reshape(-1, 4)
    blocks[:, 4:] = codes.view(np.uint8)
    return blocks


def split(blocks: NDArray[np.uint8]) -> tuple[Floats, Int8s]:
    """The inverse of `join`; the codes are a view."""
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4").reshape(-1)
    return scale.astype(np.float32, copy=False), blocks[:, 4:].view(np.int8)


def numbers(dtype: str, blocks: NDArray[np.uint8]) -> Floats:
    """[N, K] of rows as a tensor of this type has them."""
    values = multiply(*split(blocks))
    return turn(values) if LAYOUTS[dtype].turned else values


def multiply(scale: Floats, codes: Int8s) -> Floats:
    """scale * code, [N, K]."""
    values = np.empty(codes.shape, np.float32)
    step = max(1, _PIECE // max(1, codes.shape[1]))
    for first in range(0, len(codes), step):
        part = slice(first, first + step)
        np.multiply(codes[part], scale[part, None], out=values[part], dtype=np.float32)
    return values
