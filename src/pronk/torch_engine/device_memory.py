"""What torch has taken of a GPU's memory: held by tensors, not what its allocator keeps for later. Bytes."""

from __future__ import annotations

import torch


def held(device: str) -> int | None:
    """Now; None on a CPU, where torch does not count."""
    where = torch.device(device)
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else None


def peak(device: str) -> int | None:
    """The most since the process began, or since `reset_peak`."""
    where = torch.device(device)
    return torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None


def reset_peak(device: str) -> None:
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
