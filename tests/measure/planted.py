"""A bug for verification to find."""

from __future__ import annotations

import pytest
import torch

from pronk.torch_engine.kv import LayerKV


def values_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache keeps values a hundredth too large; the cache-free pass has none of it."""

    def scaled(self: LayerKV, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[slots] = keys
        self.values[slots] = values * 1.01

    monkeypatch.setattr(LayerKV, "write", scaled)
