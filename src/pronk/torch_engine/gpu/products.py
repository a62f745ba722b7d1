"""What becomes of matrices that share their input: one Product, and the modules' weights are views of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.gpu import int8
from pronk.torch_engine.gpu.codes import CodesProduct, can_multiply, joined
from pronk.torch_engine.gpu.floats import FloatProduct
from pronk.torch_engine.gpu.product import Product
from pronk.torch_engine.quantized import Int8Linear


def can_join(modules: Sequence[nn.Module], invariant: bool) -> bool:
    """Whether they are of one kind, of which there are kernels."""
    kind, *others = map(_kind, modules)
    return kind is not None and all(other == kind for other in others) and not (invariant and kind[0] is not nn.Linear)


def _kind(module: nn.Module) -> tuple[Any, ...] | None:
    if isinstance(module, nn.Linear):
        return nn.Linear, module.weight.dtype
    if isinstance(module, Int8Linear) and module.scheme in int8.SCHEMES:
        return Int8Linear, module.scheme, module.turned, module.outliers
    if isinstance(module, CodesLinear) and can_multiply(codes := module.codes):
        return CodesLinear, codes.columns, codes.q.dtype, codes.q.shape[1:], codes.origin, codes.minimum is None
    return None


def join(modules: Sequence[nn.Module], invariant: bool) -> Product:
    """All of one kind, which `can_join` knows. `invariant`: to the number of rows, to the bit."""
    first, biases = modules[0], _joined_biases(modules)
    if isinstance(first, CodesLinear):
        return _of_codes(modules, biases)  # type: ignore[arg-type]
    if isinstance(first, Int8Linear):
        scale = torch.cat([m.scale.expand(m.out_features, 1) for m in modules if isinstance(m, Int8Linear)])
        return int8.Int8Product(_joined(modules, "q"), scale, biases, first.scheme, first.outliers, first.turned)
    return FloatProduct(_joined(modules, "weight"), biases, invariant=invariant)


def _of_codes(modules: Sequence[CodesLinear], biases: Tensor | None) -> CodesProduct:
    product, end = CodesProduct(joined([module.codes for module in modules]), biases), 0
    for module in modules:
        begin, end = end, end + module.out_features
        module.join(product, slice(begin, end))
    return product


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
