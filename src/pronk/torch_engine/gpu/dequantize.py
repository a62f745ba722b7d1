"""Codes of 8 or 4 bits as the numbers they stand for, in one pass: what torch_engine/codes.py has, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.launch import launch

_BLOCK = 2048  # weights of a program


def dequantize(
    q: Tensor, scale: Tensor, minimum: Tensor | None, origin: int, columns: int, kind: torch.dtype
) -> Tensor:
    """[N, K] of codes in groups: int8 [N, G, width], or uint8 [N, G, width / 2] with a group's first half in low bits.

    scale, minimum: [N, G].
    """
    packed = q.dtype == torch.uint8
    width = q.shape[2] * (2 if packed else 1)
    out = scale.new_empty(len(q), columns, dtype=kind)
    grid = (len(q), triton.cdiv(columns, _BLOCK))
    launch(
        _dequantize, grid, q, scale, scale if minimum is None else minimum, out, q.shape[1], origin, columns,
        WIDTH=width, PACKED=packed, MINIMUM=minimum is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize(
    q_at, scale_at, minimum_at, out_at, groups, origin, columns,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, MINIMUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    group, place = column // WIDTH, column % WIDTH
    if PACKED:
        half: tl.constexpr = WIDTH // 2
        code = tl.load(q_at + (row * groups + group) * half + place % half, mask=inside, other=0).to(tl.int32)
        code = tl.where(place < half, code & 15, code >> 4)
    else:
        code = tl.load(q_at + (row * groups + group) * WIDTH + place, mask=inside, other=0).to(tl.int32)
    value = (code - origin).to(tl.float32) * tl.load(
        scale_at + row * groups + group, mask=inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    if MINIMUM:
        value += tl.load(minimum_at + row * groups + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + row * columns + column, value.to(out_at.dtype.element_ty), mask=inside)
