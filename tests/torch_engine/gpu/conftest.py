"""Kernels run where there is a GPU, and elsewhere by Triton's interpreter: slowly, but to be right on small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs need Triton, which torch brings where it has CUDA")


@pytest.fixture(scope="session")
def where() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU all of these tests are of the suite `gpu`: `-m gpu` chooses them, too."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.gpu)
