"""LoRA (arXiv 2106.09685): frozen weights, and beside each a product of two thin matrices that learns.

    y = W x + (alpha / rank) * B A x,      A [rank, K] random, B [N, rank] zero, so that training begins where W was

Whatever multiplies by W may be wrapped, a Linear or one in 8 bits. adapter.py reads and writes PEFT's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadRequest


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Module, size: tuple[int, int], config: LoraConfig, device: torch.device) -> None:
        """`size`: N, K of the weight. The thin matrices are float32 whatever the base is."""
        super().__init__()
        self.base, self.scale, self.dropout, self.enabled = base, config.scale, config.dropout, True
        self.lora_A = nn.Parameter(torch.empty(config.rank, size[1], device=device))
        self.lora_B = nn.Parameter(torch.zeros(size[0], config.rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as PEFT has it

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if not self.enabled:
            return y
        dropped = F.dropout(x, self.dropout, self.training)
        thin = F.linear(
            F.linear(dropped.to(self._type(x)), self.lora_A.to(self._type(x))), self.lora_B.to(self._type(x))
        )
        return y + thin.to(y.dtype) * self.scale

    @property
    def size(self) -> tuple[int, int]:
        """N, K of the weight."""
        return len(self.lora_B), self.lora_A.shape[1]

    def _type(self, x: Tensor) -> torch.dtype:
        """What the thin products are computed in: autocast's type where it is on, else that of the matrices."""
        autocasts = torch.is_autocast_enabled(x.device.type)
        return torch.get_autocast_dtype(x.device.type) if autocasts else self.lora_A.dtype

    def delta(self) -> Tensor:
        """What is added to the weight, [N, K] float32."""
        return self.lora_B.detach().float() @ self.lora_A.detach().float() * self.scale


def add(model: nn.Module, config: LoraConfig, device: torch.device | None = None) -> None:
    """Freeze `model` and wrap its target modules in place. Raises BadRequest where it has LoRA already.

    `device`: of the thin matrices; None: where each weight is.
    """
    if any(True for _ in layers(model)):
        raise BadRequest("this model has LoRA layers already; merge them first")
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if leaf in config.target_modules:
            size = (linear.out_features, linear.in_features)
            where = device or next(iter([*linear.parameters(), *linear.buffers()])).device
            setattr(model.get_submodule(owner), leaf, LoraLinear(linear, size, config, where))


def layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Name of the wrapped module, as the base model has it, and the layer."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


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
