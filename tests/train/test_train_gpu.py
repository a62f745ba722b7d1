"""Training on a GPU: the losses of the CPU, and a run that goes on where it stopped, to the bit.

Texts are longer than a tile of any attention kernel: what several tiles add to one number, they may add in any order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import torch
from tiny import in_memory, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model
from training_runs import gradients, write_sums

import pronk
from pronk.checkpoint.tensors import Checkpoint
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.model import Llama
from pronk.train import frozen, lora, optimizers, state
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.folder import read_metrics
from pronk.train.loop import Loop
from pronk.train.recompute import recompute
from pronk.train.schedule import Schedule

pytestmark = pytest.mark.gpu

STEPS = 8
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
}


def source(shape: str = "gqa") -> Checkpoint:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 300, **SHAPES[shape]}
    config = tiny_config(**sizes, max_position_embeddings=1024)
    return in_memory(config, random_weights(config))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    draw = np.random.default_rng(0)
    lengths = [300, 17, 410, 33, 150, 5, 260, 90]
    return [Example(draw.integers(3, 300, n).astype(np.int32), np.arange(n) >= max(1, n // 3)) for n in lengths]


def load(device: str, shape: str = "gqa", wish: str | None = None) -> Llama:
    opened, where = source(shape), torch.device(device)
    linear = frozen.linear(opened, wish, where) if wish else None
    return load_model(opened, where, torch.float32, linear=linear)


def make(model: Llama, examples: list[Example], *, kind: str = "adamw", rate: float = 1e-3, **options: Any) -> Loop:
    batches = Batches([len(e) for e in examples], options.pop("size", 3), options.pop("pack", None), seed=3)
    return Loop(model, examples, batches, optimizers.make(model, kind, rate, 0.01), Schedule(rate, STEPS, 1), **options)


def with_lora(model: Llama, **options: Any) -> Llama:
    """Drawn on the CPU, so that it is the same everywhere."""
    lora.add(model, lora.LoraConfig(rank=4, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, layer in lora.layers(model):
            layer.lora_A.copy_(torch.randn(layer.lora_A.shape, generator=generator) * 0.1)
    return model


def losses(loop: Loop) -> list[float]:
    return [loop.step().loss for _ in range(STEPS)]


def same(a: Llama, b: Llama) -> None:
    for (name, one), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(one, other), name


# -- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ways", [{}, {"size": 1, "accumulate": 3}, {"pack": 600}])
def test_gradients_are_those_of_the_cpu(examples: list[Example], shape: str, ways: dict[str, Any]) -> None:
    expected, found = (gradients(make(load(d, shape), examples, **ways)) for d in ("cpu", devices.GPU))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].cpu(), gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon", "sgd"])
@pytest.mark.parametrize("beside", [False, True])
def test_losses_are_those_of_the_cpu(examples: list[Example], kind: str, beside: bool) -> None:
    rate = {"sgd": 0.1, "adafactor": 0.1, "muon": 1e-2}.get(kind, 1e-3)

    def curve(device: str) -> list[float]:
        model = load(device)
        return losses(make(with_lora(model) if beside else model, examples, kind=kind, rate=rate))

    expected, found = curve("cpu"), curve(devices.GPU)
    assert found == pytest.approx(expected, rel=2e-3)
    assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert abs(expected[-1] - expected[0]) > 0.05


@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("beside", [False, True])
def test_sixteen_bits_learn_nearly_the_same(examples: list[Example], precision: Any, beside: bool) -> None:
    def curve(device: str, precision: Any) -> list[float]:
        model = load(device)
        return losses(make(with_lora(model) if beside else model, examples, precision=precision))

    expected, found = curve("cpu", "f32"), curve(devices.GPU, precision)
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("format", ["q4", "q8", "int8", "llm-int8"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_beside_codes_it_learns_what_the_cpu_learns(examples: list[Example], format: str, precision: Any) -> None:
    def curve(device: str, precision: Any) -> tuple[list[float], Llama]:
        model = with_lora(load(device, wish=format))
        return losses(make(model, examples, precision=precision)), model

    (expected, _), (found, model) = curve("cpu", "f32"), curve(devices.GPU, precision)
    assert found == pytest.approx(expected, rel=2e-3 if precision == "f32" else 0.02)
    codes = [module for module in model.modules() if isinstance(module, CodesLinear)]
    assert len(codes) == 14
    assert all(module.q.device.type == devices.GPU and module.q.dtype.itemsize == 1 for module in codes)


@pytest.mark.parametrize("wish", [None, "q4"])
def test_what_is_computed_again_changes_no_bit(examples: list[Example], wish: str | None) -> None:
    def learned(layers: int) -> tuple[list[float], Llama]:
        torch.manual_seed(0)
        model = with_lora(load(devices.GPU, wish=wish), dropout=0.2)
        recompute(model, layers)
        return losses(make(model, examples, precision="bf16")), model

    (plain, one), (again, other) = learned(0), learned(2)
    assert again == plain
    same(one, other)


# -- to the bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_is_the_same_each_time(examples: list[Example], shape: str, precision: Any, beside: bool) -> None:
    def run() -> tuple[list[float], Llama]:
        torch.manual_seed(0)
        model = load(devices.GPU, shape)
        model = with_lora(model, dropout=0.2) if beside else model
        return losses(make(model, examples, precision=precision)), model

    (first, one), (second, other) = run(), run()
    assert first == second
    same(one, other)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_resumed_is_as_if_never_stopped(examples: list[Example], tmp_path: Path, kind: str, precision: Any) -> None:
    def fresh() -> Loop:
        torch.manual_seed(0)
        model = with_lora(load(devices.GPU), dropout=0.3)  # dropout: the card's random state matters
        return make(model, examples, kind=kind, accumulate=2, precision=precision)

    whole = fresh()
    expected = losses(whole)
    first = fresh()
    for _ in range(3):
        first.step()
    settings = {"data": "some"}
    saved = state.save(first, tmp_path, settings)
    again = fresh()
    torch.manual_seed(99)  # another process has another state
    state.load(again, saved, settings)
    assert [again.step().loss for _ in range(STEPS - 3)] == expected[3:]
    same(whole.model, again.model)


# -- whole runs ------------------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"lr": 0.01, "max_steps": 4, "batch_size": 2, "accumulate": 2, "samples": 0, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


def records(path: Path, kind: str) -> Path:
    answers = {
        "finetune": lambda a, b: {"completion": f" {a + b}."},
        "dpo": lambda a, b: {"chosen": f" {a + b}.", "rejected": f" {a + b + 1}."},
        "reward": lambda a, b: {"chosen": f" {a + b}.", "rejected": f" {a + b + 1}."},
        "kto": lambda a, b: {"completion": f" {a + b}.", "label": bool((a + b) % 2)},
    }
    return write_sums(path / f"{kind}.jsonl", answers[kind])


@pytest.mark.parametrize("verb", ["finetune", "dpo", "kto", "reward"])
@pytest.mark.parametrize("ways", [{}, {"full": True}, {"quantize": "q4"}])
def test_runs_measure_what_they_measure_on_the_cpu(
    folder: Path, tmp_path: Path, verb: str, ways: dict[str, Any]
) -> None:
    data = records(tmp_path, verb)
    told = []
    for device in ("cpu", devices.GPU):
        out = tmp_path / f"on-{device}-{len(told)}"
        rank = {} if "full" in ways else {"lora_rank": 4}
        getattr(pronk, verb)(folder, data, out, device=device, precision="f32", **rank, **QUICK, **ways).run()
        told.append([line["loss"] for line in read_metrics(out) if "loss" in line])
    assert len(told[0]) >= QUICK["max_steps"]
    assert told[1] == pytest.approx(told[0], rel=5e-3)


def test_a_model_reinforced_there_learns(folder: Path, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f"{a + b}"})
    wanted = {"num_generations": 4, "max_new_tokens": 12, "lora_rank": 4, "eval_share": 0, **QUICK, "max_steps": 2}
    out = tmp_path / "out"
    pronk.grpo(folder, data, out, reward="regex:[0-9a-f]", rollout="exact", device=devices.GPU, **wanted).run()
    lines = [line for line in read_metrics(out) if "loss" in line]
    assert len(lines) >= 2
    assert all(np.isfinite(line["loss"]) for line in lines)


def test_a_model_pretrained_there_learns(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the llama stood on the ridge and looked down at the valley. " * 400)
    told = []
    for device in ("cpu", devices.GPU):
        out = tmp_path / f"on-{device}-{len(told)}"
        sizes = {"vocab_size": 300, "hidden": 64, "layers": 2, "heads": 2, "ctx_size": 64}
        pronk.pretrain(text, out, device=device, precision="f32", max_steps=6, samples=0, seed=1, **sizes).run()
        told.append([line["loss"] for line in read_metrics(out) if "loss" in line])
    assert told[1] == pytest.approx(told[0], rel=5e-3)
    assert told[1][-1] < told[1][0]


def test_what_was_trained_there_answers_there_and_on_the_cpu(folder: Path, tmp_path: Path) -> None:
    data, out = records(tmp_path, "finetune"), tmp_path / "out"
    pronk.finetune(folder, data, out, lora_rank=4, device=devices.GPU, **{**QUICK, "max_steps": 12}).run()
    said = [
        pronk.load(folder, adapter=out, engine="torch", device=device, quantize="f32")
        .generate("2 plus 3 is", max_new_tokens=8)
        .tokens
        for device in ("cpu", devices.GPU)
    ]
    assert said[0] == said[1]


def test_states_travel_between_devices(examples: list[Example], tmp_path: Path) -> None:
    """A checkpoint of the one goes on on the other, but for rounding."""
    first = make(with_lora(load(devices.GPU)), examples)
    for _ in range(3):
        first.step()
    saved = state.save(first, tmp_path, {})
    rest = [first.step().loss for _ in range(3)]
    other = make(with_lora(load("cpu")), examples)
    state.load(other, saved, {})
    assert [other.step().loss for _ in range(3)] == pytest.approx(rest, rel=1e-3)
