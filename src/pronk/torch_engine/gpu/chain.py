"""Kernels that begin while the one before them ends (CUDA's programmatic dependent launch, since Hopper).

Each of them says at once that the next may come, and waits until everything before it is done before it reads or writes
what others write: so the time between two kernels is not lost.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def chained(x: Tensor) -> dict[str, Any]:
    """What a kernel that takes CHAINED is launched with."""
    return _chained(x.device)


@cache
def _chained(device: torch.device) -> dict[str, Any]:
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"CHAINED": True, "launch_pdl": True} if able else {"CHAINED": False}


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()
