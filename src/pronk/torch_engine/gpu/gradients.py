"""What a block is made of besides products and attention, with its gradients: one pass over memory each.

The formulas are those of torch_engine/functions.py, with its roundings; sums come in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.torch_engine.gpu.launch import launch

_BLOCK = 1024  # elements of a program where each stands for itself
_PROGRAMS = 1056  # that share the sum over rows of a norm's weight: 8 for each multiprocessor of an H100


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, rms_norm of that in `kind`, and the factors of rows, [T] float32."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=kind)
    scale = x.new_empty(rows, dtype=torch.float32)
    total = x
    if delta is not None:
        delta = delta.contiguous()
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, delta.dtype))
    block = triton.next_power_of_2(columns)
    launch(
        _norm, (rows,), x, x if delta is None else delta, weight, total, out, scale, eps, columns,
        ADD=delta is not None, BLOCK=block, warps=_warps(block),
    )  # fmt: skip
    return total, out, scale


@triton.jit
def _norm(
    x_at, delta_at, weight_at, total_at, out_at, scale_at, eps, columns, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_at + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_at.dtype.element_ty)
        tl.store(total_at + at, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
    tl.store(scale_at + row, scale)
    normed = (x * scale).to(total_at.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + at, (normed * weight).to(out_at.dtype.element_ty), mask=inside)


def norm_back(
    grad: Tensor, beside: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, narrow: torch.dtype, learns: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, the same in the type `narrow`, and of the weight where it `learns`.

    `grad`: of the result; `beside`: of x, from where else it went.
    """
    grad = grad.contiguous()
    beside = None if beside is None else beside.contiguous()
    rows, columns = x.shape
    of_x = torch.empty_like(x)
    narrowed = torch.empty_like(x, dtype=narrow) if narrow != x.dtype else of_x
    each = max(1, -(-rows // _PROGRAMS)) if learns else 1
    programs = -(-rows // each)
    parts = x.new_empty(programs if learns else 1, columns, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    launch(
        _norm_back, (programs,), grad, x if beside is None else beside, x, weight, scale, of_x, narrowed, parts,
        rows, columns, each, BESIDE=beside is not None, NARROW=narrow != x.dtype, LEARNS=learns, BLOCK=block,
        warps=_warps(block),
    )  # fmt: skip
    return of_x, narrowed, parts.sum(0).to(weight.dtype) if learns else None


@triton.jit
def _norm_back(
    grad_at, beside_at, x_at, weight_at, scale_at, of_x_at, narrow_at, parts_at, rows, columns, each,
    BESIDE: tl.constexpr, NARROW: tl.constexpr, LEARNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    learned = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * each, tl.minimum(program * each + each, rows)):
        at = tl.cast(row, tl.int64) * columns + column
        scale = tl.load(scale_at + row)
        h = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
        if LEARNS:
            learned += grad * h
        of_h = grad * weight
        along = tl.sum(of_h * h, axis=0) / columns
        of_x = (of_h - h * along) * scale
        if BESIDE:
            of_x += tl.load(beside_at + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x_at + at, of_x.to(of_x_at.dtype.element_ty), mask=inside)
        if NARROW:
            tl.store(narrow_at + at, of_x.to(narrow_at.dtype.element_ty), mask=inside)
    if LEARNS:
        tl.store(parts_at + tl.cast(program, tl.int64) * columns + column, learned, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate, dtype=torch.promote_types(gate.dtype, up.dtype))
    size = gate.numel()
    launch(_swiglu, (triton.cdiv(size, _BLOCK),), gate, up, out, size, BLOCK=_BLOCK)
    return out


@triton.jit
def _swiglu(gate_at, up_at, out_at, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_at + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(gate_at.dtype.element_ty).to(tl.float32)
    tl.store(out_at + at, (silu * up).to(out_at.dtype.element_ty), mask=inside)


def swiglu_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    size = gate.numel()
    launch(_swiglu_back, (triton.cdiv(size, _BLOCK),), grad, gate, up, of_gate, of_up, size, BLOCK=_BLOCK)
    return of_gate, of_up


@triton.jit
def _swiglu_back(grad_at, gate_at, up_at, of_gate_at, of_up_at, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_at + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(of_gate_at + at, of_gate.to(of_gate_at.dtype.element_ty), mask=inside)
    tl.store(of_up_at + at, (grad * gate * sigmoid).to(of_up_at.dtype.element_ty), mask=inside)


def rotate(x: Tensor, rope: Tensor, back: bool = False) -> Tensor:
    """See functions.rotate; `back` turns the other way."""
    x, rope = x if x.stride(-1) == 1 else x.contiguous(), rope.contiguous()
    tokens, heads, width = x.shape
    out = x.new_empty(x.shape)
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    launch(
        _rotate, (tokens,), x, rope, out, x.stride(0), x.stride(1), tokens, heads, width // 2,
        BACK=back, HEADS=block_heads, HALF=block_half, warps=max(1, min(8, block_heads * block_half // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x_at, rope_at, out_at, stride_token, stride_head, tokens, heads, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    cos = tl.load(rope_at + token * half + pair, mask=pair < half, other=0.0)
    sin = tl.load(rope_at + (tokens + token) * half + pair, mask=pair < half, other=0.0)
    if BACK:
        sin = -sin
    at = x_at + token * stride_token + head * stride_head + pair
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    to = out_at + (token * heads + head) * (2 * half) + pair
    tl.store(to, (a * cos - b * sin).to(out_at.dtype.element_ty), mask=inside)
    tl.store(to + half, (b * cos + a * sin).to(out_at.dtype.element_ty), mask=inside)
