"""TensorStream: a checkpoint's tensors one after another, for who loads and who writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from numpy.typing import NDArray

from pronk.checkpoint.containers import gguf_blocks, mapped
from pronk.checkpoint.readers.names import rotary_heads, to_interleaved
from pronk.checkpoint.rows import MAPPED, rows
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor, Progress, check_finite
from pronk.errors import BadFile

_PIECE = 1 << 20  # weights: conversions hold no more than this beside the tensor itself


class TensorStream:
    """Each is read when it is asked for. When it is done with, progress is told, and what was mapped given back."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None, *, finite: bool = False) -> None:
        """`finite`: infinity and NaN are refused, with BadFile."""
        self.config, self._path, self._finite = checkpoint.config, checkpoint.path, finite
        self._tensors, self._progress = checkpoint.tensors, progress
        self._current: LazyTensor | None = None
        self._done, self._total = 0, sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        self._touched = 0  # bytes, since any were given back

    def __iter__(self) -> Iterator[LazyTensor]:
        """All, in the checkpoint's order."""
        for name in self._tensors:
            yield self._next(name)
        self.finish()

    def rows(
        self, name: str, stored: Collection[str] = (), *, most: int | None = None, interleaved: bool = False
    ) -> Iterator[NDArray[Any]]:
        """As rows.rows has them. `interleaved`: those of rotary embeddings as GGUF and llama2.c have them."""
        head = self.config.head_dim if interleaved and rotary_heads(name, self.config) else 0
        for _, array, dtype in rows(self._next(name), most or _PIECE, stored, unit=head or 1):
            if self._finite:
                self._check(name, array, dtype)
            yield to_interleaved(array, len(array) // head) if head else array

    def _check(self, name: str, array: NDArray[Any], dtype: str) -> None:
        if dtype in PLAIN_DTYPES:
            check_finite(self._path, name, array)
        elif dtype in gguf_blocks.BLOCK_TYPES and not gguf_blocks.finite(dtype, array):
            raise BadFile(self._path, "holds infinity or NaN; no trained model does", field=f"tensor {name!r}")

    def finish(self) -> None:
        """No more are asked for."""
        self._end()
        mapped.let_go()

    def _next(self, name: str) -> LazyTensor:
        self._end()
        self._current = self._tensors[name]
        return self._current

    def _end(self) -> None:
        if self._current is None:
            return
        self._done += self._current.nbytes
        self._touched += self._current.nbytes
        if self._touched >= MAPPED:
            mapped.let_go()
            self._touched = 0
        if self._progress:
            self._progress(self._current.name, self._done, self._total)
        self._current = None
