"""LoRA (arXiv 2106.09685): frozen weights, and beside each a product of two thin matrices that learns.

    y = W x + (alpha / rank) * B A x,      A [rank, K] random, B [N, rank] zero, so that training begins where W was

Whatever multiplies by W may be wrapped, a Linear or one in 8 bits. adapter.py reads and writes PEFT's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama
from pronk.train.dropout import drop, without


class LoraLinear(nn.Module):
    begun = False  # whether what it began with was an adapter

    def __init__(self, base: nn.Module, size: tuple[int, int], config: LoraConfig, device: torch.device) -> None:
        """`size`: N, K of the weight. The thin matrices are float32 whatever the base is."""
        super().__init__()
        self.base, self.scale, self.dropout, self.enabled = base, config.scale, config.dropout, True
        self.lora_A = nn.Parameter(torch.empty(config.rank, size[1], device=device))
        self.lora_B = nn.Parameter(torch.zeros(size[0], config.rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as PEFT has it

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        y: Tensor = self.base(x)
        if not self.enabled:
            return y
        dropped = drop(x, self.dropout) if self.training and self.dropout else None
        kept = 1 - self.dropout if dropped is not None else 1.0
        return cast(Tensor, _Beside.apply(y, x, self.lora_A, self.lora_B, self.scale / kept, dropped))

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
            setattr(model.get_submodule(owner), leaf, LoraLinear(linear, size, config, where))


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
