"""Packed linear layers compute what plain ones do, and are what a CPU backend runs on."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from tiny import in_memory, random_weights, tiny_config
from torch import nn

from pronk.engine.batch import Batch, Run
from pronk.torch_engine import packed
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.packed import PackedLinear, can_pack


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (1, 33, 65), (3, 576, 192), (130, 7, 31)])
def test_a_packed_layer_is_the_plain_one(rows: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    if not can_pack(plain.weight):
        pytest.skip(f"this machine packs no {dtype}")
    x = torch.randn(rows, inputs, generator=generator, dtype=dtype)
    exact = x.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0)
    found = PackedLinear(plain)(x)
    assert found.dtype == dtype
    # One rounding of the result, and sums in float32; each product is at most 4 / sqrt(inputs).
    allowed = exact.abs() * torch.finfo(dtype).eps + inputs**0.5 * 4 * 2.0**-24
    assert ((found.double() - exact).abs() <= allowed).all()


def test_a_cpu_backend_is_packed_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    checkpoint = in_memory(config, random_weights(config))
    batch = Batch.of([Run([3, 4, 5], logits="all")])
    fast = TorchBackend.from_checkpoint(checkpoint, device="cpu")
    assert isinstance(fast.model.lm_head, PackedLinear)
    monkeypatch.setattr(packed, "can_pack", lambda weight: False)
    slow = TorchBackend.from_checkpoint(checkpoint, device="cpu")
    assert isinstance(slow.model.lm_head, nn.Linear)
    assert np.abs(fast.forward(batch, None) - slow.forward(batch, None)).max() < 1e-5


def test_sixteen_bit_floats_stay_plain() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
    assert not can_pack(torch.zeros(4, 4, device="meta"))


def test_packing_lets_go_of_each_layer_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of the layers once kept all of them alive to the end: loading took twice the model's memory."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).requires_grad_(False)
    seen: list[weakref.ref[nn.Linear]] = []

    class Watched(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            assert not [layer for layer in seen if layer() is not None]
            super().__init__(linear)
            seen.append(weakref.ref(linear))

    monkeypatch.setattr(packed, "PackedLinear", Watched)
    packed.pack(model)
    assert len(seen) == 4
