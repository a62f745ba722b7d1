"""The likeliest token of each row of logits, found by many programs a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 4096  # logits of a program


def likeliest(logits: Tensor) -> Tensor:
    """See pronk.torch_engine.predictions.likeliest: [R, V] -> [2, R] int64."""
    rows, columns = logits.shape
    found = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    if rows:
        parts = triton.cdiv(columns, _PART)
        most = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        _of_part[(rows, parts)](logits, most, tokens, columns, PART=_PART, num_warps=4)
        _of_row[(rows,)](most, tokens, found, rows, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return found


@triton.jit
def _first(values, tokens, there):
    """The largest value, and the first token that has it; NaN is larger than all."""
    nan = (values != values) & there
    most = tl.max(tl.where(there & (values == values), values, float("-inf")))
    any_nan = tl.max(nan.to(tl.int32)) > 0
    is_it = tl.where(any_nan, nan, there & (values == most))
    return tl.where(any_nan, float("nan"), most), tl.min(tl.where(is_it, tokens, 0x7FFFFFFF))


@triton.jit
def _of_part(logits, most, tokens, columns, PART: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    there = token < columns
    values = tl.load(logits + row.to(tl.int64) * columns + token, mask=there, other=0).to(tl.float32)
    value, first = _first(values, token, there)
    at = row * tl.num_programs(1) + part
    tl.store(most + at, value)
    tl.store(tokens + at, first)


@triton.jit
def _of_row(most, tokens, found, rows, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    there = part < parts
    values = tl.load(most + row * parts + part, mask=there, other=0)
    value, first = _first(values, tl.load(tokens + row * parts + part, mask=there, other=0), there)
    tl.store(found + row, first.to(tl.int64))
    tl.store(found + rows + row, (tl.abs(value) < float("inf")).to(tl.int64))
