"""A file of named tensors in one of the two containers that Hugging Face and Meta use, told apart by content."""

from __future__ import annotations

from pathlib import Path

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import safetensors, torch_zip
from pronk.checkpoint.tensors import LazyTensor
from pronk.errors import BadFile


def detect(path: Path) -> bool:
    return safetensors.detect(path) or torch_zip.detect(path)


def read(path: Path, budget: Budget | None = None) -> dict[str, LazyTensor]:
    """Every tensor under the name it has in the file. Raises BadFile."""
    if safetensors.detect(path):
        return safetensors.read(path, budget)
    if torch_zip.detect(path):
        return torch_zip.read(path, budget)
    raise BadFile(path, "neither a safetensors file nor a torch archive")
