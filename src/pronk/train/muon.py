"""Muon (kellerjordan.github.io/posts/muon) for the matrices of blocks, and AdamW for all that is none of them.

A matrix steps along its gradients' momentum with all singular values made about 1, which suits no table of tokens, no
head, and nothing that is no matrix. Steps are made as long as AdamW's usually are (arXiv 2502.16982, 2.2), so that both
learn at one rate. Each is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim


class Muon(optim.Optimizer):
    """Two optimizers as one: its groups, and what it remembers of each parameter, are theirs."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        """Muon takes the groups whose "by_muon" is true; `betas` are AdamW's."""
        matrices = [group for group in groups if group["by_muon"]]
        others = [group for group in groups if not group["by_muon"]]
        self.parts: list[optim.Optimizer] = []
        if matrices:
            self.parts.append(optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(optim.AdamW(others, lr=lr, betas=betas))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        for part in self.parts:  # groups are the same objects already
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def takes(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of a block, or one of LoRA's beside it."""
    return parameter.ndim == 2 and ".layers." in name
