"""Which GGUF type each tensor is written as: one for all matrices, or by the beginnings of their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from pronk import formats
from pronk.checkpoint import prefixes
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
from pronk.checkpoint.containers.gguf_file import FILE_TYPES
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor
from pronk.errors import BadRequest
from pronk.formats import FORMATS


def assign(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> dict[str, str]:
    """For each tensor a format, or the block type it has, which is to be copied: quantizing again would round again.

    `wanted`: formats that GGUF has, as prefixes.py has them; what is left out stays as it is. gate_proj and up_proj of
    a layer, which pronk computes as one matrix, get the wider of their two. Vectors are f32, and rows that do not fill
    blocks of 32 are f16. Raises BadRequest.
    """
    known = formats.names(file="gguf")
    for format in wanted.values():
        if format not in known:
            raise BadRequest(f"a GGUF file is not written in {format!r}; choose from {', '.join(known)}")
    prefixes.check(checkpoint, wanted)
    found = {name: _format(tensor, wanted) for name, tensor in checkpoint.tensors.items()}
    for layer in range(checkpoint.config.num_hidden_layers):
        pair = [f"model.layers.{layer}.mlp.{kind}.weight" for kind in ("gate_proj", "up_proj")]
        a, b = (found[name] for name in pair)
        if a in FORMATS and b in FORMATS:
            found.update(dict.fromkeys(pair, formats.wider(FORMATS[a], FORMATS[b]).name))
    return found


def has(dtype: str) -> bool:
    """Whether GGUF holds numbers stored so as they are."""
    return dtype in PLAIN_DTYPES or dtype in BLOCK_TYPES


def stored(format: str) -> str:
    """The GGUF type of a format that `assign` gave."""
    return FORMATS[format].stored[0] if format in FORMATS else format


def file_type(checkpoint: Checkpoint, assigned: Mapping[str, str]) -> int:
    """general.file_type, which has one number for all: that of the most weights."""
    counts = Counter[str]()
    for name, tensor in checkpoint.tensors.items():
        counts[stored(assigned[name])] += int(np.prod(tensor.shape))
    return FILE_TYPES[counts.most_common(1)[0][0]]


def _format(tensor: LazyTensor, wanted: Mapping[str, str]) -> str:
    if len(tensor.shape) == 1:
        return "f32"
    prefix = prefixes.longest(tensor.name, wanted)
    if prefix is None and has(tensor.dtype):
        return formats.kept(tensor.dtype).name if tensor.dtype in PLAIN_DTYPES else tensor.dtype
    # Without a format: int8 rows, which GGUF has not.
    format = formats.FALLBACK if prefix is None else FORMATS[wanted[prefix]]
    if format.holds(tensor.dtype, nearly=True) and tensor.dtype not in PLAIN_DTYPES:
        return tensor.dtype
    if format.outer and prefixes.is_outer(tensor.name, prefix):
        return _format(tensor, {"": format.outer})
    group = (format.codes and format.codes.group) or 1
    return "f16" if tensor.shape[1] % group else format.name
