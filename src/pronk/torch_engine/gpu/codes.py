"""CodesProduct: a Product whose weights are codes of 8 or 4 bits, and stay so: one row reads each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pronk.torch_engine.codes import Codes
from pronk.torch_engine.gpu import codes_kernels as kernels
from pronk.torch_engine.gpu.chain import chained
from pronk.torch_engine.gpu.norms import rms_norm, swiglu
from pronk.torch_engine.gpu.product import Norm, Product

FEW = 64  # rows of x up to which codes are made numbers on the way; of more all are first, and cuBLAS multiplies

_PROGRAMS = 2 * 132  # that keep a card busy
_ROW_ROWS, _ROW_BLOCK = 8, 128  # of one row of x: rows of a program, and 16-byte chunks of each that are loaded at once
_FEW_ROWS, _FEW_BLOCK, _FEW_WARPS, _FEW_STAGES = 64, 8, 4, 3
_MERGE_BLOCK = 1024
_PIECE = 1 << 24  # weights that are floats at once: they stay in the second-level cache until they are multiplied
_ALIGNED = 64  # rows: where a piece's results begin in between, cuBLAS takes a product that is three times as slow
_FLOATS_ROWS, _FLOATS_BLOCK = 4, 32


class CodesProduct(Product):
    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        """bias [N]. The codes are laid out anew (see codes_kernels), and not kept as they were."""
        assert can_multiply(codes)
        self.rows, self.columns, self.origin = len(codes.q), codes.columns, codes.origin
        self.bits = _bits(codes)
        self.words, self.scale = _words(codes.q), _strips(codes.scale)
        self.minimum = None if codes.minimum is None else _strips(codes.minimum)
        self.bias = bias

    @property
    def tensors(self) -> list[Tensor]:
        return [part for part in (self.words, self.scale, self.minimum) if part is not None]

    def codes(self, part: slice = slice(None)) -> Codes:
        """Rows of them as they were."""
        scale = _rows(self.scale)[: self.rows][part]
        minimum = None if self.minimum is None else _rows(self.minimum)[: self.rows][part]
        return Codes(self.columns, _q(self.words[part], self.bits), scale, minimum, self.origin)

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        if len(x) == 1:
            return self._of_a_row(x, norm, residual, gated)
        h = rms_norm(x, *norm) if norm else x
        if len(x) <= FEW:
            return self._of_few(h, residual, gated)
        y = self.of_many(h)
        if self.bias is not None:
            y += self.bias
        if gated:
            return swiglu(y)
        return y if residual is None else y.add_(residual)

    def _of_a_row(self, x: Tensor, norm: Norm | None, residual: Tensor | None, gated: bool) -> Tensor:
        rows = _ROW_ROWS
        while rows > 2 and self.rows // rows < _PROGRAMS:
            rows //= 2
        block = min(_ROW_BLOCK, triton.next_power_of_2(self.words.shape[1]))
        y = x.new_empty(1, self.rows // 2 if gated else self.rows)
        weight, eps = norm or (None, 0.0)
        kernels.one_row[(triton.cdiv(self.rows, rows),)](
            x, self.words, self.scale, self.minimum, self.bias, weight, residual, y, eps, self.rows, self.columns,
            *kernels.MASKS[self.bits], self.words.shape[1], self.bits, self.origin, gated, rows, block,
            num_warps=max(1, block // 32), **chained(x),
        )  # fmt: skip
        return y

    def _of_few(self, x: Tensor, residual: Tensor | None, gated: bool) -> Tensor:
        tokens, chunks = len(x), self.words.shape[1]
        width, block = min(FEW, max(16, triton.next_power_of_2(tokens))), min(_FEW_BLOCK, _power(chunks, 4))
        blocks = triton.cdiv(self.rows, _FEW_ROWS), triton.cdiv(tokens, width)
        split = 1
        while blocks[0] * blocks[1] * split < _PROGRAMS and 2 * split * block <= chunks:
            split *= 2
        y = x.new_empty(tokens, self.rows // 2 if gated else self.rows)
        parts = y if split == 1 else x.new_empty(split, tokens, self.rows, dtype=torch.float32)
        grid = (*blocks, split)
        kernels.few_rows[grid](
            x, self.words, self.scale, self.minimum, self.bias, residual, parts, tokens, self.rows, self.columns,
            *kernels.MASKS[self.bits], chunks, self.bits, self.origin, gated, split, width, _FEW_ROWS, block,
            num_warps=_FEW_WARPS, num_stages=_FEW_STAGES, **chained(x),
        )  # fmt: skip
        if split > 1:
            kernels.merged[(tokens, triton.cdiv(y.shape[1], _MERGE_BLOCK))](
                parts, self.bias, residual, y, tokens, self.rows, split, gated, _MERGE_BLOCK, **chained(x)
            )
        return y

    def of_many(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """Products with a part of the rows and no bias, for any number of rows of x."""
        begin, end, _ = part.indices(self.rows)
        y = x.new_empty(len(x), end - begin)
        step = max(1, _PIECE // self.columns)
        step -= step % _ALIGNED if step > _ALIGNED else 0
        for first in range(begin, end, step):
            last = min(end, first + step)
            torch.mm(x, self.floats(slice(first, last), x.dtype).t(), out=y[:, first - begin : last - begin])
        return y

    def floats(self, part: slice, dtype: torch.dtype) -> Tensor:
        """A piece of rows as the numbers that their codes stand for, in memory that the next piece is given, too."""
        first, last, _ = part.indices(self.rows)
        chunks = self.words.shape[1]
        out = prepare(self.words.device, dtype)[: (last - first) * self.columns].view(-1, self.columns)
        grid = triton.cdiv(last - first, _FLOATS_ROWS), triton.cdiv(chunks, _FLOATS_BLOCK)
        with torch.cuda.device(self.words.device) if self.words.is_cuda else nullcontext():
            kernels.floats[grid](
                self.words, self.scale, self.minimum, out, first, last, self.columns, chunks, self.bits, self.origin,
                _FLOATS_ROWS, _FLOATS_BLOCK,
            )  # fmt: skip
        return out


def can_multiply(codes: Codes) -> bool:
    return not codes.turned and codes.q.shape[2] * 8 == 32 * _bits(codes)


def joined(matrices: Sequence[Codes]) -> Codes:
    """Rows of all of them, one after the other: of the same columns and bits, or ValueError."""
    first = matrices[0]
    if len({(m.columns, m.q.shape[1:], m.q.dtype, m.turned) for m in matrices}) > 1:
        raise ValueError("these are codes of several kinds")
    if len({(m.origin, m.minimum is None) for m in matrices}) > 1:
        matrices = [_with_minimum(m) for m in matrices]
    if len(matrices) == 1:
        return first
    minima = [m.minimum for m in matrices if m.minimum is not None]
    return Codes(
        first.columns,
        torch.cat([m.q for m in matrices]),
        torch.cat([m.scale for m in matrices]),
        torch.cat(minima) if minima else None,
        matrices[0].origin,
    )


def _with_minimum(codes: Codes) -> Codes:
    """The same numbers to the bit: a scale in float16 times a power of two is one, too."""
    if codes.minimum is not None:
        return codes
    minimum = codes.scale * -codes.origin
    if not minimum.isfinite().all():
        raise ValueError("scales are too large for minima in float16")
    return replace(codes, minimum=minimum, origin=0)


@cache
def prepare(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Room for a piece, one for all products of a device: to be made before a CUDA graph is captured that has some of
    more than FEW rows."""
    return torch.empty(_PIECE, dtype=dtype, device=device)


