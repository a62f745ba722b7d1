"""Kernels that begin while the one before them ends (CUDA's programmatic dependent launch, since Hopper).

Each of them says at once that the next may come, asks the memory for its weights, and then waits until everything
before it is done: so nothing is read or written too early, and the time between two kernels is not lost.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MODE = int(
    __import__("os").environ.get("PRONK_CHAIN", "0")
)  # 0: one after the other; 1: chained; 2: weights are asked for, too


def chained(x: Tensor) -> dict[str, Any]:
    """What a kernel that takes CHAINED is launched with."""
    return _chained(x.device)


@cache
def _chained(device: torch.device) -> dict[str, Any]:
    if MODE and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"CHAINED": MODE, "launch_pdl": True}
    return {"CHAINED": 0}


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    if CHAINED:
        gdc_wait()


@triton.jit
def ask_for(pointers, CHAINED: tl.constexpr):
    """What lies at each of them comes to the cache that all multiprocessors share, 128 bytes of it."""
    if CHAINED == 2:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
