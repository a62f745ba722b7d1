"""Matrices as codes of 8 or 4 bits in torch: those of formats.quantize, or those that the file has, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.rows import rows
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.errors import BadFile, BadRequest
from pronk.formats import FORMATS, Format, packed
from pronk.formats.quantize import quantize
from pronk.formats.turn import turn as turn_rows
from pronk.torch_engine.quantized import turn

_PIECE = 1 << 20  # weights that are floats at once
_CACHED = 1 << 16  # those that are made so in one go: they stay in the second-level cache
_TYPES = {8: torch.int8, 4: torch.uint8}  # of codes, by their bits

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
    turned: bool = False  # whether they are of turned rows: see formats.turn

    def floats(self, part: slice) -> Tensor:
        """[R, K] float32, to the bit what pronk.formats.quantize and gguf_blocks make of the same codes.

        On a CPU by numpy, on one thread and where the caches are: torch would have all its threads meet after each of
        seven operations on a few megabytes, which takes longer than they do.
        """
        if self.q.is_cpu and type(self.q) is Tensor:  # one without bytes (memory.py) is no array
            return self._filled(part)
        q = self.q[part]
        if q.dtype == torch.uint8:
            q = torch.cat((q & 15, q >> 4), dim=-1)
        values = q.float()
        if self.origin:
            values -= self.origin
        values *= self.scale[part].float().unsqueeze(-1)
        if self.minimum is not None:
            values += self.minimum[part].float().unsqueeze(-1)
        found = values.flatten(1)[:, : self.columns]
        # One without bytes stands for numpy's, which turns in place.
        return turn(found) if self.turned and type(self.q) is Tensor else found

    def _filled(self, part: slice) -> Tensor:
        q, scale = self.q[part].numpy(), _wide(self.scale[part])
        minimum = None if self.minimum is None else _wide(self.minimum[part])
        packed = q.dtype == np.uint8
        height, groups, width = q.shape[0], q.shape[1], q.shape[2] * (2 if packed else 1)
        found = _empty(height * groups * width).view(height, groups * width)
        values: NDArray[np.float32] = found.numpy().reshape(height, groups, width)
        step = max(1, _CACHED // max(1, groups * width))
        for at in (slice(first, first + step) for first in range(0, height, step)):
            some, of = values[at], q[at]
            if packed:
                np.bitwise_and(of, 15, out=some[..., : width // 2], casting="unsafe")
                np.right_shift(of, 4, out=some[..., width // 2 :], casting="unsafe")
            else:
                np.copyto(some, of)
            if self.origin:
                some -= np.float32(self.origin)
            some *= scale[at]
            if minimum is not None:
                some += minimum[at]
            if self.turned:
                some[:] = turn_rows(some)
        return found[:, : self.columns]

    def pieces(self) -> Iterator[slice]:
        """Rows that are made floats at once."""
        step = max(1, _PIECE // self.columns)
        return (slice(first, first + step) for first in range(0, len(self.q), step))

    def largest(self) -> float:
        """No number is larger, whatever its code."""
        least, most = (-127, 127) if self.q.dtype == torch.int8 else (-self.origin, 15 - self.origin)
        minimum = 0.0 if self.minimum is None else self.minimum.float()
        ends = (self.scale.float() * end + minimum for end in (least, most))
        return max(float(end.abs().max()) for end in ends)

    def to(self, device: torch.device) -> Codes:
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, q=self.q.to(device), scale=self.scale.to(device), minimum=minimum)


def _empty(n: int) -> Tensor:
    """[n] float32, at a multiple of 64 bytes. torch asks the system to align it, for which that takes more than what it
    gives: where a piece was forgotten the next one of its size does not always fit, and the heap is full of holes."""
    room = np.empty(n + 16, np.float32)
    first = -room.ctypes.data % 64 // 4
    return torch.from_numpy(room[first : first + n])


def _wide(numbers: Tensor) -> NDArray[np.float32]:
    """[N, G] to float32 [N, G, 1]"""
    return numbers.numpy().astype(np.float32)[..., None]


def empty(tensor: LazyTensor, format: str) -> Codes:
    """Without numbers, for whoever counts bytes."""
    (height, columns), made = tensor.shape, packed(format, tensor.dtype)
    assert made.codes
    width, kind = (made.codes.group, torch.float16) if made.codes.group else (columns, torch.float32)
    groups = -(-columns // width)
    q, scale = (groups, width * made.bits // 8), torch.empty(height, groups, dtype=kind)
    minimum = torch.empty_like(scale) if made.codes.minimum else None
    q_empty = torch.empty(height, *q, dtype=_TYPES[made.bits])
    return Codes(columns, q_empty, scale, minimum, turned=made.turned)


def read(checkpoint: Checkpoint, tensor: LazyTensor, format: str) -> Codes:
    """Codes of the file where they are of this format, else made of its numbers. Raises BadFile."""
    own = packed(format, tensor.dtype)
    if tensor.read_blocks and own.holds(tensor.dtype):
        codes = _codes(tensor.read_blocks(), tensor.shape[1], own)
    else:
        own = FORMATS[format]
        try:
            encoded = np.concatenate([_encoded(part.array, own) for part in rows(tensor, _PIECE)])
            codes = _codes(encoded, tensor.shape[1], own)
        except BadRequest as error:
            raise BadFile(checkpoint.path, str(error), field=f"tensor {tensor.name!r}") from None
    if not all(part is None or part.isfinite().all() for part in (codes.scale, codes.minimum)):
        raise BadFile(checkpoint.path, "holds infinity or NaN; no trained model does", field=f"tensor {tensor.name!r}")
    return codes


def _encoded(numbers: NDArray[Any], format: Format) -> Bytes:
    """Rows as a file of this format has them, by pronk.formats.quantize."""
    if format.codes and format.codes.group:
        return gguf_blocks.encode(numbers, format.name)
    made = quantize(numbers, format.name)
    return int8_rows.join(made.scale.astype(np.float32, copy=False), made.q.view(np.int8))


def _codes(blocks: Bytes, columns: int, format: Format) -> Codes:
    """Of rows as a file has them: scales (and minima) before the codes that they are of."""
    assert format.codes
    if format.codes.group is None:
        row_scale, row_codes = int8_rows.split(blocks)
        return Codes(
            columns,
            _tensor(row_codes[:, None], torch.int8),
            _tensor(row_scale[:, None], torch.float32),
            turned=format.turned,
        )
    blocks = blocks.reshape(len(blocks), -(-columns // format.codes.group), -1)  # [N, G, bytes]
    scale, minimum = _halves(blocks[..., :2]), _halves(blocks[..., 2:4]) if format.codes.minimum else None
    q = blocks[..., 2 if minimum is None else 4 :]
    return Codes(columns, _tensor(q, torch.uint8).view(_TYPES[format.bits]), scale, minimum, format.codes.origin)


def _halves(pairs: Bytes) -> Tensor:
    """Little-endian float16: bytes [N, G, 2] to [N, G]."""
    return _tensor(np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float16), torch.float16)


def _tensor(array: NDArray[Any], kind: torch.dtype) -> Tensor:
    """Never a view of a memory map."""
    return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(kind)
