"""What a frozen weight is kept in, and what all of them take: see pronk.torch_engine.codes."""

from __future__ import annotations

import numpy as np

from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.errors import BadRequest
from pronk.formats import FORMATS, TRAINED, kept, packed


def check(wish: str | None) -> None:
    if wish not in (None, "auto", *TRAINED):
        raise BadRequest(f"in training, quantize must be one of {', '.join(('auto', *TRAINED))}, not {wish!r}")


def asks(wish: str | None) -> bool:
    """Whether weights are to be codes whatever the file has."""
    return wish in FORMATS and FORMATS[wish].codes is not None


def format_of(tensor: LazyTensor, wish: str | None) -> str | None:
    """What a weight is kept in while it is frozen: a format of codes, or None for float32.

    `wish` "auto": codes of the file stay what they are where a format here holds them. Only matrices of blocks are kept
    in codes, and none where nothing is wished.
    """
    if wish is None or not tensor.name.startswith("model.layers.") or len(tensor.shape) != 2:
        return None
    if wish != "auto":
        return wish if asks(wish) else None
    own = kept(tensor.dtype)
    name = own.kind_of or own.name
    return name if asks(name) and name in TRAINED and own.holds(tensor.dtype) else None


def nbytes(checkpoint: Checkpoint, wish: str | None) -> int:
    """What all weights take in memory."""

    def one(tensor: LazyTensor) -> int:
        format = format_of(tensor, wish)
        return packed(format, tensor.dtype).nbytes(*tensor.shape) if format else 4 * int(np.prod(tensor.shape))

    return sum(map(one, checkpoint.tensors.values()))
