"""The largest models fit; what many files ask for together is refused as what one asks for is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronk.checkpoint.budget import Budget
from pronk.errors import BadFile


def test_llama_405b_of_sixteen_ranks() -> None:
    budget, path = Budget(), Path("x")
    for _ in range(16):
        budget.spend(path, "files", 1)
        budget.spend(path, "tensors", 1138)
        budget.spend(path, "bytes of headers", 1138 * 500)
        budget.spend(path, "pickle instructions", 1138 * 45)


def test_llama_405b_in_191_shards() -> None:
    budget, path = Budget(), Path("x")
    for _ in range(191):
        budget.spend(path, "files", 1)
        budget.spend(path, "tensors", 6)
        budget.spend(path, "bytes of JSON headers", 2000)


def test_the_file_that_is_one_too_many_is_named() -> None:
    budget = Budget()
    budget.spend(Path("a"), "tensors", 32768)
    with pytest.raises(BadFile, match=r"^b: count at byte 8: with this file .* more than 32768 tensors"):
        budget.spend(Path("b"), "tensors", 1, field="count", offset=8)
