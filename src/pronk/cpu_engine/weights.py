"""A checkpoint's tensors into the native model, one by one: its peak is the packed weights and a part of a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.containers import gguf_blocks, mapped
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor, Progress
from pronk.cpu_engine.slots import Slot
from pronk.errors import BadFile
from pronk.formats import FORMATS

if TYPE_CHECKING:
    from pronk import _native

# Block types that the packing code reads itself.
_DIRECT = {s for format in FORMATS.values() for s in (*format.stored, *format.nearly)} - PLAIN_DTYPES.keys()
_PIECE = 1 << 24  # bytes of a tensor that are packed at once


def packed_bytes(native: Callable[[str, int, int, bool], int], checkpoint: Checkpoint, slots: list[Slot]) -> int:
    """What all slots will take."""
    total = 0
    for slot in slots:
        rows, cols = checkpoint.tensors[slot.tensors[0]].shape
        total += native(slot.format.name, rows, cols, len(slot.tensors) > 1)
    return total


def commonest(checkpoint: Checkpoint, slots: list[Slot]) -> str:
    """The format of the most weights; a kind of another counts as that."""
    counts: Counter[str] = Counter()
    for slot in slots:
        for name in slot.tensors:
            counts[slot.format.kind_of or slot.format.name] += int(np.prod(checkpoint.tensors[name].shape))
    return counts.most_common(1)[0][0]


def pack(model: _native.Model, checkpoint: Checkpoint, slots: list[Slot], progress: Progress | None) -> None:
    """Fill `model`. Raises BadFile where a number is not finite, or does not fit its format."""
    for slot in slots:
        model.allocate(slot.role, slot.layer, slot.format.name)
    if checkpoint.config.tie_word_embeddings:
        model.tie()
    formats = {name: slot.format.name for slot in slots for name in slot.tensors}
    total, done, unreleased = sum(t.nbytes for t in checkpoint.tensors.values()), 0, 0
    for name, tensor in checkpoint.tensors.items():
        role, layer, kind = place(name)
        if name in formats:
            good = _pack_matrix(model, role, layer, tensor)
        else:
            good = _set_vector(model, role, layer, kind, tensor)
        if not good:
            problem = f"holds a number that is not finite, or too large for {formats.get(name, 'f32')}"
            raise BadFile(checkpoint.path, problem, field=f"tensor {name!r}")
        done, unreleased = done + tensor.nbytes, unreleased + tensor.nbytes
        if unreleased >= _PIECE:
            mapped.let_go()
            unreleased = 0
        if progress:
            progress(name, done, total)
    mapped.let_go()


def place(name: str) -> tuple[str, int, str]:
    """The role, the layer (-1: none) and "weight" or "bias" of a tensor."""
    *path, role, kind = name.split(".")
    return role, int(path[2]) if path[:2] == ["model", "layers"] else -1, kind


def _pack_matrix(model: _native.Model, role: str, layer: int, tensor: LazyTensor) -> bool:
    for first, raw, source in _pieces(tensor):
        if not model.pack(role, layer, raw, source, first):
            return False
        if raw.nbytes >= _PIECE // 2:  # a part of a large tensor, which is not to stay until the rest of it is read
            mapped.let_go()
    return True


def _pieces(tensor: LazyTensor) -> Iterator[tuple[int, NDArray[np.uint8], str]]:
    """Rows from `first` on as bytes, and the type they are of: the stored one, or float32."""
    in_blocks = tensor.read_blocks is not None and tensor.dtype in _DIRECT | gguf_blocks.BLOCK_TYPES.keys()
    array = tensor.read_blocks() if tensor.read_blocks and in_blocks else tensor.read()
    # In whole panels of 64 rows, which several threads then share.
    step = max(1, _PIECE // (array[0].nbytes * (4 if in_blocks else 1)) // 64) * 64
    for first in range(0, len(array), step):
        rows = np.ascontiguousarray(array[first : first + step])
        if not in_blocks:
            source = tensor.dtype if tensor.dtype in PLAIN_DTYPES else "F32"
        elif tensor.dtype in _DIRECT:
            source = tensor.dtype
        else:
            rows, source = gguf_blocks.decode(tensor.dtype, rows), "F32"
        yield first, rows.view(np.uint8), source


def _set_vector(model: _native.Model, role: str, layer: int, kind: str, tensor: LazyTensor) -> bool:
    values = np.ascontiguousarray(tensor.read(), np.float32)
    if not np.isfinite(values).all():
        return False
    if kind == "bias":
        model.set_bias(role, layer, values)
    else:
        model.set_norm(role, layer, values)
    return True
