"""Frozen weights that stay codes while LoRA learns beside them: QLoRA's idea (arXiv 2305.14314) in pronk's own formats.

Embeddings, lm_head and norms stay float32, as QLoRA leaves them wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.torch_engine.codes import empty, read
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.train import codes


def linear(
    checkpoint: Checkpoint, wish: str | None, device: torch.device
) -> Callable[[LazyTensor, nn.Linear], CodesLinear | None]:
    """For load_model: what takes the place of a Linear when its weight arrives, if anything does."""

    def frozen(tensor: LazyTensor, plain: nn.Linear) -> CodesLinear | None:
        format = codes.format_of(tensor, wish)
        if format is None:
            return None
        return CodesLinear(read(checkpoint, tensor, format).to(device), plain.bias, format)

    return frozen


def outline(model: nn.Module, checkpoint: Checkpoint, wish: str | None) -> None:
    """Put codes without numbers where `linear` would put those of the weights: for whoever counts bytes."""
    for name, tensor in checkpoint.tensors.items():
        if format := codes.format_of(tensor, wish):
            owner = name.rpartition(".")[0]
            bias = cast(nn.Parameter | None, model.get_submodule(owner).bias)
            model.set_submodule(owner, CodesLinear(empty(tensor, format), bias, format))


def count(model: nn.Module) -> int:
    """Weights of a model, those in codes included."""
    in_codes = sum(m.q.shape[0] * m.in_features for m in model.modules() if isinstance(m, CodesLinear))
    return in_codes + sum(parameter.numel() for parameter in model.parameters())
