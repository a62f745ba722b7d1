"""FloatProduct: a Product whose weights are floats. Of few rows a kernel of our own reads the weights once; of many,
cuBLAS multiplies.

Where results are not to depend on how many rows there are, one kernel serves any number, by instructions that add up
each result in one order, sixteen columns after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.chain import chained, let_next_begin, wait_for_last
from pronk.torch_engine.gpu.norms import gated as gated_of
from pronk.torch_engine.gpu.norms import rms_norm, swiglu
from pronk.torch_engine.gpu.product import Norm, Product

FEW = 16  # rows, up to which our own kernel is ahead, but of gates and ups

# Of one row: results of a program, weights of each at a time, and warps; and of gates with their ups.
_ROW_BLOCK, _GATED_ROW_BLOCK = (2, 2048, 8), (4, 1024, 4)
# Rows, results and columns of a program, its warps and stages. Of fewer than 64 rows: with more, Hopper's tensor cores
# take other instructions, which may add up in another order.
_FEW_BLOCK, _MANY_BLOCK = (16, 16, 256, 4, 5), (32, 128, 64, 4, 4)


class FloatProduct(Product):
    def __init__(self, weight: Tensor, bias: Tensor | None, *, invariant: bool = False) -> None:
        """weight [N, K], contiguous; bias [N]. `invariant`: to the number of rows, to the bit."""
        self.weight, self.bias, self.invariant = weight, bias, invariant

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        if len(x) == 1 and not self.invariant:
            return self._of_a_row(x, norm, residual, gated)
        h = rms_norm(x, *norm) if norm else x
        if self.invariant or (len(x) <= FEW and x.dtype != torch.float32 and not gated):
            return self._of_few(h, residual, gated)
        if residual is None or self.bias is not None:
            y = F.linear(h, self.weight, self.bias)
            return swiglu(y) if gated else y if residual is None else residual.add_(y)
        return residual.addmm_(h, self.weight.t())

    def _of_a_row(self, x: Tensor, norm: Norm | None, residual: Tensor | None, gated: bool) -> Tensor:
        n, k = self.weight.shape
        outputs = n // 2 if gated else n
        y = x.new_empty(1, outputs)
        weight, eps = norm or (None, 0.0)
        results, columns, warps = _GATED_ROW_BLOCK if gated else _ROW_BLOCK
        _row[(triton.cdiv(outputs, results),)](
            x, self.weight, self.bias, weight, residual, y, eps, outputs, k,
            OUTPUTS=results, COLUMNS=min(columns, triton.next_power_of_2(k)), GATED=gated, num_warps=warps,
            **chained(x),
        )  # fmt: skip
        return y

    def _of_few(self, x: Tensor, residual: Tensor | None, gated: bool) -> Tensor:
        n, k = self.weight.shape
        outputs = n // 2 if gated else n
        y = x.new_empty(len(x), outputs)
        exact = x.dtype == torch.float32
        rows, results, columns, warps, stages = _FEW_BLOCK if len(x) <= FEW else _MANY_BLOCK
        if not self.invariant:
            rows = max(rows, triton.next_power_of_2(len(x)))
        results, columns = results // 2 if gated else results, 32 if exact else columns
        _few[(triton.cdiv(outputs, results), triton.cdiv(len(x), rows))](
            x, self.weight, self.bias, residual, y, len(x), outputs, k,
            ROWS=rows, OUTPUTS=results, COLUMNS=columns, GATED=gated, EXACT="ieee" if exact else "tf32",
            num_warps=warps, num_stages=1 if exact else stages,
        )  # fmt: skip
        return y


@triton.jit
def _row(
    x, weight, bias, norm, residual, y, eps, outputs, columns,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Of one row of x. The norm's weight comes first, and its scale, which needs all of the row, last."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = n < outputs
    start = n.to(tl.int64)[:, None] * columns
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    found = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    ups = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = k < columns
        mask = there[:, None] & inside[None, :]
        w = tl.load(weight + start + k[None, :], mask=mask, other=0, eviction_policy="evict_first")
        if GATED:
            u = tl.load(
                weight + (n + outputs).to(tl.int64)[:, None] * columns + k[None, :],
                mask=mask,
                other=0,
                eviction_policy="evict_first",
            )
        h = tl.load(x + k, mask=inside, other=0).to(tl.float32)
        if norm is not None:
            squares += h * h
            h *= tl.load(norm + k, mask=inside, other=0).to(tl.float32)
        found += w.to(tl.float32) * h[None, :]
        if GATED:
            ups += u.to(tl.float32) * h[None, :]
    result = tl.sum(found, 1)
    other = tl.sum(ups, 1)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(squares) / columns + eps)
        result *= scale
        other *= scale
    if bias is not None:
        result += tl.load(bias + n, mask=there, other=0).to(tl.float32)
        if GATED:
            other += tl.load(bias + outputs + n, mask=there, other=0).to(tl.float32)
    if GATED:
        result = gated_of(result, other, y.dtype.element_ty)
    if residual is not None:
        result = result.to(y.dtype.element_ty).to(tl.float32) + tl.load(residual + n, mask=there, other=0).to(
            tl.float32
        )
    tl.store(y + n, result.to(y.dtype.element_ty), mask=there)


@triton.jit
def _few(
    x, weight, bias, residual, y, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows of x at a time, which all programs read and each multiplies with its rows of weights."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = t.to(tl.int64)[:, None]
    start = n.to(tl.int64)[None, :] * columns
    found = tl.zeros((ROWS, OUTPUTS), tl.float32)
    ups = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        mask = (k < columns)[:, None] & (n < outputs)[None, :]
        h = tl.load(x + row * columns + k[None, :], mask=(t < rows)[:, None] & (k < columns)[None, :], other=0)
        w = tl.load(
            weight + start + k[:, None], mask=mask, other=0, eviction_policy="evict_first"
        )  # [COLUMNS, OUTPUTS]
        found = tl.dot(h, w, found, input_precision=EXACT)
        if GATED:
            more = weight + (n + outputs).to(tl.int64)[None, :] * columns + k[:, None]
            u = tl.load(more, mask=mask, other=0, eviction_policy="evict_first")
            ups = tl.dot(h, u, ups, input_precision=EXACT)
    there = n < outputs
    if bias is not None:
        found += tl.load(bias + n, mask=there, other=0).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias + outputs + n, mask=there, other=0).to(tl.float32)[None, :]
    if GATED:
        found = gated_of(found, ups, y.dtype.element_ty)
    at = row * outputs + n[None, :]
    inside = (t < rows)[:, None] & there[None, :]
    if residual is not None:
        added = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        found = found.to(y.dtype.element_ty).to(tl.float32) + added
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)
