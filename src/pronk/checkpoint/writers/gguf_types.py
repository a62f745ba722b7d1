"""Which GGUF type each tensor is written as: one for all matrices, or by the beginnings of their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor
from pronk.checkpoint.wishes import beginning, check, is_outer
from pronk.errors import BadRequest
from pronk.formats.quantize import GROUP

# What may be asked for, and the type that holds it. q8 and q4 round as formats.quantize does, q8_0 as ggml.
STORED = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q8": "Q8_0", "q4": "Q4_1"}

# Blocks that hold already what is asked for, and are copied: quantizing again would round again.
_COPIED = {"q8_0": ("Q8_0",), "q8": ("Q8_0",), "q4": ("Q4_0", "Q4_1", "Q4_K")}
_WIDTHS = {"q4": 0, "q8": 1, "q8_0": 1, "f16": 2, "bf16": 2, "f32": 3}
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip


def assign(checkpoint: Checkpoint, wishes: Mapping[str, str]) -> dict[str, str]:
    """For each tensor a key of STORED, or the block type it has, which is to be copied.

    `wishes`: keys of STORED, as wishes.py has them; what is left out stays as it is. gate_proj and up_proj of
    a layer, which pronk computes as one matrix, get the wider of their two. Vectors are f32, and rows that do not fill
    blocks of 32 are f16. Raises BadRequest.
    """
    for wish in wishes.values():
        if wish not in STORED:
            raise BadRequest(f"a GGUF file is not written in {wish!r}; choose from {', '.join(STORED)}")
    check(checkpoint, wishes)
    formats = {name: _format(tensor, wishes) for name, tensor in checkpoint.tensors.items()}
    for layer in range(checkpoint.config.num_hidden_layers):
        pair = [f"model.layers.{layer}.mlp.{kind}.weight" for kind in ("gate_proj", "up_proj")]
        a, b = (formats[name] for name in pair)
        if a != b and a in STORED and b in STORED:
            formats.update(dict.fromkeys(pair, _wider(a, b)))
    return formats


def stored(format: str) -> str:
    """The GGUF type of a format that `assign` gave."""
    return STORED.get(format, format)


def file_type(checkpoint: Checkpoint, formats: Mapping[str, str]) -> int:
    """general.file_type, which has one number for all: that of the most weights."""
    counts = Counter[str]()
    for name, tensor in checkpoint.tensors.items():
        counts[stored(formats[name])] += int(np.prod(tensor.shape))
    return _FILE_TYPES[counts.most_common(1)[0][0]]


def _format(tensor: LazyTensor, wishes: Mapping[str, str]) -> str:
    if len(tensor.shape) == 1:
        return "f32"
    decides = beginning(tensor.name, wishes)
    if decides is None and (tensor.dtype in PLAIN_DTYPES or tensor.dtype in BLOCK_TYPES):
        return tensor.dtype.lower() if tensor.dtype in PLAIN_DTYPES else tensor.dtype
    wish = "q8" if decides is None else wishes[decides]  # int8 rows, which GGUF has not
    if tensor.dtype in _COPIED.get(wish, ()):
        return tensor.dtype
    if wish == "q4" and is_outer(tensor.name, decides):  # four bits cost more there than anywhere else
        return _format(tensor, {"": "q8"})
    return "f16" if STORED[wish] in BLOCK_TYPES and tensor.shape[1] % GROUP else wish


def _wider(a: str, b: str) -> str:
    """What holds both; of two 16-bit types neither holds the other."""
    if _WIDTHS[a] == _WIDTHS[b]:
        return "f32"
    return max(a, b, key=_WIDTHS.__getitem__)
