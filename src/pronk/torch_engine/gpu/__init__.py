"""Triton kernels: for inference the pass of a Llama module, one call of each a layer, in CUDA graphs; and for training.

The plain module says what a pass means (pronk.torch_engine.model); this room computes the same within its type's
rounding noise. Nothing here is imported where there is no GPU or no Triton, which torch brings on Linux.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def available(device: torch.device) -> bool:
    """Whether these kernels run there: on NVIDIA's GPUs since Ampere, whose products of 16-bit types they use."""
    return (
        device.type == "cuda" and find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )
