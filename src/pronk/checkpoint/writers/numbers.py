"""Numbers to a file: little-endian, and refused by name where a type cannot hold them."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.errors import Unsupported


def write_numbers(file: BinaryIO, name: str, array: NDArray[Any], dtype: str) -> None:
    """In "F32", "F16" or "BF16", little-endian, rounded to nearest. Raises Unsupported for what would overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(PLAIN_DTYPES[dtype], copy=False)
    lost = array[np.isinf(converted)]
    lost = lost[np.isfinite(lost)]
    if lost.size:
        raise Unsupported(f"tensor {name!r} holds {abs(lost).max():g}, which {dtype.lower()} cannot; use f32")
    write_array(file, converted)


def require_finite(name: str, array: NDArray[Any], dtype: str) -> None:
    """Raises Unsupported: a scale of infinity or NaN would spoil all that share it."""
    if not np.isfinite(array).all():
        raise Unsupported(f"tensor {name!r} holds infinity or NaN, which {dtype.lower()} cannot hold; use f32")


def write_array(file: BinaryIO, array: NDArray[Any]) -> None:
    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    file.write(words.astype(f"<u{array.dtype.itemsize}", copy=False).data)