def _bits(codes: Codes) -> int:
    return 8 if codes.q.dtype == torch.int8 else 4


def _power(most: int, least: int) -> int:
    return max(least, triton.next_power_of_2(most))


def _words(q: Tensor) -> Tensor:
    """int8 [N, G, 32] or uint8 [N, G, 16] to int32 [N, chunks, 4]."""
    of_words = q.new_empty(len(q), q.shape[1] * q.shape[2] // 16, 4, 4, dtype=torch.uint8)
    for rows in _pieces(q):
        if q.dtype == torch.int8:
            of_words[rows] = q[rows].view(torch.uint8).view(-1, *of_words.shape[1:]).transpose(2, 3)
        else:
            low, high = q[rows] & 15, q[rows] >> 4  # columns 0 to 15 of a group, and 16 to 31
            places = torch.cat((low, high), 2).view(-1, q.shape[1], 8, 4).transpose(2, 3)  # [R, G, words, places]
            of_words[rows] = places[..., 0::2] | places[..., 1::2] << 4
    return of_words.view(torch.int32).squeeze(-1)


def _q(words: Tensor, bits: int) -> Tensor:
    """The other way round."""
    of_words = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return of_words.transpose(2, 3).reshape(len(words), -1, 32).view(torch.int8)
    places = torch.stack((of_words & 15, of_words >> 4), -1).flatten(3)  # [R, G, words, places]
    low, high = places.transpose(2, 3).reshape(len(words), -1, 32).chunk(2, 2)
    return low | high << 4


def _pieces(q: Tensor) -> list[slice]:
    step = max(1, _PIECE // q[0].numel())
    return [slice(first, first + step) for first in range(0, len(q), step)]


def _strips(scale: Tensor) -> Tensor:
    """[N, G] to [N / 8, G, 8], filled up with zeros."""
    strip = int(kernels.STRIP)
    rows = F.pad(scale, (0, 0, 0, -len(scale) % strip))
    return rows.view(-1, strip, scale.shape[1]).transpose(1, 2).contiguous()


def _rows(strips: Tensor) -> Tensor:
    return strips.transpose(1, 2).reshape(-1, strips.shape[1])
