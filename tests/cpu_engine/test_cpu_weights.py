"""What loading takes beside the packed weights."""

from __future__ import annotations

import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint import rows
from pronk.cpu_engine import weights
from pronk.cpu_engine.backend import CpuBackend


def test_the_pages_of_a_large_tensor_are_given_back_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=640, num_hidden_layers=1)
    size, given_back = 640 * 64, []
    monkeypatch.setattr(weights, "_PIECE", size // 10)
    monkeypatch.setattr(rows, "MAPPED", size * 4 // 10)
    monkeypatch.setattr(rows.mapped, "let_go", lambda: given_back.append(1))
    CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1)
    assert len(given_back) >= 2 * 10, "embedding and head, in ten parts each"
