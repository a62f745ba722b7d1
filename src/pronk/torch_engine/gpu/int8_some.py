"""Products of up to 64 rows with weights in int8: one product in float16, which codes and outliers share.

Reading the weights still takes longer than multiplying, so what outliers cost is a second product in the same units as
the codes: each row's are divided by its scale, and by a power of two where they would not fit. Codes stay exact, and
outliers have the eleven bits of float16, as in bitsandbytes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.int8_few import as_floats


class SomeTile(NamedTuple):
    outputs: int
    columns: int
    warps: int
    stages: int


NARROW_TILE, WIDE_TILE = SomeTile(32, 128, 4, 4), SomeTile(64, 128, 4, 4)  # of weights with few rows, and many
_WIDE = 16384  # rows of weights


def some_product(
    x: Tensor, factor: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor,
    tile: SomeTile | None = None,
) -> None:  # fmt: skip
    """x [T, K] float16 and factor [T], as activation_codes.of_some makes them; q [N, K]; y [T, N]."""
    (rows, k), n = x.shape, len(q)
    tile = tile or (WIDE_TILE if n >= _WIDE else NARROW_TILE)
    width = max(16, triton.next_power_of_2(rows))
    _multiply[(triton.cdiv(n, tile.outputs), triton.cdiv(rows, width))](
        x, factor, q, scale, bias, residual, y, rows, n, k,
        ROWS=width, OUTPUTS=tile.outputs, COLUMNS=tile.columns, EVEN=k % tile.columns == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _multiply(
    x, factor, q, scale, bias, residual, y, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Weights come first: they are made floats in registers, out of which tensor cores take the first factor alone."""
    n, t = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    of_q = tl.where(n < outputs, n, 0).to(tl.int64)[:, None] * columns + k[None, :]
    of_x = tl.where(t < rows, t, 0).to(tl.int64)[None, :] * columns + k[:, None]
    found = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, columns, COLUMNS):
        if EVEN:
            w, h = tl.load(q + of_q + first, eviction_policy="evict_first"), tl.load(x + of_x + first)
        else:
            inside = first + k < columns
            w = tl.load(q + of_q + first, mask=inside[None, :], other=0, eviction_policy="evict_first")
            h = tl.load(x + of_x + first, mask=inside[:, None], other=0)
        found = tl.dot(as_floats(w, tl.float16), h, found)
    there = n < outputs
    found *= tl.load(factor + t, mask=t < rows, other=0)[None, :]
    found *= tl.load(scale + n, mask=there, other=0)[:, None]
    if bias is not None:
        found += tl.load(bias + n, mask=there, other=0).to(tl.float32)[:, None]
    at = t.to(tl.int64)[None, :] * outputs + n[:, None]
    inside = there[:, None] & (t < rows)[None, :]
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        found = found.to(y.dtype.element_ty).to(tl.float32) + added
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)
