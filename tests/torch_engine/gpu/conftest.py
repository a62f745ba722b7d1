"""Kernels run where there is a GPU, and elsewhere by Triton's interpreter: slowly, but to be right on small models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs need Triton, which torch brings where it has CUDA")


@pytest.fixture(scope="session")
def where() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
