"""What becomes of matrices that share their input: one Product, and the modules' weights are views of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pronk.torch_engine.gpu.floats import FloatProduct
from pronk.torch_engine.gpu.product import Product


def can_join(module: nn.Module, invariant: bool) -> bool:
    return isinstance(module, nn.Linear)


def join(modules: Sequence[nn.Module], invariant: bool) -> Product:
    """All of one kind, which `can_join` knows. `invariant`: to the number of rows, to the bit."""
    return FloatProduct(_joined(modules, "weight"), _joined_biases(modules), invariant=invariant)


def _joined(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Rows of all of them, one after the other. No weight is there twice when this is done."""
    own: list[Tensor] = [getattr(module, name).detach() for module in modules]
    if len(own) == 1:
        return own[0].contiguous()
    rows = torch.cat(own)
    for module, part in zip(modules, rows.split([len(one) for one in own]), strict=True):
        kept = nn.Parameter(part, requires_grad=False) if name in module._parameters else part
        setattr(module, name, kept)
    return rows


def _joined_biases(modules: Sequence[nn.Module]) -> Tensor | None:
    biases: list[Tensor | None] = [getattr(module, "bias") for module in modules]  # noqa: B009
    there = [bias.detach() for bias in biases if bias is not None]
    return torch.cat(there) if there else None
