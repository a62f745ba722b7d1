"""What torch has taken of a GPU's memory: by tensors, not what its allocator keeps for later. Bytes.

On a CPU torch does not count, but what it takes for itself at its first use can be had out of the way.
"""

from __future__ import annotations

import torch
from torch import nn

from pronk.engine.backend import DeviceMemory
from pronk.torch_engine.packed import PackedLinear, can_pack


def settle() -> None:
    """Use what every model uses once: some 90 MB of torch's own modules and tables that are no model's."""
    with torch.device("meta"):
        nn.Embedding(1, 1)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            linear = nn.Linear(8, 8, dtype=dtype)
            layer = PackedLinear(linear) if can_pack(linear.weight) else linear
            layer(torch.zeros(2, 8, dtype=dtype))


def free(device: str | None) -> int:
    """Of a GPU; None: of the one that models go to by default."""
    return torch.cuda.mem_get_info(device or "cuda")[0]


class CudaMemory(DeviceMemory):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def of(device: str | torch.device) -> CudaMemory | None:
    """None on a CPU, where torch does not count."""
    where = torch.device(device)
    return CudaMemory(where) if where.type == "cuda" else None
