"""Adafactor and Muon: whole runs beside a plain loop with torch's own classes; what is for whom; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from torch import nn
from training_runs import run_of, write_sums

import pronk
from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadRequest
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.causal_lm import CausalLM
from pronk.torch_engine.model import Llama
from pronk.train import lora, optimizers
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.loop import Loop
from pronk.train.schedule import Schedule
from pronk.train.settings import Settings

RATE, DECAY, STEPS = 4e-3, 0.1, 6
CONFIG = LoraConfig(rank=3, dora=True)
BLOCK_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    draw = np.random.default_rng(0)
    return [Example(draw.integers(3, 259, n).astype(np.int32), np.arange(n) >= n // 3) for n in (17, 9, 30, 12)]


def model_of(folder: Path, with_lora: bool) -> Llama:
    torch.manual_seed(0)
    model = load_module(checkpoint.open(folder))
    if with_lora:
        lora.add(model, CONFIG)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def in_blocks(name: str) -> bool:
    """Whether a parameter is a weight that multiplies, in a block, or a factor of one, by its name."""
    return any(f".{module}." in name for module in BLOCK_MATRICES) and name.endswith(("weight", "lora_A", "lora_B"))


def adafactor(parameters: dict[str, nn.Parameter], ratio: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in parameters.items() if p.ndim == 2 and not name.endswith("lora_B")]
    second = [p for name, p in parameters.items() if name.endswith("lora_B")]
    rest = [p for p in parameters.values() if p.ndim < 2]
    made = [
        torch.optim.Adafactor(matrices, lr=RATE, weight_decay=DECAY),
        torch.optim.Adafactor(rest, lr=RATE * ratio),
    ]
    return [*made, torch.optim.Adafactor(second, lr=RATE * ratio, weight_decay=DECAY)] if second else made


def muon(parameters: dict[str, nn.Parameter], ratio: float) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []
    for name, parameter in parameters.items():
        rate = RATE * (ratio if parameter.ndim < 2 or name.endswith("lora_B") else 1.0)
        decay = DECAY if parameter.ndim == 2 else 0.0
        if in_blocks(name):
            how = "match_rms_adamw"
            made.append(torch.optim.Muon([parameter], lr=rate, weight_decay=decay, adjust_lr_fn=how))
        else:
            made.append(torch.optim.AdamW([parameter], lr=rate, betas=(0.9, 0.95), weight_decay=decay))
    return made


PLAIN: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {"adafactor": adafactor, "muon": muon}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_run_is_that_of_a_plain_loop_with_torch_s_class(
    folder: Path, examples: list[Example], kind: str, with_lora: bool
) -> None:
    """Two micro-batches of two a step, clipped; losses of six steps, and what they leave.

    In float64: gradients of one step are the same in both loops but for the order of adding, and Muon, which turns even
    the least of them into a whole step, made float32's order 3.5e-4 of a loss on a processor with AVX2 alone.
    """
    ratio = 4.0 if with_lora else 1.0
    model = model_of(folder, with_lora).double()
    made = optimizers.make(model, kind, RATE, DECAY, ratio=ratio if with_lora else None)
    batches = Batches([len(one) for one in examples], 2, seed=3)
    found = Loop(model, examples, batches, made, Schedule(RATE, STEPS, 0, "constant"), accumulate=2, clip=0.5)
    losses = [found.step().loss for _ in range(STEPS)]

    plain = model_of(folder, with_lora).double()
    expected = plain_losses(plain, examples, PLAIN[kind](trained(plain), ratio))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.03
    for name, parameter in trained(plain).items():
        moved = (parameter - trained(model_of(folder, with_lora))[name]).norm()
        assert (trained(model)[name] - parameter).norm() < 0.02 * moved, name


def plain_losses(model: Llama, examples: list[Example], made: list[torch.optim.Optimizer]) -> list[float]:
    """One example after the other, through the module that is called as transformers' is."""
    asked, losses = CausalLM(model), []
    count = sum(int(one.loss_mask[1:].sum()) for one in examples)
    for _ in range(STEPS):
        total = 0.0
        for one in examples:
            ids, learned = torch.from_numpy(one.ids).long()[None], torch.from_numpy(one.loss_mask)[None].clone()
            learned[:, 0] = False
            found = asked(ids, labels=torch.where(learned, ids, -100))
            loss = found.loss * int(learned.sum()) / count
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(trained(model).values(), 0.5)
        for one_of in made:
            one_of.step()
            one_of.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("kind", PLAIN)
def test_another_rate_would_be_seen(folder: Path, examples: list[Example], kind: str) -> None:
    """The inverse: B at A's rate is another run."""
    model, plain = model_of(folder, True), model_of(folder, True)
    batches = Batches([len(one) for one in examples], 4)
    made = optimizers.make(model, kind, RATE, DECAY, ratio=4.0)
    found = Loop(model, examples, batches, made, Schedule(RATE, STEPS, 0, "constant"), clip=0.5)
    losses = [found.step().loss for _ in range(STEPS)]
    assert losses != pytest.approx(plain_losses(plain, examples, PLAIN[kind](trained(plain), 1.0)), rel=1e-4)


