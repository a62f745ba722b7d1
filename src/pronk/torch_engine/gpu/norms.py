"""RMSNorm and SwiGLU in one kernel each, a row a program: each reads its input once and writes its result once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.chain import chained, let_next_begin, wait_for_last

_WIDE = 4096  # numbers of a row that a program of SwiGLU takes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, [T, K]; rounded where pronk.torch_engine.functions.rms_norm rounds."""
    out = torch.empty_like(x)
    columns = x.shape[1]
    wide = triton.next_power_of_2(columns)
    _rms_norm[(len(x),)](x, weight, out, eps, columns, WIDE=wide, num_warps=_warps(wide), **chained(x))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Rows of gates, then ups [T, 2F] -> silu(gate) * up, [T, F]."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    wide = min(_WIDE, triton.next_power_of_2(columns))
    _swiglu[(rows, triton.cdiv(columns, wide))](
        gate_up, out, columns, WIDE=wide, num_warps=_warps(wide), **chained(gate_up)
    )
    return out


def _warps(wide: int) -> int:
    return max(1, min(16, wide // 512))


@triton.jit
def normed(h, square, weight, eps, columns, dtype: tl.constexpr):
    """Of a row h in float32 whose squares sum up to `square`: rounded to dtype, as what weighs it is."""
    scale = tl.rsqrt(square / columns + eps)
    return (h * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _rms_norm(x, weight, out, eps, columns, WIDE: tl.constexpr, CHAINED: tl.constexpr):
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, WIDE)
    there = at < columns
    given = tl.load(x + row + at, mask=there, other=0)
    h = given.to(tl.float32)
    y = normed(h, tl.sum(h * h), tl.load(weight + at, mask=there, other=0), eps, columns, given.dtype)
    tl.store(out + row + at, y.to(given.dtype), mask=there)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 numbers, which are rounded to dtype first, as silu's are: so does the plain module."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def _swiglu(gate_up, out, columns, WIDE: tl.constexpr, CHAINED: tl.constexpr):
    let_next_begin(CHAINED)
    wait_for_last(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    there = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=there, other=0)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=there, other=0)
    y = gated(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out + row * columns + at, y.to(gate.dtype), mask=there)
