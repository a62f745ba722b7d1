"""Products of one row, or up to 16, with weights in int8: reading the weights once is all there is to it.

Activations come as floats, codes as whole numbers, outliers as they are: they cost nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.chain import chained, let_next_begin, wait_for_last
from pronk.torch_engine.gpu.norms import gated as gated_of


class RowTile(NamedTuple):
    outputs: int  # rows of weights of a program
    columns: int  # of each at a time
    warps: int


class FewTile(NamedTuple):
    outputs: int
    columns: int
    parts: int  # of the columns, each multiplied by warps of its own
    warps: int
    stages: int


ROW_TILE, NARROW_ROW_TILE = RowTile(8, 2048, 4), RowTile(4, 2048, 4)  # of weights with many rows, and few
NARROW_TILE, WIDE_TILE = FewTile(16, 256, 4, 4, 4), FewTile(32, 256, 4, 4, 3)  # of weights with few rows, and many
_PROGRAMS = 264  # two for each multiprocessor: with wider tiles there are to be as many, and of one row twice as many


def row_product(
    x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, gated: bool,
    tile: RowTile | None = None,
) -> None:  # fmt: skip
    """x [1, K] float32, q [N, K], y [1, N] or, gated, [1, N / 2]."""
    outputs, k = y.shape[1], q.shape[1]
    tile = tile or (ROW_TILE if len(q) >= 2 * ROW_TILE.outputs * _PROGRAMS else NARROW_ROW_TILE)
    width = max(1, tile.outputs // 2) if gated else tile.outputs
    columns = min(tile.columns, max(16, triton.next_power_of_2(k)))
    _row[(triton.cdiv(outputs, width),)](
        x, q, scale, bias, residual, y, outputs, k,
        OUTPUTS=width, COLUMNS=columns, EVEN=k % columns == 0, GATED=gated, num_warps=tile.warps,
        **chained(x),
    )  # fmt: skip


def few_product(
    x: Tensor, x_scale: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor,
    gated: bool, tile: FewTile | None = None,
) -> None:  # fmt: skip
    """x [T or 2 T, K]: codes, then outliers where there are any; x_scale [T]; y [T, N] or, gated, [T, N / 2]."""
    rows, outputs, k = len(x_scale), y.shape[1], q.shape[1]
    tile = tile or (WIDE_TILE if len(q) >= WIDE_TILE.outputs * _PROGRAMS else NARROW_TILE)
    width = max(8, tile.outputs // 2) if gated else tile.outputs
    both = len(x) > rows
    padded = triton.next_power_of_2(rows)
    _few[(triton.cdiv(outputs, width),)](
        x, x_scale, q, scale, bias, residual, y, rows, outputs, k,
        ROWS=max(8, padded) if both else max(16, padded), OUTPUTS=width, COLUMNS=tile.columns, PARTS=tile.parts,
        EVEN=k % tile.columns == 0, BOTH=both, GATED=gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **chained(x),
    )  # fmt: skip


# int8 becomes bfloat16, exactly, by quicker instructions than float32. The interpreter does not know how to.
_FIRST = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)


@triton.jit
def as_floats(q, dtype: tl.constexpr):
    return q.to(_FIRST).to(dtype)


@triton.jit
def _loaded(q, start, k, columns, inside, EVEN: tl.constexpr):
    at = start[:, None] + k[None, :]
    if EVEN:
        w = tl.load(q + at, eviction_policy="evict_first")
    else:
        w = tl.load(q + at, mask=inside[:, None] & (k < columns)[None, :], other=0, eviction_policy="evict_first")
    return as_floats(w, tl.float32)


@triton.jit
def _by_sixteen(products, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of what one thread loads at once: they need no other thread."""
    return tl.sum(tl.reshape(products, (OUTPUTS, COLUMNS // 16, 16)), 2)


@triton.jit
def _finished(found, scale, bias, n, there):
    found *= tl.load(scale + n, mask=there, other=0)
    if bias is not None:
        found += tl.load(bias + n, mask=there, other=0).to(tl.float32)
    return found


@triton.jit
def _row(
    x, q, scale, bias, residual, y, outputs, columns,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = n < outputs
    start = tl.where(there, n, 0).to(tl.int64) * columns
    other = tl.where(there, n + outputs, 0).to(tl.int64) * columns
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    found = tl.zeros((OUTPUTS, COLUMNS // 16), tl.float32)
    ups = tl.zeros((OUTPUTS, COLUMNS // 16), tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        w = _loaded(q, start, k, columns, there, EVEN)
        if GATED:
            u = _loaded(q, other, k, columns, there, EVEN)
        h = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < columns, other=0)
        found += _by_sixteen(w * h[None, :], OUTPUTS, COLUMNS)
        if GATED:
            ups += _by_sixteen(u * h[None, :], OUTPUTS, COLUMNS)
    result = _finished(tl.sum(found, 1), scale, bias, n, there)
    if GATED:
        result = gated_of(result, _finished(tl.sum(ups, 1), scale, bias, n + outputs, there), y.dtype.element_ty)
    if residual is not None:
        result = result.to(y.dtype.element_ty).to(tl.float32) + tl.load(residual + n, mask=there, other=0).to(
            tl.float32
        )
    tl.store(y + n, result.to(y.dtype.element_ty), mask=there)


@triton.jit
def _of_both(sums, x_scale, rows, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BOTH: tl.constexpr):
    t = tl.arange(0, ROWS)
    by = tl.load(x_scale + t, mask=t < rows, other=0)[:, None]
    if BOTH:
        codes, apart = tl.split(tl.permute(tl.reshape(sums, (2, ROWS, OUTPUTS)), (1, 2, 0)))
        found = codes * by + apart
    else:
        found = sums * by
    return found


@triton.jit
def _few(
    x, x_scale, q, scale, bias, residual, y, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, BOTH: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Codes are exact in 16 bits, and so are outliers, which are as they came."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = n < outputs
    start = tl.where(there, n, 0).to(tl.int64) * columns
    other = tl.where(there, n + outputs, 0).to(tl.int64) * columns
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    ALL: tl.constexpr = ROWS * (2 if BOTH else 1)
    part = tl.arange(0, PARTS)[:, None, None]
    within = tl.arange(0, COLUMNS // PARTS)[None, None, :]
    line = tl.arange(0, ALL)
    t = line % ROWS
    of_x = (t + (line // ROWS) * rows).to(tl.int64) * columns
    found = tl.zeros((PARTS, ALL, OUTPUTS), tl.float32)
    ups = tl.zeros((PARTS, ALL, OUTPUTS), tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + part * (COLUMNS // PARTS) + within  # [PARTS, 1, columns of a part]
        inside = k < columns
        h = tl.load(x + of_x[None, :, None] + k, mask=(t < rows)[None, :, None] & inside, other=0)
        at = start[None, :, None] + k
        if EVEN:
            w = tl.load(q + at, eviction_policy="evict_first")
        else:
            w = tl.load(q + at, mask=inside, other=0, eviction_policy="evict_first")
        found = tl.dot(h, tl.permute(as_floats(w, h.dtype), (0, 2, 1)), found, input_precision=PRECISION)
        if GATED:
            at = other[None, :, None] + k
            if EVEN:
                u = tl.load(q + at, eviction_policy="evict_first")
            else:
                u = tl.load(q + at, mask=inside, other=0, eviction_policy="evict_first")
            ups = tl.dot(h, tl.permute(as_floats(u, h.dtype), (0, 2, 1)), ups, input_precision=PRECISION)
    result = _of_both(tl.sum(found, 0), x_scale, rows, ROWS, OUTPUTS, BOTH)
    result = _finished(result, scale, bias, n[None, :], there[None, :])
    if GATED:
        more = _of_both(tl.sum(ups, 0), x_scale, rows, ROWS, OUTPUTS, BOTH)
        more = _finished(more, scale, bias, (n + outputs)[None, :], there[None, :])
        result = gated_of(result, more, y.dtype.element_ty)
    row = tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * outputs + n[None, :]
    inside = (row < rows)[:, None] & there[None, :]
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        result = result.to(y.dtype.element_ty).to(tl.float32) + added
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)