def names_of(model: Llama, kind: type[torch.optim.Optimizer], made: optimizers.muon.Muon) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(p)]
        for part in made.parts
        if isinstance(part, kind)
        for group in part.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("with_lora", [False, True])
def test_muon_takes_matrices_of_blocks_and_adamw_all_else(folder: Path, with_lora: bool) -> None:
    model = model_of(folder, with_lora)
    model.score = nn.Linear(model.config.hidden_size, 1, bias=False)  # a reward model's
    made = optimizers.make(model, "muon", RATE, DECAY)
    assert isinstance(made, optimizers.muon.Muon)
    matrices, others = names_of(model, torch.optim.Muon, made), names_of(model, torch.optim.AdamW, made)
    assert matrices == {name for name in trained(model) if in_blocks(name)}
    assert matrices | others == set(trained(model))
    assert not matrices & others
    assert "score.weight" in others
    assert ("model.embed_tokens.weight" in others) is not with_lora
    assert any(name.endswith("lora_magnitude_vector") for name in others) is with_lora


def test_muon_s_two_halves_are_seen_and_scheduled_as_one(folder: Path, examples: list[Example]) -> None:
    model = model_of(folder, False)
    made = optimizers.make(model, "muon", RATE, DECAY)
    Loop(model, examples, Batches([9] * 4, 4), made, Schedule(RATE, 4, 4, "constant")).step()
    assert isinstance(made, optimizers.muon.Muon)
    assert {group["lr"] for part in made.parts for group in part.param_groups} == {RATE / 4}
    assert {id(parameter) for parameter in made.state} == {id(parameter) for parameter in trained(model).values()}


def nbytes(made: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in made.state.values() for value in state.values())


def test_adafactor_remembers_a_row_and_a_column_of_each_matrix(folder: Path, examples: list[Example]) -> None:
    sizes = {}
    for kind in ("adamw", "adafactor", "muon"):
        model = model_of(folder, False)
        made = optimizers.make(model, kind, RATE, DECAY)
        Loop(model, examples, Batches([9] * 4, 4), made, Schedule(RATE, 4)).step()
        sizes[kind] = nbytes(made)
    few = sum(4 * (sum(p.shape) if p.ndim == 2 else p.numel()) + 4 for p in trained(model).values())
    assert sizes["adafactor"] == few
    assert sizes["adafactor"] < 0.1 * sizes["adamw"]
    of_matrices = sum(4 * p.numel() + 4 for name, p in trained(model).items() if in_blocks(name))
    assert sizes["adamw"] - sizes["muon"] == of_matrices


@pytest.mark.parametrize("kind", PLAIN)
def test_what_a_first_step_makes_is_foretold(folder: Path, examples: list[Example], kind: str) -> None:
    """By shape and type, of each parameter: an embedding may have the shape of a block's matrix, and another state."""
    model = model_of(folder, False)
    made = optimizers.make(model, kind, RATE, DECAY)
    foretold = optimizers.states_of(made)
    assert not made.state
    Loop(model, examples, Batches([9] * 4, 4), made, Schedule(RATE, 4)).step()
    assert {p: {key: (v.shape, v.dtype) for key, v in of.items()} for p, of in made.state.items()} == {
        p: {key: (v.shape, v.dtype) for key, v in of.items()} for p, of in foretold.items()
    }


def test_a_run_is_resumed_with_its_own_optimizer_only(folder: Path, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    chosen = Settings(str(folder), str(data), lora=CONFIG, max_steps=2, accumulate=2, optimizer="muon")
    run_of(chosen, tmp_path / "run").train(stop=lambda: True)
    for kind in ("adamw", "adafactor"):
        with pytest.raises(
            BadRequest, match=f"made with optimizer='muon', and now it is '{kind}'; resume with the same"
        ):
            run_of(replace(chosen, optimizer=kind, lr=0.5), tmp_path / "run").resume()


def test_the_rate_where_none_is_given(folder: Path, tmp_path: Path) -> None:
    """Adafactor's is a share of a weight's size, and not a length."""
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    rates = {
        (kind, full): pronk.finetune(folder, data, optimizer=kind, full=full).settings.lr  # type: ignore[arg-type]
        for kind in ("adamw", "adafactor", "muon")
        for full in (False, True)
    }
    assert [rates["adamw", full] for full in (False, True)] == [2e-4, 2e-5]
    assert [rates["muon", full] for full in (False, True)] == [2e-4, 2e-5]
    assert [rates["adafactor", full] for full in (False, True)] == pytest.approx([1e-2, 1e-3])
    assert pronk.finetune(folder, data, optimizer="adafactor", lr=0.5).settings.lr == 0.5
