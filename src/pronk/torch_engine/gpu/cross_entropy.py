"""Cross-entropy of rows of logits, and their gradient in their place: two readings and a writing of memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.launch import launch

_BLOCK = 8192  # columns at once


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int, slopes: bool) -> Tensor:
    """log softmax(logits)[target] of each row, [R] float32, 0 where the target is `ignored`; with `slopes`, logits
    become the gradient of minus their sum."""
    rows, columns = logits.shape
    found = logits.new_empty(rows, dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(columns))
    launch(
        _cross_entropy, (rows,), logits, targets, found, logits.stride(0), columns, ignored,
        SLOPES=slopes, BLOCK=block, warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return found


@triton.jit
def _cross_entropy(
    logits_at, targets_at, found_at, stride, columns, ignored, SLOPES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_at + row)
    counts = target != ignored
    logits_at += row * stride
    chosen = tl.load(logits_at + target, mask=counts, other=0.0).to(tl.float32)  # before it is overwritten
    most = float("-inf")
    total = 0.0
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        logits = tl.load(logits_at + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        now = tl.maximum(most, tl.max(logits, axis=0))
        total = total * tl.exp(most - now) + tl.sum(tl.exp(logits - now), axis=0)
        most = now
    level = most + tl.log(total)
    tl.store(found_at + row, tl.where(counts, chosen - level, 0.0))
    if SLOPES:
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < columns
            logits = tl.load(logits_at + column, mask=inside, other=float("-inf")).to(tl.float32)
            slope = tl.exp(logits - level) - tl.where(column == target, 1.0, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(logits_at + column, slope.to(logits_at.dtype.element_ty), mask=inside)
