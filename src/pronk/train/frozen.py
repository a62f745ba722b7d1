"""Frozen weights that stay codes while LoRA learns beside them: QLoRA's idea (arXiv 2305.14314) in pronk's own formats.

A matrix of 8 or 4 bits is multiplied as the numbers that its codes stand for: a few rows at a time are made floats,
used and forgotten, in the forward pass and again in the backward pass, which needs x's gradient alone. Activations are
not rounded. So the gradient is exactly that of what was computed; and int8 and llm-int8, which differ in what they do
to activations, are the same here. (bitsandbytes' 8-bit layer rounds activations on the way forward, and takes no notice
of that on the way back.)

Embeddings, lm_head and norms stay float32, as QLoRA leaves them wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.torch_engine.functions import compute_type, product
from pronk.torch_engine.gpu.launch import fuses
from pronk.train import codes
from pronk.train.codes import Codes


class FrozenLinear(nn.Module):
    """y = x W^T + bias of a W in codes: takes the place of a Linear whose weight is not trained."""

    q: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, weight: Codes, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features, self.origin = len(weight.q), weight.columns, weight.origin
        self.turned = weight.turned
        for name in ("q", "scale", "minimum"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = bias

    @property
    def codes(self) -> Codes:
        return Codes(self.in_features, self.q, self.scale, self.minimum, self.origin, self.turned)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], in the type that products are computed in: x's own, or autocast's."""
        y = cast(Tensor, _Product.apply(x, self.codes, compute_type(x)))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self) -> Tensor:
        """W, [N, K] float32, in one piece."""
        return self.codes.floats(slice(None))


class _Product(torch.autograd.Function):
    """x W^T. Nothing is saved for the backward pass but the codes, which are there anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Codes, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.like = weight, x.dtype
        given = x.to(dtype)
        if fuses(given) and not weight.turned:
            return given @ _whole(weight, dtype).t()
        y = given.new_empty(len(x), len(weight.q))  # before what is forgotten, in whose place it would leave a hole
        for rows in weight.pieces():
            y[:, rows] = product(given, weight.floats(rows).to(dtype).t())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight: Codes = ctx.weight
        if fuses(grad) and not weight.turned:
            return (grad @ _whole(weight, grad.dtype)).to(ctx.like), None, None
        found: Tensor | None = None  # a sum in float32
        for rows in weight.pieces():
            part = product(grad[:, rows].contiguous(), weight.floats(rows).to(grad.dtype)).float()
            found = part if found is None else found.add_(part)
        assert found is not None
        return found.to(ctx.like), None, None


def _whole(weight: Codes, dtype: torch.dtype) -> Tensor:
    """[N, K]: a GPU makes floats of a matrix in one pass, and multiplies well by nothing smaller."""
    from pronk.torch_engine.gpu.dequantize import dequantize

    return dequantize(weight.q, weight.scale, weight.minimum, weight.origin, weight.columns, dtype)


def linear(
    checkpoint: Checkpoint, wish: str | None, device: torch.device
) -> Callable[[LazyTensor, nn.Linear], nn.Module | None]:
    """For load_model: what takes the place of a Linear when its weight arrives, if anything does."""

    def frozen(tensor: LazyTensor, plain: nn.Linear) -> FrozenLinear | None:
        format = codes.format_of(tensor, wish)
        if format is None:
            return None
        return FrozenLinear(codes.read(checkpoint, tensor, format).to(device), plain.bias)

    return frozen


def outline(model: nn.Module, checkpoint: Checkpoint, wish: str | None) -> None:
    """Put codes without numbers where `linear` would put those of the weights: for whoever counts bytes."""
    for name, tensor in checkpoint.tensors.items():
        if format := codes.format_of(tensor, wish):
            owner = name.rpartition(".")[0]
            bias = cast(nn.Parameter | None, model.get_submodule(owner).bias)
            model.set_submodule(owner, FrozenLinear(codes.empty(tensor, format), bias))


def count(model: nn.Module) -> int:
    """Weights of a model, those in codes included."""
    in_codes = sum(m.q.shape[0] * m.in_features for m in model.modules() if isinstance(m, FrozenLinear))
    return in_codes + sum(parameter.numel() for parameter in model.parameters())
