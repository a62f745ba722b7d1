"""LoRA's one function against the plain formula, and frozen weights in 16 bits against autocast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny_chat_model
from torch import Tensor, nn

from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.engine.batch import Batch, Run
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Linear
from pronk.train import lora
from pronk.train.dropout import drop, without


def layer(dropout: float, dtype: torch.dtype = torch.float64) -> lora.LoraLinear:
    torch.manual_seed(0)
    base = Linear(6, 5, bias=False, dtype=dtype).requires_grad_(False)
    made = lora.LoraLinear(base, (5, 6), LoraConfig(rank=2, alpha=6.0, dropout=dropout), torch.device("cpu")).to(dtype)
    nn.init.normal_(made.lora_B)
    return made


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_values_and_gradients_are_the_plain_formula_s(dropout: float) -> None:
    made = layer(dropout)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    inputs = (x, made.lora_A, made.lora_B)

    def plain(dropped: Tensor | None) -> Tensor:
        thin = without(x, dropped) / (1 - dropout) @ made.lora_A.T @ made.lora_B.T
        return made.base(x) + 3.0 * thin  # type: ignore[no-any-return]

    torch.manual_seed(1)
    dropped = drop(x, dropout) if dropout else None
    expected = plain(dropped)
    torch.manual_seed(1)
    out = made(x)
    torch.testing.assert_close(out, expected)
    along = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, along), torch.autograd.grad(expected, inputs, along), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_layer_over_inputs_without_gradient_learns_all_the_same() -> None:
    made = layer(0.0)
    made(torch.randn(7, 6, dtype=torch.float64)).sum().backward()
    assert made.lora_A.grad is not None
    assert made.lora_B.grad is not None
    assert made.lora_B.grad.abs().sum() > 0


def test_frozen_weights_in_16_bits_are_what_autocast_makes_of_them(tmp_path: Path) -> None:
    """To the bit, but for embeddings, which autocast leaves alone: they are rounded for both here."""
    folder = save_tiny_chat_model(tmp_path / "tiny")
    batch = TorchBatch.of(Batch.of([Run([1, 50, 60, 70], logits="all")]), torch.device("cpu"), None)
    found = []
    for narrowed in (False, True):
        model = load_module(checkpoint.open(folder))
        torch.manual_seed(0)
        lora.add(model, LoraConfig(rank=2))
        embedding = model.model.embed_tokens.weight
        embedding.data = embedding.bfloat16().float()
        if narrowed:
            lora.narrow(model, torch.bfloat16)
            kinds = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters() if "norm" not in name}
            assert kinds["lora_A"] == kinds["lora_B"] == torch.float32
            assert kinds["weight"] == torch.bfloat16
            assert model.lm_head.weight.dtype == torch.bfloat16
            assert model.model.norm.weight.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(batch)
        assert hidden.dtype == torch.bfloat16
        hidden.float().square().sum().backward()
        found.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
