"""What every writer needs: tensors handed over one at a time, and numbers written out a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, Progress, check_finite
from pronk.config import ModelConfig
from pronk.errors import BadFile, Unsupported

_PIECE = 1 << 20  # elements: conversions never hold more than this beside the tensor itself


class TensorStream:
    """The tensors of a checkpoint, each read when it is asked for and reported as it is."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None, *, finite: bool = False) -> None:
        """`finite`: infinity and NaN are refused, with BadFile."""
        self.config: ModelConfig = checkpoint.config
        self._path, self._finite = checkpoint.path, finite
        self._tensors, self._progress = checkpoint.tensors, progress
        self._done, self._total = 0, sum(tensor.nbytes for tensor in checkpoint.tensors.values())

    def read(self, name: str) -> NDArray[Any]:
        self._report(name)
        array = self._tensors[name].read()
        if self._finite:
            check_finite(self._path, name, array)
        return array

    def read_blocks(self, name: str, *dtypes: str) -> NDArray[np.uint8] | None:
        """The stored blocks, if they are of one of these types."""
        tensor = self._tensors[name]
        if tensor.dtype not in dtypes or tensor.read_blocks is None:
            return None
        self._report(name)
        blocks = tensor.read_blocks()
        if self._finite and tensor.dtype in gguf_blocks.BLOCK_TYPES and not gguf_blocks.finite(tensor.dtype, blocks):
            raise BadFile(self._path, "holds infinity or NaN; no trained model does", field=f"tensor {name!r}")
        return blocks

    def finish(self) -> None:
        if self._progress:
            self._progress("", self._total, self._total)

    def _report(self, name: str) -> None:
        if self._progress:
            self._progress(name, self._done, self._total)
        self._done += self._tensors[name].nbytes


def pieces(array: NDArray[Any], unit: int = 1) -> Iterator[NDArray[Any]]:
    """`array`, flattened, in pieces of whole units."""
    flat = array.reshape(-1)
    step = max(_PIECE // unit, 1) * unit
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def write_numbers(file: BinaryIO, name: str, array: NDArray[Any], dtype: str) -> None:
    """In "F32", "F16" or "BF16", little-endian, rounded to nearest. Raises Unsupported for what would overflow."""
    target = PLAIN_DTYPES[dtype]
    for piece in pieces(array):
        with np.errstate(over="ignore", invalid="ignore"):
            converted = piece.astype(target, copy=False)
        lost = piece[np.isinf(converted)]
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
