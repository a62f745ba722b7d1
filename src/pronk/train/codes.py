"""Matrices as codes of 8 or 4 bits in torch: those of formats.quantize, or those that the file has, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.errors import BadFile, BadRequest
from pronk.formats.quantize import GROUP, Format, quantize
from pronk.torch_engine.backend import to_torch

Wish = Literal["auto", "f32", "int8", "llm-int8", "q8", "q4"]
_FORMATS: dict[str, Format] = {"int8": "int8", "llm-int8": "int8", "q8": "q8", "q4": "q4"}
# Stored types whose numbers a format holds exactly, as the same codes.
_HELD = {"INT8": "int8", "LLM_INT8": "llm-int8", "Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4"}
_PIECE = 1 << 20  # weights that are floats at once
_CPU = torch.device("cpu")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K] in groups along its rows: scale * (q - origin), and in q4 + minimum.

    G groups of 32, the last filled up where K is no multiple of that; in int8 one group a row.
    """

    columns: int  # K
    q: Tensor  # int8 [N, G, 32]; int8: [N, 1, K]; q4: uint8 [N, G, 16], the first half of a group in the low bits
    scale: Tensor  # [N, G], float16; int8: float32
    minimum: Tensor | None = None  # [N, G] float16
    origin: int = 0

    def floats(self, rows: slice) -> Tensor:
        """[rows, K] float32, to the bit what pronk.formats.quantize and gguf_blocks make of the same codes."""
        q = self.q[rows]
        if q.dtype == torch.uint8:
            q = torch.cat((q & 15, q >> 4), dim=-1)
        values = q.float()
        if self.origin:
            values -= self.origin
        values *= self.scale[rows].float().unsqueeze(-1)
        if self.minimum is not None:
            values += self.minimum[rows].float().unsqueeze(-1)
        return values.flatten(1)[:, : self.columns]

    def pieces(self) -> Iterator[slice]:
        """Rows that are made floats at once."""
        step = max(1, _PIECE // self.columns)
        return (slice(first, first + step) for first in range(0, len(self.q), step))

    def to(self, device: torch.device) -> Codes:
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, q=self.q.to(device), scale=self.scale.to(device), minimum=minimum)


def check(wish: str | None) -> None:
    if wish is not None and wish not in get_args(Wish):
        raise BadRequest(f"in training, quantize must be one of {', '.join(get_args(Wish))}, not {wish!r}")


def format_of(tensor: LazyTensor, wish: str | None) -> str | None:
    """What a weight is kept in while it is frozen: "int8", "llm-int8", "q8", "q4", or None for float32.

    `wish` "auto": codes of the file stay what they are where a format here holds them. Only matrices of blocks are kept
    in codes, and none where nothing is wished.
    """
    if wish in (None, "f32") or not tensor.name.startswith("model.layers.") or len(tensor.shape) != 2:
        return None
    return _HELD.get(tensor.dtype) if wish == "auto" else wish


def nbytes(checkpoint: Checkpoint, wish: str | None) -> int:
    """What all weights take in memory."""
    return sum(_nbytes(tensor, format_of(tensor, wish)) for tensor in checkpoint.tensors.values())


