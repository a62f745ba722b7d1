"""NEFTune: how large its noise is, of each text alone; that it is training's alone, and the same when resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import run_of, timeless, write_sums

import pronk
from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.train import lora, neftune
from pronk.train.objectives.dpo import DPO
from pronk.train.settings import Settings

ALPHA = 5.0
LENGTHS = (400, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def batch() -> TorchBatch:
    return TorchBatch.of(Batch.of([Run([5] * n, logits="all") for n in LENGTHS]), torch.device("cpu"), None)


def test_the_noise_is_the_paper_s(folder: Path) -> None:
    """Uniform within alpha / sqrt(L C), of each text with its own L: a variance of a third of its square. As
    transformers', which trainers of TRL and PEFT have, but for padding, of which there is none here."""
    model = load_module(checkpoint.open(folder))
    neftune.add(model, ALPHA)
    assert model.with_noise
    width = model.config.hidden_size
    x = torch.zeros(sum(LENGTHS), width)
    torch.manual_seed(0)
    model.train()
    noise = model.with_noise(x, batch()).split(LENGTHS)
    for own, length in zip(noise, LENGTHS, strict=True):
        most = ALPHA / np.sqrt(length * width)
        assert 0.99 * most < float(own.abs().max()) <= most
        spread = own.square().mean().item() / (most**2 / 3)
        assert spread == pytest.approx(1, abs=4 * np.sqrt(0.8 / own.numel()))  # four deviations of such a mean
    again = model.with_noise(x, batch())
    assert not torch.equal(torch.cat(noise), again)


def test_the_noise_is_transformers_own(folder: Path) -> None:
    """What trainers of TRL have, drawn from the same seed: of texts of one length, which it does not pad."""
    hook = pytest.importorskip("transformers.integrations.neftune").neftune_post_forward_hook
    model, count, length = load_module(checkpoint.open(folder)), 4, 8
    runs = [Run([5] * length, logits="all") for _ in range(count)]
    neftune.add(model, ALPHA)
    model.train()
    assert model.with_noise
    x = torch.randn(count, length, model.config.hidden_size)
    torch.manual_seed(3)
    found = model.with_noise(x.flatten(0, 1), TorchBatch.of(Batch.of(runs), torch.device("cpu"), None))
    torch.manual_seed(3)
    expected = hook(SimpleNamespace(training=True, neftune_noise_alpha=ALPHA), (), x)
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-6, atol=1e-6)


def test_it_is_for_training_alone(folder: Path) -> None:
    model = load_module(checkpoint.open(folder))
    plain = model.eval().hidden(batch())
    neftune.add(model, ALPHA)
    assert torch.equal(model.hidden(batch()), plain)
    model.train()
    assert not torch.equal(model.hidden(batch()), plain)
    with torch.no_grad():  # a reference is asked so
        assert torch.equal(model.hidden(batch()), plain)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("adapted", [LoraConfig(rank=4), None], ids=["lora", "full"])
def test_resumed_is_as_if_never_stopped(
    folder: Path, tmp_path: Path, objective: str, adapted: LoraConfig | None
) -> None:
    answers = {"sft": ["completion"], "dpo": ["chosen", "rejected"]}[objective]
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {key: f" {a + b} {key}" for key in answers})
    chosen = Settings(
        str(folder), str(data), lora=adapted, max_steps=5, batch_size=2, accumulate=2, lr=1e-3, save_every=2,
        eval_every=9, recompute=1, neftune_alpha=ALPHA, **({"objective": DPO()} if objective == "dpo" else {}),
    )  # fmt: skip
    assert run_of(chosen, tmp_path / "whole").train()
    left = iter([False, False, False, True])
    assert not run_of(chosen, tmp_path / "parts").train(stop=lambda: next(left))
    again = run_of(chosen, tmp_path / "parts")
    torch.manual_seed(77)  # another process has another state
    again.resume()
    assert again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    assert run_of(replace(chosen, neftune_alpha=None), tmp_path / "plain").train()
    losses = [[line.get("loss") for line in timeless(tmp_path / name)] for name in ("whole", "plain")]
    assert losses[0] != losses[1]  # the noise is there
    with pytest.raises(BadRequest, match=r"made with neftune_alpha=5\.0, and now is without"):
        run_of(replace(chosen, neftune_alpha=None), tmp_path / "parts").resume()


def test_what_a_model_writes_itself_has_no_noise(folder: Path) -> None:
    with pytest.raises(BadRequest, match="neftune_alpha trains another model than what writes, by its noise"):
        pronk.grpo(folder, "x.jsonl", reward="exact", neftune_alpha=5.0)


def test_a_reference_is_asked_without_it(folder: Path) -> None:
    data = np.random.default_rng(0).integers(3, 250, 12).astype(np.int32)
    from pronk.train.data.examples import Example, Pair

    mask = np.arange(12) > 5
    pair = Pair(Example(data, mask), Example(data[:9], mask[:9]))
    model = load_module(checkpoint.open(folder))
    lora.add(model, LoraConfig(rank=2))
    model.train()
    expected = DPO().reference.of(model, [pair])
    neftune.add(model, ALPHA)
    assert torch.equal(DPO().reference.of(model, [pair]), expected)
