"""Whether there are kernels for a tensor, and how they are started."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pronk.torch_engine.gpu import available

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = False  # for tests, which have Triton's interpreter run kernels on a CPU


def fuses(x: Tensor) -> bool:
    """Whether kernels take tensors like this one."""
    return x.dtype in _TYPES and (INTERPRETED or (x.is_cuda and _available(x.device)))


@cache
def _available(device: torch.device) -> bool:
    return available(device)


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, warps: int = 4, **constants: Any) -> None:
    """Of tensors without bytes, on which a step is rehearsed (train/memory.py), nothing is computed."""
    tensors = [one for one in given if isinstance(one, Tensor)]
    if isinstance(tensors[0], FakeTensor) or not all(grid):
        return
    if INTERPRETED:
        kernel[grid](*given, **constants, num_warps=warps)
        return
    with torch.cuda.device(tensors[0].device):
        kernel[grid](*given, **constants, num_warps=warps)
