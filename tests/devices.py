"""The devices that tests of torch run on: the CPU, and a GPU where there is one."""

from __future__ import annotations

from functools import cache

import pytest

GPU = "cuda"
DEVICES = ("cpu", pytest.param(GPU, marks=pytest.mark.gpu))
WITHOUT = "torch sees no CUDA GPU here"


@cache
def has_gpu() -> bool:
    """It imports torch: ask for tests marked `gpu` alone."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
