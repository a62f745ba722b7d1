"""LoRA+: which rate each parameter learns at, held against PEFT's own groups, and what a step does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import run_of, write_sums

from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.torch_engine.backend import load_module
from pronk.train import adapter, lora, optimizers
from pronk.train.settings import Settings

CONFIG = LoraConfig(rank=3, dora=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def rates(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # between PEFT and transformers
def test_the_groups_are_peft_s(folder: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    optimizers_of_peft = pytest.importorskip("peft.optimizers")
    model = load_module(checkpoint.open(folder))
    lora.add(model, CONFIG)
    adapter.save(model, CONFIG, str(folder), tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    made = optimizers_of_peft.create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    expected = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): rate
        for name, rate in rates(theirs, made).items()
    }
    found = rates(model, optimizers.make(model, "adamw", 1e-3, 0.0, ratio=16.0))
    assert found == pytest.approx(expected)
    assert {round(rate, 6) for rate in found.values()} == {1e-3, 1.6e-2}
    assert {name for name in found if found[name] < 2e-3} == {name for name in found if name.endswith("lora_A")}


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon", "sgd"])
def test_only_matrices_decay(folder: Path, kind: str) -> None:
    model = load_module(checkpoint.open(folder))
    lora.add(model, CONFIG)
    made = optimizers.make(model, kind, 1e-3, 0.5, ratio=4.0)
    decays = [(group["weight_decay"], group["lr_ratio"], group["params"][0].ndim) for group in made.param_groups]
    assert decays == [(0.5, 1.0, 2), (0.5, 4.0, 2), (0.0, 4.0, 1)]
    assert sum(len(group["params"]) for group in made.param_groups) == 3 * len(list(lora.layers(model)))


def test_a_step_moves_b_by_the_ratio_and_a_as_ever(folder: Path, tmp_path: Path) -> None:
    """AdamW's first step is of its rate, but for eps; the schedule counts for all groups."""
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    chosen = Settings(str(folder), str(data), lora=CONFIG, lora_plus_ratio=8.0, lr=1e-3, warmup=0.0, max_steps=4)
    run = run_of(chosen, tmp_path / "out")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    assert run.loop.step().lr == 1e-3
    after = dict(run.model.named_parameters())
    moved = {name: float((after[name].detach() - old).abs().max()) for name, old in before.items()}
    assert max(size for name, size in moved.items() if name.endswith("lora_B")) == pytest.approx(8e-3, rel=1e-3)
    assert all(size == 0 for name, size in moved.items() if name.endswith("lora_A"))  # B was zero
