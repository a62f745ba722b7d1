"""A checkpoint's tensors into the native model, one by one: its peak is the packed weights and a part of a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.rows import rows
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import PLAIN_DTYPES, SCORE, Checkpoint, LazyTensor, Progress
from pronk.cpu_engine.slots import Slot
from pronk.errors import BadFile
from pronk.formats import FORMATS

if TYPE_CHECKING:
    from pronk import _native

# Block types that the packing code reads itself.
_DIRECT = {s for format in FORMATS.values() for s in (*format.stored, *format.nearly)} - PLAIN_DTYPES.keys()
_PIECE, _PANEL = 1 << 22, 64  # weights that are packed at once; rows that one thread packs


def packed_bytes(native: Callable[[str, int, int, bool], int], checkpoint: Checkpoint, slots: list[Slot]) -> int:
    """What all slots will take."""
    total = 0
    for slot in slots:
        n, k = checkpoint.tensors[slot.tensors[0]].shape
        total += native(slot.format.name, n, k, len(slot.tensors) > 1)
    return total


def commonest(checkpoint: Checkpoint, slots: list[Slot]) -> str:
    """The format of the most weights; a kind of another counts as that."""
    counts: Counter[str] = Counter()
    for slot in slots:
        for name in slot.tensors:
            counts[slot.format.kind_of or slot.format.name] += int(np.prod(checkpoint.tensors[name].shape))
    return counts.most_common(1)[0][0]


def pack(
    model: _native.Model,
    checkpoint: Checkpoint,
    slots: list[Slot],
    progress: Progress | None,
    *,
    mounted: bool = False,
) -> None:
    """Fill `model`, whose matrices are there already if it is `mounted`. Raises BadFile where a number is not finite,
    or does not fit its format."""
    for slot in slots:
        model.allocate(slot.role, slot.layer, slot.format.name)
    if not checkpoint.config.has_head:  # of a reward model nobody asks for logits
        model.tie()
    formats = {name: slot.format.name for slot in slots for name in slot.tensors}
    for tensor in TensorStream(checkpoint, progress):
        if tensor.name == SCORE or (mounted and tensor.name in formats):  # the former is multiplied in engine/scores.py
            continue
        role, layer, kind = place(tensor.name)
        if tensor.name in formats:
            parts = rows(tensor, _PIECE, _DIRECT, unit=_PANEL)
            good = all(model.pack(role, layer, _bytes(part.array), part.dtype, part.first) for part in parts)
        else:
            good = _set_vector(model, role, layer, kind, tensor)
        if not good:
            problem = f"holds a number that is not finite, or too large for {formats.get(tensor.name, 'f32')}"
            raise BadFile(checkpoint.path, problem, field=f"tensor {tensor.name!r}")


def place(name: str) -> tuple[str, int, str]:
    """The role, the layer (-1: none) and "weight" or "bias" of a tensor."""
    *path, role, kind = name.split(".")
    return role, int(path[2]) if path[:2] == ["model", "layers"] else -1, kind


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _set_vector(model: _native.Model, role: str, layer: int, kind: str, tensor: LazyTensor) -> bool:
    values = np.ascontiguousarray(tensor.read(), np.float32)
    if not np.isfinite(values).all():
        return False
    if kind == "bias":
        model.set_bias(role, layer, values)
    else:
        model.set_norm(role, layer, values)
    return True
