"""The loop: transformers' loss and gradients, however examples are dealt out; and a run goes on where it stopped."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import gradients

from pronk import checkpoint
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.model import Llama
from pronk.train import lora, optimizers, state
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.loop import Broken, Loop
from pronk.train.schedule import Schedule

SETTINGS = {"lr": 1e-3, "data": "some"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    draw = np.random.default_rng(0)
    lengths = [3, 17, 9, 30, 5, 12, 21, 8]
    return [
        Example(draw.integers(3, 259, n).astype(np.int32), np.arange(n) >= max(1, n // 3)) for n in lengths
    ]  # fmt: skip


def load(folder: Path) -> Llama:
    return load_module(checkpoint.open(folder))


def make(model: Llama, examples: list[Example], *, steps: int = 4, kind: str = "adamw", **options: Any) -> Loop:
    batches = Batches([len(e) for e in examples], options.pop("size", 2), options.pop("pack", None), seed=3)
    rate = options.pop("rate", 1e-3)
    return Loop(model, examples, batches, optimizers.make(model, kind, rate, 0.01), Schedule(rate, steps, 1), **options)


def test_loss_and_gradients_are_those_of_transformers(folder: Path, examples: list[Example]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, targets = torch.zeros(()), 0
    for example in examples:
        ids = torch.from_numpy(example.ids.astype(np.int64))
        labels = torch.where(torch.from_numpy(example.loss_mask), ids, -100)
        count = int(example.loss_mask.sum())
        total = total + theirs(ids[None], labels=labels[None]).loss * count
        targets += count
    (total / targets).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}

    loop = make(load(folder), examples, size=len(examples))
    grads = gradients(loop)
    assert loop.position.losses == [pytest.approx(float(total.detach()) / targets, abs=1e-5)]
    assert grads.keys() == {name for name in expected if expected[name] is not None}
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ways", [{"size": 1, "accumulate": 8}, {"size": 3, "accumulate": 3}, {"pack": 60}])
def test_however_examples_are_dealt_out(folder: Path, examples: list[Example], ways: dict[str, Any]) -> None:
    whole = make(load(folder), examples, size=len(examples))
    if "pack" in ways:
        ways = {**ways, "accumulate": len(Batches([len(e) for e in examples], pack=60, seed=3).epoch(0))}
    dealt = make(load(folder), examples, **ways)
    expected, found = gradients(whole), gradients(dealt)
    assert dealt.position.losses == [pytest.approx(whole.position.losses[0], abs=1e-6)]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_the_mean_of_means_would_be_seen(folder: Path, examples: list[Example]) -> None:
    """The inverse: weighing micro-batches alike, as a plain accumulation does, is another loss."""
    model = load(folder)
    loop = make(model, examples)
    means = [loop.evaluate([example]).loss for example in examples]
    assert abs(sum(means) / len(means) - loop.evaluate(examples).loss) > 1e-3


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon", "sgd"])
@pytest.mark.parametrize("with_lora", [False, True])
def test_it_learns(folder: Path, examples: list[Example], kind: str, with_lora: bool) -> None:
    model = load(folder)
    if with_lora:
        lora.add(model, lora.LoraConfig(rank=8, alpha=16))
    loop = make(model, examples, steps=30, kind=kind, rate={"sgd": 0.1, "adafactor": 0.5}.get(kind, 1e-2), size=4)
    before = loop.evaluate(examples).loss
    while not loop.done:
        last = loop.step()
    assert loop.evaluate(examples).loss < before - 0.5
    assert (last.step, last.epoch) == (30, 15.0)


def test_eight_bits_step_nearly_as_32_do(folder: Path, examples: list[Example]) -> None:
    moved = {}
    for kind in ("adamw", "adamw8bit"):
        model = load(folder)
        start = copy.deepcopy(dict(model.named_parameters()))
        loop = make(model, examples, steps=10, kind=kind)
        while not loop.done:
            loop.step()
        moved[kind] = torch.cat([(p - start[n]).detach().flatten() for n, p in model.named_parameters()])
    off = (moved["adamw8bit"] - moved["adamw"]).norm() / moved["adamw"].norm()
    assert 0 < off < 0.1
    state_bytes = sum(t.nbytes for s in loop.optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    large = sum(p.numel() for p in model.parameters() if p.numel() >= 4096)
    small = sum(p.numel() for p in model.parameters() if p.numel() < 4096)
    assert state_bytes <= large * (2 + 8 / 256) * 1.01 + small * 8


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_mixed_precision_computes_in_16_bits_and_keeps_32(
    folder: Path, examples: list[Example], precision: Any
) -> None:
    exact = make(load(folder), examples, size=8)
    mixed = make(load(folder), examples, size=8, precision=precision)
    expected, found = exact.step().loss, mixed.step().loss
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    assert {parameter.dtype for parameter in mixed.model.parameters()} == {torch.float32}
    model = load(folder)
    lora.add(model, lora.LoraConfig(rank=4))
    make(model, examples, precision=precision)
    kept = {(p.requires_grad, p.dtype) for name, p in model.named_parameters() if "norm" not in name}
    assert kept == {(True, torch.float32), (False, getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[precision]))}


def test_a_loss_that_is_no_number_names_the_records(folder: Path, examples: list[Example]) -> None:
    model = load(folder)
    loop = make(model, examples, names=[f"line {n + 1}" for n in range(len(examples))])
    before = copy.deepcopy(model.state_dict())
    model.model.norm.register_forward_hook(lambda *_: torch.full((1, 1), math.nan) * _[2])
    with pytest.raises(Broken, match=r"step 1: the loss is not a number, on line \d, line \d; look at these records"):
        loop.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_held_out_loss_that_is_no_number_is_not_the_best_so_far(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples)
    with torch.no_grad():
        loop.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(Broken, match="after step 0: the held-out loss is not a number"):
        loop.evaluate(examples)


def test_a_leap_stops(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples, steps=50, rate=1e-6)
    while loop.position.step < 23:  # it is held against the last 20
        loop.step()
    with torch.no_grad():
        loop.model.lm_head.weight.mul_(300)
    with pytest.raises(Broken, match="step 24: the loss leapt to"):
        loop.step()


def test_a_small_loss_may_be_many_times_what_it_was(folder: Path, examples: list[Example]) -> None:
    """Of what is learned by heart; and of the first steps nobody knows what is usual."""
    loop = make(load(folder), examples)
    loop.position.losses = [0.001] * 20
    loop._check(1.0, [0])
    with pytest.raises(Broken, match=r"the loss leapt to 1\.01 from 0\.001, on examples \[0\]"):
        loop._check(1.01, [0])
    loop.position.losses = [0.001] * 19
    loop._check(50.0, [0])


def test_a_gradient_that_is_no_number_stops_it_too(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples, size=8, accumulate=2, names=[f"line {n + 1}" for n in range(len(examples))])
    before = copy.deepcopy(loop.model.state_dict())
    loop.model.lm_head.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(
        Broken, match=r"step 1: the gradient is not a number, on (line \d, ){7}line \d and 8 more; look"
    ):
        loop.step()
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_in_f16_such_a_step_is_left_out_and_gradients_scaled_less(folder: Path, examples: list[Example]) -> None:
    exact, loop = make(load(folder), examples, size=8), make(load(folder), examples, size=8, precision="f16")
    before, scale = copy.deepcopy(loop.model.state_dict()), loop.scaler.get_scale()
    hook = loop.model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    assert not math.isfinite(loop.step().grad_norm)
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert loop.scaler.get_scale() == scale / 2
    hook.remove()
    assert loop.step().grad_norm == pytest.approx(exact.step().grad_norm, rel=0.02)  # and not 32768 times that
    assert not torch.equal(before["lm_head.weight"], loop.model.lm_head.weight)


@pytest.mark.parametrize("clip", [0.01, 0.0])
def test_gradients_are_no_longer_than_asked(folder: Path, examples: list[Example], clip: float) -> None:
    whole = torch.cat([grad.flatten() for grad in gradients(make(load(folder), examples, size=8)).values()]).norm()
    loop = make(load(folder), examples, size=8, clip=clip)
    taken: list[float] = []
    parameters = list(loop.model.parameters())
    loop.optimizer.register_step_pre_hook(
        lambda *_: taken.append(float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()))
    )
    assert loop.step().grad_norm == pytest.approx(float(whole), rel=1e-4)  # before
    assert taken == [pytest.approx(clip or float(whole), rel=1e-4)]


def test_a_step_tells_what_it_was(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples, size=8)
    told: list[tuple[int, int]] = []
    first = loop.evaluate(examples, lambda *done: told.append(done)).loss
    taken = []
    while not loop.done:
        taken.append(loop.step())
        assert {group["lr"] for group in loop.optimizer.param_groups} == {taken[-1].lr}
    assert [step.lr for step in taken] == [loop.schedule.at(number) for number in range(4)]
    assert taken[0].loss == pytest.approx(first, abs=1e-5)  # one by one or all at once
    assert (taken[0].tokens, taken[0].targets) == (sum(len(e) - 1 for e in examples), sum(e.targets for e in examples))
    assert told == [(number, 8) for number in range(8)]


def test_dropout_is_at_work_in_steps_alone(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples, size=8)
    seen: list[bool] = []
    loop.model.model.layers[0].register_forward_pre_hook(lambda block, *_: seen.append(block.training))
    for what, training in ((loop.step, True), (lambda: loop.evaluate(examples[:1]), False), (loop.step, True)):
        what()
        assert seen.pop() is training


def test_the_best_so_far_and_how_long_ago(folder: Path, examples: list[Example]) -> None:
    loop = make(load(folder), examples)
    noted = [(loop.improved(loss), loop.position.best, loop.position.waited) for loss in (2.0, 2.0, 2.5, 1.5, 1.7)]
    assert noted == [(True, 2.0, 0), (False, 2.0, 1), (False, 2.0, 2), (True, 1.5, 0), (False, 1.5, 1)]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon"])
def test_resumed_is_as_if_never_stopped_to_the_bit(
    folder: Path, examples: list[Example], tmp_path: Path, kind: str
) -> None:
    def fresh() -> Loop:
        torch.manual_seed(0)
        model = load(folder)
        lora.add(model, lora.LoraConfig(rank=4, dropout=0.3))  # dropout: random state matters
        return make(model, examples, steps=12, kind=kind, rate=1e-2, size=3, accumulate=2)

    whole = fresh()
    losses = [whole.step().loss for _ in range(12)]

    first = fresh()
    for _ in range(5):
        first.step()
    saved = state.save(first, tmp_path, SETTINGS)
    again = fresh()
    torch.manual_seed(99)  # another process has another state
    state.load(again, saved, SETTINGS)
    assert [again.step().loss for _ in range(7)] == losses[5:]
    for (name, one), (_, other) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_is_whole_or_absent(
    folder: Path, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make(load(folder), examples)
    loop.step()
    state.save(loop, tmp_path, SETTINGS)
    loop.step()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(PronkError, match="the checkpoint cannot be written: No space left on device"):
            state.save(loop, tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    for _ in range(2):
        state.save(loop, tmp_path, SETTINGS)
        loop.step()
    state.save(loop, tmp_path, SETTINGS)
    assert [path.name for path in state.checkpoints(tmp_path)] == ["step-000003", "step-000004"]


def test_other_settings_and_other_models_are_refused(folder: Path, examples: list[Example], tmp_path: Path) -> None:
    loop = make(load(folder), examples)
    saved = state.save(loop, tmp_path, SETTINGS)
    with pytest.raises(BadRequest, match=r"was made with lr=0.001, and now it is 0.1"):
        state.load(loop, saved, {**SETTINGS, "lr": 0.1})
    other = load(folder)
    lora.add(other, lora.LoraConfig(rank=4))
    with pytest.raises(BadFile, match="no checkpoint of this run"):
        state.load(make(other, examples), saved, SETTINGS)
    (saved / ".metadata").write_bytes(b"not at all")
    with pytest.raises(BadFile, match="no checkpoint of this run"):
        state.load(loop, saved, SETTINGS)
