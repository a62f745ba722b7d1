"""Activation checkpointing: a block's activations are forgotten and computed again when its gradients are (1604.06174).

Memory for one pass more of the blocks concerned. The numbers are the same to the bit: the same operations on the same
inputs, dropout's random state included.
"""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from pronk.errors import BadRequest
from pronk.torch_engine.model import Llama


def recompute(model: Llama, every: int) -> None:
    """Block 0 and every `every`-th after it: 1 is all of them, 0 none. Where no gradient is wanted nothing changes."""
    if type(every) is not int or every < 0:
        raise BadRequest(f"recompute every block (1), every k-th (k) or none (0), not {every!r}")
    for block in model.model.layers[::every] if every else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