def empty(tensor: LazyTensor, format: str) -> Codes:
    """Without numbers, for whoever counts bytes."""
    (rows, columns), kind = tensor.shape, _FORMATS[format]
    if kind == "int8":
        return Codes(columns, torch.empty(rows, 1, columns, dtype=torch.int8), torch.empty(rows, 1))
    groups = -(-columns // GROUP)
    scale = torch.empty(rows, groups, dtype=torch.float16)
    if kind == "q8":
        return Codes(columns, torch.empty(rows, groups, GROUP, dtype=torch.int8), scale)
    q = torch.empty(rows, groups, GROUP // 2, dtype=torch.uint8)
    return Codes(columns, q, scale, None if tensor.dtype == "Q4_0" else torch.empty_like(scale))


def _nbytes(tensor: LazyTensor, format: str | None) -> int:
    if format is None:
        return 4 * int(np.prod(tensor.shape))
    rows, columns = tensor.shape
    if _FORMATS[format] == "int8":
        return rows * (columns + 4)
    return rows * -(-columns // GROUP) * {"q8": 34, "q4": 18 if tensor.dtype == "Q4_0" else 20}[format]


def read(checkpoint: Checkpoint, tensor: LazyTensor, format: str) -> Codes:
    """Codes of the file where they are of this format, else made of its numbers. Raises BadFile."""
    held = _HELD.get(tensor.dtype)
    if held and _FORMATS[held] == _FORMATS[format] and tensor.read_blocks:
        codes = _stored(tensor)
    else:
        codes = _made(checkpoint, tensor, _FORMATS[format])
    if not all(part is None or part.isfinite().all() for part in (codes.scale, codes.minimum)):
        raise BadFile(checkpoint.path, "holds infinity or NaN; no trained model does", field=f"tensor {tensor.name!r}")
    return codes


def _stored(tensor: LazyTensor) -> Codes:
    assert tensor.read_blocks
    blocks, columns = tensor.read_blocks(), tensor.shape[1]
    if tensor.dtype in int8_rows.DTYPES:
        row_scale, q = int8_rows.split(blocks)
        return Codes(columns, _tensor(q[:, None], torch.int8), _tensor(row_scale[:, None], torch.float32))
    blocks = blocks.reshape(len(blocks), -1, gguf_blocks.BLOCK_TYPES[tensor.dtype].nbytes)  # [N, G, bytes]
    scale = _halves(blocks[..., :2])
    if tensor.dtype == "Q8_0":
        return Codes(columns, _tensor(blocks[..., 2:].view(np.int8), torch.int8), scale)
    if tensor.dtype == "Q4_0":
        return Codes(columns, _tensor(blocks[..., 2:], torch.uint8), scale, origin=8)
    return Codes(columns, _tensor(blocks[..., 4:], torch.uint8), scale, _halves(blocks[..., 2:4]))


def _halves(pairs: Bytes) -> Tensor:
    """Little-endian float16: bytes [N, G, 2] to [N, G]."""
    return _tensor(np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float16), torch.float16)


def _made(checkpoint: Checkpoint, tensor: LazyTensor, format: Format) -> Codes:
    """By pronk.formats.quantize, a few rows at a time."""
    parts = []
    try:
        for rows in _rows(tensor):
            one = quantize(rows, format)
            minimum = None if one.minimum is None else _tensor(one.minimum, torch.float16)
            kind = torch.float32 if format == "int8" else torch.float16
            scale = _tensor(one.scale.reshape(len(rows), -1), kind)
            parts.append(Codes(tensor.shape[1], _grouped(one.q, format), scale, minimum))
    except BadRequest as error:
        raise BadFile(checkpoint.path, str(error), field=f"tensor {tensor.name!r}") from None
    q, scale = torch.cat([part.q for part in parts]), torch.cat([part.scale for part in parts])
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Codes(tensor.shape[1], q, scale, torch.cat(minima) if minima else None)


def _grouped(q: NDArray[Any], format: Format) -> Tensor:
    """[N, K] to [N, G, 32], in q4 two to a byte."""
    if format == "int8":
        return _tensor(q[:, None], torch.int8)
    groups = np.pad(q, ((0, 0), (0, -q.shape[1] % GROUP))).reshape(len(q), -1, GROUP)
    if format == "q8":
        return _tensor(groups, torch.int8)
    half = GROUP // 2
    return _tensor(groups[..., :half] | groups[..., half:] << 4, torch.uint8)


def _rows(tensor: LazyTensor) -> Iterator[NDArray[Any]]:
    """A few rows at a time, as the numbers they stand for: codes are not all made floats at once."""
    step = max(1, _PIECE // tensor.shape[1])
    in_blocks = tensor.read_blocks is not None and tensor.dtype in (*gguf_blocks.BLOCK_TYPES, *int8_rows.DTYPES)
    array = tensor.read_blocks() if tensor.read_blocks and in_blocks else tensor.read()
    for first in range(0, len(array), step):
        rows = array[first : first + step]
        if not in_blocks:
            yield rows
        elif tensor.dtype in int8_rows.DTYPES:
            yield int8_rows.multiply(*int8_rows.split(rows))
        else:
            yield gguf_blocks.decode(tensor.dtype, rows)


def _tensor(array: NDArray[Any], kind: torch.dtype) -> Tensor:
    return to_torch(array, _CPU, kind)
