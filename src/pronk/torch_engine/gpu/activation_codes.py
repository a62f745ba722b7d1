"""The codes of activations, a row a program: its norm, its turn, its outliers and its codes in one kernel.

Codes and outliers are those of formats.int8 to the bit: no product and sum may be fused into one here, and the one
division is rounded. A number that is none counts as infinite, which makes all results of its row NaN or infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.formats.int8 import Outliers
from pronk.formats.turn import together
from pronk.torch_engine.gpu.chain import chained, let_next_begin, wait_for_last
from pronk.torch_engine.gpu.norms import normed
from pronk.torch_engine.gpu.product import Norm

LISTED = 32  # outliers of a row that have a place in lists
COMMON = 64  # columns with outliers that are multiplied by themselves


@dataclass(frozen=True)
class RowCodes:
    """Of rows x [T, K] for a product with many of them."""

    q: Tensor  # [T, K] int8, 0 where an outlier is
    scale: Tensor  # [T] float32
    least: Tensor  # [T] float32: what is as large as this is an outlier
    count: Tensor  # [T] int32: outliers
    # [COMMON + 1] int32: columns where rows have some, -1 behind them; last, how many there are in all.
    common: Tensor | None
    column: Tensor  # [T, LISTED] int32
    value: Tensor  # [T, LISTED] float32, 0 where there are fewer


def of_many(x: Tensor, outliers: Outliers | None, turned: bool, in_common: bool = True) -> RowCodes:
    """`in_common`: whether it matters in which columns all rows together have outliers."""
    t, k = x.shape
    apart = outliers is not None and in_common
    new = x.new_empty
    codes = RowCodes(
        new(t, k, dtype=torch.int8),
        new(t, dtype=torch.float32),
        new(t, dtype=torch.float32),
        new(t, dtype=torch.int32),
        new(COMMON + 1, dtype=torch.int32) if apart else None,
        new(t, LISTED, dtype=torch.int32),
        new(t, LISTED, dtype=torch.float32),
    )
    marks = x.new_zeros(k, dtype=torch.int32) if apart else None
    _start("many", x, None, outliers, turned, codes.q, codes.scale, codes, marks)
    if marks is not None:
        wide = triton.next_power_of_2(k)
        _in_common[(1,)](marks, codes.common, k, WIDE=wide, COMMON=COMMON, num_warps=min(16, max(4, wide // 512)))
    return codes


def of_few(x: Tensor, norm: Norm | None, outliers: Outliers | None, turned: bool) -> tuple[Tensor, Tensor]:
    """[T, K] codes in the type of x, then, where there can be outliers, as much with nothing else in it; scales [T]."""
    t, k = x.shape
    both = x.new_empty(t * (1 if outliers is None else 2), k)
    scale = x.new_empty(t, dtype=torch.float32)
    _start("few", x, norm, outliers, turned, both, scale, None)
    return both, scale


def of_some(x: Tensor, norm: Norm | None, outliers: Outliers | None, turned: bool) -> tuple[Tensor, Tensor]:
    """[T, K] float16 of codes, and of outliers in the same units; factors [T] that make numbers of both."""
    out, factor = torch.empty_like(x, dtype=torch.float16), x.new_empty(len(x), dtype=torch.float32)
    _start("some", x, norm, outliers, turned, out, factor, None)
    return out, factor


def of_a_row(x: Tensor, norm: Norm | None, outliers: Outliers | None, turned: bool) -> Tensor:
    """[1, K] float32: what codes stand for, and outliers as they are."""
    out = torch.empty_like(x, dtype=torch.float32)
    _start("row", x, norm, outliers, turned, out, out, None)
    return out


def _start(
    form: str,
    x: Tensor,
    norm: Norm | None,
    outliers: Outliers | None,
    turned: bool,
    out: Tensor,
    scale: Tensor,
    lists: RowCodes | None,
    marks: Tensor | None = None,
) -> None:
    t, k = x.shape
    weight, eps = norm or (None, 0.0)
    block = together(k) if turned else 1
    wide = triton.next_power_of_2(k)
    _codes[(t,)](
        x, weight, out, scale,
        lists and lists.least, lists and lists.count, marks, lists and lists.column, lists and lists.value,
        eps, outliers.threshold if outliers else 0.0, t, k,
        FORM=form, WIDE=wide, BLOCK=block, SHRINK=float(np.float32(1) / np.sqrt(np.float32(block))),
        APART=outliers is not None, LEAST=min(outliers.least, k) if outliers else 0,
        SHORT=x.element_size() == 2 and wide <= 1 << 16, LISTED=LISTED,
        num_warps=max(1, min(16, wide // (512 if t <= 16 else 1024))), enable_fp_fusion=False,
        **chained(x),
    )  # fmt: skip


@triton.jit
def _magnitude(x):
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def is_outlier(x, threshold, least):
    """`least`: the smallest of those that are taken whatever the threshold; infinite where none are, and then what is
    infinite itself is taken too, which changes no result: it is not finite either way."""
    size = _magnitude(x)
    return (size > threshold) | ((size >= least) & (size > 0))


@triton.jit
def turn(x, WIDE: tl.constexpr, BLOCK: tl.constexpr, SHRINK: tl.constexpr):
    """Sums and differences in the order of formats.turn."""
    x = tl.reshape(x, (WIDE // BLOCK, BLOCK))
    for power in tl.static_range(1, 9):
        if (1 << power) <= BLOCK:
            halves = tl.permute(tl.reshape(x, (WIDE // BLOCK, 2, BLOCK // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            x = tl.reshape(tl.join(first + second, first - second), (WIDE // BLOCK, BLOCK))
    return tl.reshape(x, (WIDE,)) * SHRINK


@triton.jit
def _list(place, nth, row, start, x, columns_of, values, LISTED: tl.constexpr):
    """An outlier of a row."""
    tl.store(columns_of + row * LISTED + nth, place)
    tl.store(values + row * LISTED + nth, tl.load(x + start + place).to(tl.float32))


@triton.jit
def _codes(
    x, norm, out, scales, leasts, counts, marks, columns_of, values, eps, threshold, rows, columns,
    FORM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SHRINK: tl.constexpr,
    APART: tl.constexpr, LEAST: tl.constexpr, SHORT: tl.constexpr, LISTED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_begin(CHAINED)
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    at = tl.arange(0, WIDE)
    there = at < columns
    wait_for_last(CHAINED)
    given = tl.load(x + start + at, mask=there, other=0)
    h = given.to(tl.float32)
    if norm is not None:
        h = normed(h, tl.sum(h * h), tl.load(norm + at, mask=there, other=0), eps, columns, given.dtype)
        h = h.to(given.dtype).to(tl.float32)
    if BLOCK > 1:
        h = turn(h, WIDE, BLOCK, SHRINK)

    size = _magnitude(h)
    least = tl.full((), float("inf"), tl.float32)
    if LEAST > 0 and SHORT:
        # One number says how large each is and where: of equals the first is the largest.
        bits = h.to(given.dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        keys = (bits << 16) | (0xFFFF - at)
        # The largest of each eight find most rows' largest of all: where no eight have two of them.
        CHUNK: tl.constexpr = 8 if WIDE >= 1024 and LEAST * 8 <= WIDE else 1
        some_keys = tl.max(tl.reshape(keys, (WIDE // CHUNK, CHUNK)), 1)
        last = tl.full((), 0x7FFFFFFF, tl.int32)
        for nth in range(LEAST):
            last = tl.max(tl.where(some_keys < last, some_keys, -1), 0)
            if FORM == "many" and nth < LISTED:  # as if there were no others: below, where there are
                _list(0xFFFF - (last & 0xFFFF), nth, row, start, x, columns_of, values, LISTED)
        if tl.sum((keys >= last).to(tl.int32), 0) > LEAST:
            last = tl.full((), 0x7FFFFFFF, tl.int32)
            for nth in range(LEAST):
                last = tl.max(tl.where(keys < last, keys, -1), 0)
                if FORM == "many" and nth < LISTED:
                    _list(0xFFFF - (last & 0xFFFF), nth, row, start, x, columns_of, values, LISTED)
        least = _magnitude((last >> 16).to(tl.int16).to(given.dtype, bitcast=True).to(tl.float32))
    elif LEAST > 0:
        left = size
        for nth in range(LEAST):
            least, place = tl.max(left, 0, return_indices=True)
            left = tl.where(at == place, -1.0, left)
            if FORM == "many" and nth < LISTED:
                _list(place, nth, row, start, x, columns_of, values, LISTED)
    if APART:
        apart = there & is_outlier(h, threshold, least)
        size = tl.where(apart, 0.0, size)
    largest = tl.max(size, 0)
    inverse = tl.div_rn(127.0, largest)
    tiny = inverse == float("inf")
    inverse = tl.where(tiny, 0.0, inverse)
    scale = tl.where(tiny, 0.0, tl.div_rn(largest, 127.0))
    q = h * inverse
    if APART:
        q = tl.where(apart, 0.0, q)
    q = tl.where(q == q, q, 0.0)
    q = (q + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, of two the even

    if FORM == "row":
        value = scale * q
        if APART:
            value = tl.where(apart, h, value)
        tl.store(out + start + at, value, mask=there)
    elif FORM == "some":
        unit = scale
        if APART:
            most = tl.max(tl.where(apart, _magnitude(h), 0.0), 0)
            unit = tl.where(scale == 0.0, most, scale)
            unit = tl.where(unit == 0.0, 1.0, unit)
            unit *= tl.exp2(tl.maximum(tl.ceil(tl.log2(tl.div_rn(most, unit) / 32768 + 1e-30)), 0.0))
            q = tl.where(apart, h, q * scale) / unit
        tl.store(scales + row, unit)
        tl.store(out + start + at, q.to(tl.float16), mask=there)
    else:
        tl.store(scales + row, scale)
        tl.store(out + start + at, q.to(out.dtype.element_ty), mask=there)
    if FORM == "few" and APART:
        kept = tl.where(apart, h, 0.0).to(out.dtype.element_ty)
        tl.store(out + (row + rows).to(tl.int64) * columns + at, kept, mask=there)
    if FORM == "many" and APART:
        some = tl.sum(apart.to(tl.int32), 0)
        tl.store(leasts + row, least)
        tl.store(counts + row, some)
        if marks is not None:
            tl.store(marks + at, tl.full((WIDE,), 1, tl.int32), mask=apart)
        if some != LEAST:
            ahead = tl.where(apart, at, WIDE)
            for nth in range(0, tl.minimum(some, LISTED)):
                place = tl.min(ahead, 0)
                ahead = tl.where(at == place, WIDE, ahead)
                _list(place, nth, row, start, x, columns_of, values, LISTED)
        slot = tl.arange(0, LISTED)
        tl.store(columns_of + row * LISTED + slot, tl.zeros((LISTED,), tl.int32), mask=slot >= some)
        tl.store(values + row * LISTED + slot, tl.zeros((LISTED,), tl.float32), mask=slot >= some)


@triton.jit
def _in_common(marks, common, columns, WIDE: tl.constexpr, COMMON: tl.constexpr):
    """The first of the columns that any row marked."""
    at = tl.arange(0, WIDE)
    marked = tl.load(marks + at, mask=at < columns, other=0)
    place = tl.cumsum(marked, 0) - 1
    total = tl.sum(marked, 0)
    slot = tl.arange(0, COMMON)
    tl.store(common + slot, tl.full((COMMON,), -1, tl.int32), mask=slot >= total)
    tl.store(common + place, at, mask=(marked > 0) & (place < COMMON))
    tl.store(common + COMMON, total)
