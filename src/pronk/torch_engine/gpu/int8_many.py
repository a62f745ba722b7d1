"""Products of many rows with weights in int8: the codes by the int8 units, the outliers beside them in floats.

Models that are trained have their outliers in a few columns, the same for all rows: these are a small product of their
own in 16 bits, behind the large one. Where rows have theirs anywhere, an outlier takes one number of each row of
weights, a number a line of the cache, and fetching these costs more than all the rest; so of 512 rows or more the
weights are first copied by columns, and each result adds its few outliers one after the other. Fewer rows wait for
weights anyway: where each is sure to have outliers, they are a dense matrix in 16 bits on the way. So they are behind
it, too, where a row has more than lists hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.formats.int8 import Outliers
from pronk.torch_engine.gpu.activation_codes import COMMON, LISTED, RowCodes, is_outlier
from pronk.torch_engine.gpu.int8_few import as_floats

OWN_KERNEL = True  # or torch._int_mm (cuBLASLt), and a kernel that finishes its sums
COPIED_FROM = 512  # rows


class Tile(NamedTuple):
    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int


TILES = ((64, Tile(64, 32, 128, 4, 4)), (511, Tile(64, 128, 128, 4, 4)))  # up to so many rows
# Two programs a multiprocessor: one begins and ends while the other multiplies, for Triton's products of bytes wait for
# each other. Of 128 x 256 a tile, one a multiprocessor, it is a sixth slower.
LARGE_TILE = Tile(128, 128, 128, 4, 3)
EXACT_TILE = Tile(64, 64, 64, 4, 2)  # of float32, whose outliers take twice the room
_FINISH_ROWS, _FINISH_OUTPUTS = 16, 256
_GROUP = 8  # tiles of rows that share weights in the second-level cache
_FLOAT_COLUMNS = 64


def wants_common(rows: int, outliers: Outliers | None) -> bool:
    """Whether the product of so many rows asks in which columns they have outliers: else these are a matrix anyway."""
    return outliers is not None and (outliers.least == 0 or rows >= COPIED_FROM)


def many_product(
    x: Tensor, codes: RowCodes, outliers: Outliers | None, q: Tensor, scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, y: Tensor, own_kernel: bool | None = None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """x [T, K], what the codes are of; q [N, K]; y [T, N]."""
    (t, k), n = x.shape, len(q)
    copied = outliers is not None and t >= COPIED_FROM
    # Where each row is sure to have some, their product is made on the way; else after it, where there are any.
    beside = outliers is not None and outliers.least > 0 and not copied
    by_columns = _by_columns(q, codes.common[COMMON:]) if copied and codes.common is not None else None
    own = OWN_KERNEL if own_kernel is None else own_kernel
    rest = {
        "APART": outliers is not None,
        "COPIED": copied,
        "LISTED": LISTED,
        "COMMON": COMMON,
        "FLOAT_COLUMNS": _FLOAT_COLUMNS,
        "EVEN_FLOATS": k % _FLOAT_COLUMNS == 0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    given = (
        x, codes.q, codes.scale, codes.least, codes.count, codes.common, codes.column, codes.value, q, by_columns,
        scale, bias, residual, y, outliers.threshold if outliers else 0.0, t, n, k,
    )  # fmt: skip
    if own or t <= 16 or n % 8 or k % 8:
        small = EXACT_TILE if x.dtype == torch.float32 else None
        tile = tile or small or next((tile for most, tile in TILES if t <= most), LARGE_TILE)
        grid = (triton.cdiv(t, tile.rows) * triton.cdiv(n, tile.outputs),)
        _multiply[grid](
            *given, ROWS=tile.rows, OUTPUTS=tile.outputs, COLUMNS=tile.columns, GROUP=_GROUP,
            EVEN=k % tile.columns == 0, BESIDE=beside, **rest,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        finish = (triton.cdiv(t, _FINISH_ROWS), triton.cdiv(n, _FINISH_OUTPUTS))
        sums = torch._int_mm(codes.q, q.t())
        _finish[finish](*given, sums, ROWS=_FINISH_ROWS, OUTPUTS=_FINISH_OUTPUTS, **rest, num_warps=4, num_stages=2)


def _by_columns(q: Tensor, marked: Tensor) -> Tensor:
    """Nothing is written where few enough columns are marked to be multiplied by themselves."""
    n, k = q.shape
    copy = q.new_empty(k, n)
    _transpose[(triton.cdiv(n, 128), triton.cdiv(k, 128))](q, copy, marked, n, k, COMMON=COMMON, num_warps=8)
    return copy


@triton.jit
def _transpose(q, copy, marked, rows, columns, COMMON: tl.constexpr):
    if tl.load(marked) <= COMMON:
        return
    n = tl.program_id(0) * 128 + tl.arange(0, 128)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    there = (n < rows)[:, None] & (k < columns)[None, :]
    tile = tl.load(q + n.to(tl.int64)[:, None] * columns + k[None, :], mask=there, other=0)
    there = (k < columns)[:, None] & (n < rows)[None, :]
    tl.store(copy + k.to(tl.int64)[:, None] * rows + n[None, :], tl.trans(tile), mask=there)


@triton.jit
def _multiply(
    x, x_codes, x_scale, leasts, counts, common, columns_of, values, q, by_columns, scale, bias, residual, y,
    threshold, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BESIDE: tl.constexpr,
    APART: tl.constexpr, COPIED: tl.constexpr, LISTED: tl.constexpr, COMMON: tl.constexpr,
    FLOAT_COLUMNS: tl.constexpr, EVEN_FLOATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * across)
    tall = min(down - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    t = (group * GROUP + within % tall) * ROWS + tl.arange(0, ROWS)
    n = (within // tall) * OUTPUTS + tl.arange(0, OUTPUTS)
    of_x = tl.where(t < rows, t, 0).to(tl.int64) * columns
    of_q = tl.where(n < outputs, n, 0).to(tl.int64) * columns
    k = tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, OUTPUTS), tl.int32)
    beside = tl.zeros((ROWS, OUTPUTS), tl.float32)
    least = tl.load(leasts + t, mask=t < rows, other=float("inf"))[:, None] if BESIDE else 0.0
    for first in range(0, columns, COLUMNS):
        if EVEN:
            a = tl.load(x_codes + of_x[:, None] + (first + k)[None, :])
            b = tl.load(q + of_q[None, :] + (first + k)[:, None])
        else:
            a = tl.load(x_codes + of_x[:, None] + (first + k)[None, :], mask=(first + k < columns)[None, :], other=0)
            b = tl.load(q + of_q[None, :] + (first + k)[:, None], mask=(first + k < columns)[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        if BESIDE:
            if EVEN:
                h = tl.load(x + of_x[:, None] + (first + k)[None, :])
            else:
                h = tl.load(x + of_x[:, None] + (first + k)[None, :], mask=(first + k < columns)[None, :], other=0)
            h = tl.where(is_outlier(h.to(tl.float32), threshold, least), h, 0.0).to(h.dtype)
            beside = tl.dot(h, as_floats(b, h.dtype), beside, input_precision=PRECISION)
    found = sums.to(tl.float32) * tl.load(x_scale + t, mask=t < rows, other=0)[:, None]
    if BESIDE:
        found += beside
    _store(
        found, t, n, x, leasts, counts, common, columns_of, values, q, by_columns, scale, bias, residual, y,
        threshold, rows, outputs, columns, APART and not BESIDE, COPIED, LISTED, COMMON, FLOAT_COLUMNS, EVEN_FLOATS,
        PRECISION,
    )  # fmt: skip


@triton.jit
def _finish(
    x, x_codes, x_scale, leasts, counts, common, columns_of, values, q, by_columns, scale, bias, residual, y,
    threshold, rows, outputs, columns, sums,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, APART: tl.constexpr, COPIED: tl.constexpr, LISTED: tl.constexpr,
    COMMON: tl.constexpr, FLOAT_COLUMNS: tl.constexpr, EVEN_FLOATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = (t < rows)[:, None] & (n < outputs)[None, :]
    found = tl.load(sums + t.to(tl.int64)[:, None] * outputs + n[None, :], mask=there, other=0).to(tl.float32)
    found *= tl.load(x_scale + t, mask=t < rows, other=0)[:, None]
    _store(
        found, t, n, x, leasts, counts, common, columns_of, values, q, by_columns, scale, bias, residual, y,
        threshold, rows, outputs, columns, APART, COPIED, LISTED, COMMON, FLOAT_COLUMNS, EVEN_FLOATS, PRECISION,
    )  # fmt: skip


@triton.jit
def _store(
    found, t, n, x, leasts, counts, common, columns_of, values, q, by_columns, scale, bias, residual, y,
    threshold, rows, outputs, columns,
    APART: tl.constexpr, COPIED: tl.constexpr, LISTED: tl.constexpr, COMMON: tl.constexpr,
    FLOAT_COLUMNS: tl.constexpr, EVEN_FLOATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile [t, n] comes to: outliers, the weights' scales, bias and residual."""
    present, there = t < rows, n < outputs
    if APART:
        marked = tl.load(common + COMMON)
        if marked > COMMON:
            most = tl.max(tl.load(counts + t, mask=present, other=0), 0)
            if COPIED and most <= LISTED:
                for one in range(0, most):
                    at = t * LISTED + one
                    column = tl.load(columns_of + at, mask=present, other=0).to(tl.int64)
                    value = tl.load(values + at, mask=present, other=0)
                    w = tl.load(by_columns + column[:, None] * outputs + n[None, :], mask=there[None, :], other=0)
                    found += value[:, None] * as_floats(w, tl.float32)
            elif most > 0:
                found = _dense(
                    found, t, n, x, leasts, q, threshold, rows, outputs, columns, FLOAT_COLUMNS, EVEN_FLOATS, PRECISION
                )
        elif marked > 0:
            slot = tl.arange(0, COMMON)
            column = tl.load(common + slot)
            here = slot < marked
            least = tl.load(leasts + t, mask=present, other=float("inf"))[:, None]
            of_x = tl.where(present, t, 0).to(tl.int64) * columns
            of_q = tl.where(there, n, 0).to(tl.int64) * columns
            h = tl.load(x + of_x[:, None] + column[None, :], mask=here[None, :], other=0)
            h = tl.where(is_outlier(h.to(tl.float32), threshold, least), h, 0.0).to(h.dtype)
            w = tl.load(q + of_q[None, :] + column[:, None], mask=here[:, None], other=0)
            found = tl.dot(h, as_floats(w, h.dtype), found, input_precision=PRECISION)
    found *= tl.load(scale + n, mask=there, other=0)[None, :]
    if bias is not None:
        found += tl.load(bias + n, mask=there, other=0).to(tl.float32)[None, :]
    at = t.to(tl.int64)[:, None] * outputs + n[None, :]
    inside = present[:, None] & there[None, :]
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        found = found.to(y.dtype.element_ty).to(tl.float32) + added
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _dense(
    found, t, n, x, leasts, q, threshold, rows, outputs, columns,
    FLOAT_COLUMNS: tl.constexpr, EVEN_FLOATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With products of all outliers, as of a matrix that has nothing else in it. They are exact: they keep x's type."""
    of_x = tl.where(t < rows, t, 0).to(tl.int64) * columns
    of_q = tl.where(n < outputs, n, 0).to(tl.int64) * columns
    least = tl.load(leasts + t, mask=t < rows, other=float("inf"))[:, None]
    k = tl.arange(0, FLOAT_COLUMNS)
    for first in tl.range(0, columns, FLOAT_COLUMNS, num_stages=2):
        if EVEN_FLOATS:
            h = tl.load(x + of_x[:, None] + (first + k)[None, :])
            w = tl.load(q + of_q[None, :] + (first + k)[:, None])
        else:
            h = tl.load(x + of_x[:, None] + (first + k)[None, :], mask=(first + k < columns)[None, :], other=0)
            w = tl.load(q + of_q[None, :] + (first + k)[:, None], mask=(first + k < columns)[:, None], other=0)
        apart = is_outlier(h.to(tl.float32), threshold, least)
        found = tl.dot(tl.where(apart, h, 0.0).to(h.dtype), as_floats(w, h.dtype), found, input_precision=PRECISION)
    return found
