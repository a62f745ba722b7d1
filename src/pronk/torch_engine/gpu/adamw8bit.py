"""A step of AdamW8bit (train/optimizers.py) in one pass: moments are read as codes, and written as codes again."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.launch import launch

_ROWS = 8  # blocks of codes of a program


def update(
    values: Tensor,
    grad: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor,
    second_scale: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    rate: float,
    correction: float,
    keep: float,
) -> None:
    """values, grad [N]; codes [blocks, 256], scales [blocks, 1]. `rate`: with the first moment's correction;
    `correction`: of the second's root; `keep`: what decay leaves of a value."""
    blocks, width = first.shape
    launch(
        _update, (triton.cdiv(blocks, _ROWS),), values, grad, first, first_scale, second, second_scale,
        values.numel(), blocks, 1 - betas[0], betas[1], 1 - betas[1], eps, rate, correction, keep,
        ROWS=_ROWS, WIDTH=width,
    )  # fmt: skip


@triton.jit
def _rounded(x):
    return (x + 12582912.0) - 12582912.0  # to the nearest whole number, of two as near the even one: 1.5 * 2^23


@triton.jit
def _update(
    values_at, grad_at, first_at, first_scale_at, second_at, second_scale_at, size, blocks,
    share1, beta2, share2, eps, rate, correction, keep, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    there, inside = block < blocks, at < size
    known = (block < blocks)[:, None] & (at >= 0)
    g = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)

    root = tl.load(first_at + at, mask=known, other=0).to(tl.float32)
    root = root * tl.load(first_scale_at + block, mask=there, other=0.0)[:, None]
    square = root * root
    first = tl.where(root < 0, -square * square, square * square)
    first += share1 * (g - first)

    root = tl.load(second_at + at, mask=known, other=0).to(tl.float32)
    root = root * tl.load(second_scale_at + block, mask=there, other=0.0)[:, None]
    square = root * root
    square = square * square
    second = beta2 * square * square + share2 * g * g

    root = tl.sqrt(tl.sqrt(tl.abs(first)))
    scale = tl.max(root, axis=1) / 127
    code = _rounded(root / tl.maximum(scale, 1.1754943508222875e-38)[:, None])
    tl.store(first_at + at, tl.where(first < 0, -code, code).to(tl.int8), mask=known)
    tl.store(first_scale_at + block, scale, mask=there)

    root = tl.sqrt(tl.sqrt(tl.sqrt(second)))
    scale = tl.max(root, axis=1) / 255
    code = _rounded(root / tl.maximum(scale, 1.1754943508222875e-38)[:, None])
    tl.store(second_at + at, code.to(tl.uint8), mask=known)
    tl.store(second_scale_at + block, scale, mask=there)

    value = tl.load(values_at + at, mask=inside, other=0.0).to(tl.float32)
    value = value * keep - rate * first / (tl.sqrt(second) / correction + eps)
    tl.store(values_at + at, value.to(values_at.dtype.element_ty), mask=inside)
