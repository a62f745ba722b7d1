"""Activation checkpointing: a block's activations are forgotten and computed again when its gradients are (1604.06174).

Memory for one pass more of the blocks concerned. The numbers are the same to the bit: the same operations on the same
inputs, dropout's random state included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pronk.errors import BadRequest
from pronk.torch_engine.model import Block, Llama


def recompute(model: Llama, every: int) -> None:
    """Block 0 and every `every`-th after it: 1 is all of them, 0 none."""
    if type(every) is not int or every < 0:
        raise BadRequest(f"recompute every block (1), every k-th (k) or none (0), not {every!r}")
    for index, block in enumerate(model.model.layers):
        if every and index % every == 0:
            assert isinstance(block, Block)
            _wrap(block)


def _wrap(block: Block) -> None:
    inner = block.forward

    def forward(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept that could be forgotten
            return inner(*arguments)
        return checkpoint(inner, *arguments, use_reentrant=False)

    block.forward = forward  # type: ignore[method-assign, assignment]
