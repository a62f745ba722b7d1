"""LoRA (arXiv 2106.09685): frozen weights, and beside each a product of two thin matrices that learns.

    y = W x + (alpha / rank) * B A x,      A [rank, K] random, B [N, rank] zero, so that training begins where W was

DoRA (arXiv 2402.09353) learns the lengths of the sum's rows apart, m [N], which begin as those of W:

    y = m / |W + (alpha / rank) B A| * (W x + (alpha / rank) B A x)

The lengths below are constants to gradients, as in the paper (4.3) and in PEFT. Whatever multiplies by W may be
wrapped, a Linear or one in 8 bits. adapter.py reads and writes PEFT's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from pronk.checkpoint.adapter import TINY, LoraConfig
from pronk.errors import BadRequest
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.functions import compute_type, wide
from pronk.torch_engine.gpu.launch import fuses
from pronk.torch_engine.model import Linear, Llama
from pronk.train.dropout import drop, without


class LoraLinear(nn.Module):
    begun = False  # whether what it began with was an adapter
    lora_magnitude_vector: nn.Parameter | None
    lengths: Tensor  # [N], of the base's rows, where DoRA needs them

    def __init__(self, base: nn.Module, size: tuple[int, int], config: LoraConfig, device: torch.device) -> None:
        """`size`: N, K of the weight. The thin matrices are float32 whatever the base is."""
        super().__init__()
        self.base, self.scale, self.dropout, self.enabled = base, config.scale, config.dropout, True
        # On the CPU, so that a seed says the same on every device; as PEFT has it.
        drawn = nn.init.kaiming_uniform_(torch.empty(config.rank, size[1], device="cpu"), a=math.sqrt(5))
        self.lora_A = nn.Parameter(drawn.to(device))
        self.lora_B = nn.Parameter(torch.zeros(size[0], config.rank, device=device))
        lengths = nn.Parameter(torch.empty(size[0], device=device)) if config.dora else None
        self.register_parameter("lora_magnitude_vector", lengths)
        self.register_buffer("lengths", None if lengths is None else lengths.detach().clone(), persistent=False)

    @torch.no_grad()
    def begin(self) -> None:
        """DoRA's lengths, of the base's rows, when these are there. Cut among processes, all are to ask at once."""
        if self.lora_magnitude_vector is None:
            return
        found = _lengths(self.base)
        self.lora_magnitude_vector.copy_(found)
        self.lengths = found.full_tensor() if isinstance(found, DTensor) else found

    def learned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By PEFT's names."""
        yield from ((name, parameter) for name, parameter in self.named_parameters(recurse=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        if self.enabled and self.lora_magnitude_vector is None and fuses(x) and type(self.base) is Linear:
            dropped = drop(x, self.dropout) if self.training and self.dropout else None
            scale = self.scale / (1 - self.dropout if dropped is not None else 1.0)
            frozen = self.base.weight, self.base.bias
            return cast(Tensor, _Both.apply(x, *frozen, self.lora_A, self.lora_B, scale, dropped, compute_type(x)))
        y: Tensor = self.base(x)
        if not self.enabled:
            return y
        dropped = drop(x, self.dropout) if self.training and self.dropout else None
        kept = 1 - self.dropout if dropped is not None else 1.0
        if self.lora_magnitude_vector is None:
            return cast(Tensor, _Beside.apply(y, x, self.lora_A, self.lora_B, self.scale / kept, dropped))
        if (bias := cast(Tensor | None, self.base.bias)) is not None:
            y = y - bias.to(y.dtype)
        y = cast(Tensor, _Beside.apply(y, x, self.lora_A, self.lora_B, self.scale / kept, dropped))
        y = (y * (self.lora_magnitude_vector / self._now())).to(y.dtype)  # a factor near 1 has few places in 16 bits
        return y if bias is None else y + bias.to(y.dtype)

    @torch.no_grad()
    def _now(self) -> Tensor:
        """[N]: lengths of rows of W + scale B A, as |W|^2 + 2 scale W A^T . B + scale^2 |B A|^2. So W stays what it is,
        codes too, and is multiplied by A's few rows alone."""
        a, b = self.lora_A.detach(), self.lora_B.detach()
        along = self.base(a)  # [rank, N]
        if (bias := cast(Tensor | None, self.base.bias)) is not None:
            along = along - bias
        with torch.autocast(a.device.type, enabled=False):
            across = (along.t().to(b.dtype) * b).sum(-1)
            own = (b @ (a @ a.t()) * b).sum(-1)
            square = self.lengths.square() + 2 * self.scale * across + self.scale**2 * own
        return square.clamp(min=TINY).sqrt()

    @property
    def size(self) -> tuple[int, int]:
        """N, K of the weight."""
        return len(self.lora_B), self.lora_A.shape[1]


class _Beside(torch.autograd.Function):
    """y + scale * x A^T B^T, added in place to what the base made, x without what is dropped of it.

    Kept for the gradient: x, which q, k and v have in common and so keep once, and x A^T, which is thin. x without
    what is dropped is made again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, dropped: Tensor | None) -> Tensor:
        kind = y.dtype
        thin = without(x.to(kind), dropped) @ a.to(kind).t()  # [T, rank]
        ctx.save_for_backward(x, a, b, thin, dropped)
        ctx.scale = scale
        ctx.mark_dirty(y)
        return y.addmm_(thin, b.to(kind).t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, thin, dropped = ctx.saved_tensors
        kind = grad.dtype
        of_thin = (grad @ b.to(kind)).mul_(ctx.scale)  # [T, rank]
        of_a = of_thin.t() @ without(x.to(kind), dropped)
        of_b = (grad.t() @ thin).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[1]:
            of_x = without(of_thin @ a.to(kind), dropped).to(x.dtype)
        return grad, of_x, of_a.to(a.dtype), of_b.to(b.dtype), None, None


class _Both(torch.autograd.Function):
    """x W^T + bias + scale * x A^T B^T of a frozen W, where passes over memory count, on a GPU: the gradients of x are
    added up where the product puts them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dropped: Tensor | None,
        kind: torch.dtype,
    ) -> Tensor:
        ctx.scale, ctx.like = scale, x.dtype
        x, weight = x.to(kind), weight.to(kind)
        y = nn.functional.linear(x, weight, None if bias is None else bias.to(kind))
        thin = without(x, dropped) @ a.to(kind).t()  # [T, rank]
        ctx.save_for_backward(x, weight, a, b, thin, dropped)
        return y.addmm_(thin, b.to(kind).t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, thin, dropped = ctx.saved_tensors
        of_thin = (grad @ b.to(grad.dtype)).mul_(ctx.scale)  # [T, rank]
        of_a = of_thin.t() @ without(x, dropped)
        of_b = (grad.t() @ thin).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x, narrow = grad @ weight, a.to(grad.dtype)
            of_x = of_x.addmm_(of_thin, narrow) if dropped is None else of_x.add_(without(of_thin @ narrow, dropped))
            of_x = of_x.to(ctx.like)
        return of_x, None, None, of_a.to(a.dtype), of_b.to(b.dtype), None, None, None


def add(model: nn.Module, config: LoraConfig, device: torch.device | None = None) -> None:
    """Freeze `model` and wrap its target modules in place; a reward model's score learns beside them. Raises BadRequest
    where it has LoRA already.

    `device`: of the thin matrices; None: where each weight is.
    """
    if has(model):
        raise BadRequest("this model has LoRA layers already; merge them first")
    model.requires_grad_(False)
    if (weight := score(model)) is not None:
        weight.requires_grad_(True)
    for name, linear in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if leaf in config.target_modules:
            size = (linear.out_features, linear.in_features)
            where = device or next(iter([*linear.parameters(), *linear.buffers()])).device
            layer = LoraLinear(linear, size, config, where)
            setattr(model.get_submodule(owner), leaf, layer)
            if not any(tensor.is_meta for tensor in (*linear.parameters(), *linear.buffers())):
                layer.begin()


def _lengths(linear: nn.Module) -> Tensor:
    """[N]: of the rows of its weight; of codes those of the numbers that they stand for."""
    if isinstance(linear, CodesLinear):
        weight = linear.codes
        return torch.cat([torch.linalg.vector_norm(weight.floats(rows), dim=1) for rows in weight.pieces()])
    return torch.linalg.vector_norm(wide(cast(Tensor, linear.weight)), dim=1)


def narrow(model: Llama, kind: torch.dtype) -> None:
    """Keep frozen matrices in the 16-bit type that products are computed in: autocast would cast them for each.

    What blocks add to, and norms, stay in 32 bits.
    """
    embedding = model.model.embed_tokens
    if not embedding.weight.requires_grad and embedding.weight.dtype != kind:
        embedding.register_forward_hook(lambda module, ids, rows: rows.float())
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.requires_grad:
            module.weight = nn.Parameter(module.weight.to(kind), requires_grad=False)
    model.tie_weights()


def score(model: nn.Module) -> nn.Parameter | None:
    """A reward model's head [1, C], which its adapter brings along."""
    head = getattr(model, "score", None)
    return None if head is None else cast(nn.Parameter, head.weight)


def layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Name of the wrapped module, as the base model has it, and the layer."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def has(model: nn.Module) -> bool:
    return any(True for _ in layers(model))


def begun(model: nn.Module) -> bool:
    """Whether it began from an adapter; else layers begin with a B of zeros, and change nothing."""
    return any(layer.begun for _, layer in layers(model))


def remove(model: nn.Module) -> None:
    """The base model again, as it was."""
    for name, layer in list(layers(model)):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.base)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The base model's forward for a while: the reference of preference tuning, without a second copy of it."""
    found = [layer for _, layer in layers(model)]
    for layer in found:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in found:
            layer.enabled = True
