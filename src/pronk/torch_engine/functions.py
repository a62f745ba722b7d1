"""What a block is made of besides attention, as functions that keep little for their gradients.

Left to itself autograd keeps every intermediate result: of RMSNorm three copies of its input, of SwiGLU five. Each
function here is the plain formula, and where a gradient is wanted the same formula with a gradient written out by hand,
which keeps what goes in and computes the rest again. Values are the same to the bit.

On a GPU each operation of a formula is a pass over memory: one kernel does it all (gpu/gradients.py), where Triton is
there. It rounds where the formula rounds, and adds up in another order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pronk.torch_engine.gpu.launch import fuses


def compute_type(x: Tensor) -> torch.dtype:
    """What products with x are computed in: autocast's type where it is on, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(x: Tensor) -> Tensor:
    """In at least 32 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _kernels(*given: Tensor) -> ModuleType | None:
    """Of Triton, for these."""
    if not all(map(fuses, given)):
        return None
    from pronk.torch_engine.gpu import gradients

    return gradients


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias. x [T, K], weight [N, K] -> [T, N].

    In float32 on CPUs it is oneDNN or MKL that multiplies, whichever is faster at it.
    """
    if not (x.dtype == weight.dtype == compute_type(x) == torch.float32 and x.device.type == "cpu"):
        return F.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias)) if torch.is_grad_enabled() else _product(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # of a frozen weight x is not needed
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight) if of_x else None,
            product(grad.t().contiguous(), x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices, by the fastest way there is."""
    return _product(a, b.t(), None) if a.dtype == b.dtype == torch.float32 and a.device.type == "cpu" else a @ b


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch itself would always take MKL."""
    if not _onednn_leads(*weight.shape):
        return F.linear(x, weight, bias)
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def _onednn_leads(n: int, k: int) -> bool:
    """Whether it is ahead of MKL at x W^T, W [N, K]. MKL leaves AMD's AVX-512 alone, and has less than half its speed
    there; with AVX2 alone oneDNN falls behind by a fifth to a half where rows are longer than what becomes of them.
    """
    return _ONEDNN and not (_AVX2_ALONE and k > n)


_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_AVX2_ALONE = torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); the mean square is in float32."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return cast(Tensor, _RMSNorm.apply(x, weight, eps))
    return _normed(x, weight, eps, torch.promote_types(x.dtype, weight.dtype))[0]


def added_and_normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and rms_norm of that."""
    if x.ndim == 2 and _kernels(x, weight, x if delta is None else delta):
        return cast(tuple[Tensor, Tensor], _AddedAndNormed.apply(x, delta, weight, eps))
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """In `kind`, and what rows were multiplied with."""
    if x.ndim == 2 and (kernels := _kernels(x, weight)):
        _, out, scale = kernels.norm(x, None, weight, eps, kind)
        return out, scale[:, None]
    h = wide(x)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)  # [T, 1]
    return (weight * (h * scale).to(x.dtype)).to(kind), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normed(x, weight, eps, compute_type(x))  # products would cast it, each for itself
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if x.ndim == 2 and (kernels := _kernels(x, weight, grad)):
            given, _, learned = kernels.norm_back(grad, None, x, weight, scale, x.dtype, ctx.needs_input_grad[1])
            return given, learned, None
        h = wide(x) * scale  # what the weight was multiplied with
        of_weight = (grad * h).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_h = grad * wide(weight)
        along = (of_h * h).mean(-1, keepdim=True)  # the part of the gradient that only changes the length of x
        of_x = of_h.sub_(h.mul_(along)).mul_(scale).to(x.dtype) if ctx.needs_input_grad[0] else None
        return of_x, of_weight, None


class _AddedAndNormed(torch.autograd.Function):
    """On a GPU: the sum and the norm, and of their gradients what goes to x and to delta."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from pronk.torch_engine.gpu import gradients

        total, out, scale = gradients.norm(x, delta, weight, eps, compute_type(x))
        ctx.save_for_backward(total, weight, scale)
        ctx.types = x.dtype, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        from pronk.torch_engine.gpu import gradients

        total, weight, scale = ctx.saved_tensors
        of_x, of_delta = ctx.types
        if grad is None:
            grad = torch.zeros_like(total)
        given, narrowed, learned = gradients.norm_back(
            grad, of_total, total, weight, scale, of_delta or total.dtype, ctx.needs_input_grad[2]
        )
        return given.to(of_x), None if of_delta is None else narrowed, learned, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202)."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return cast(Tensor, _SwiGLU.apply(gate, up))
    return _gated(gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    kernels = _kernels(gate, up)
    return cast(Tensor, kernels.swiglu(gate, up)) if kernels else F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if kernels := _kernels(grad, gate, up):
            return cast(tuple[Tensor, Tensor], kernels.swiglu_back(grad, gate, up))
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [T, heads, D] (half-split layout), in float32. rope: cos, sin [2, T, 1, D/2]."""
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(Tensor, _Rotate.apply(x, rope))
    return _rotated(x, rope)


def _rotated(x: Tensor, rope: Tensor, back: bool = False) -> Tensor:
    if kernels := _kernels(x):
        return cast(Tensor, kernels.rotate(x, rope, back))
    cos, sin = rope
    a, b = wide(x).chunk(2, dim=-1)
    sin = -sin if back else sin
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """Its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rope: Tensor) -> Tensor:
        ctx.rope = rope
        return _rotated(x, rope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rotated(grad, ctx.rope, back=True), None
