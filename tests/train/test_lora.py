"""LoRA against PEFT: the same adapter files, the same numbers, the same gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import save_tiny_chat_model
from torch import Tensor

from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig, read_config
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest, ModelNotFound, Unsupported
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama
from pronk.train import adapter, lora

IDS = [1, 50, 60, 70, 80, 90, 30, 20]
CONFIG = LoraConfig(rank=3, alpha=12, target_modules=("down_proj", "q_proj", "v_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path) -> Llama:
    return load_module(checkpoint.open(folder))


def logits(model: Llama) -> Tensor:
    out: Tensor = model(TorchBatch.of(Batch.of([Run(IDS, logits="all")]), torch.device("cpu"), None))
    return out


def shake(model: torch.nn.Module) -> None:
    """B is zero at the beginning, and would hide everything."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, layer in lora.layers(model):
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.3)


def peft_model(folder: Path, adapter_folder: Path, **options: Any) -> Any:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter_folder, **options)


def test_training_begins_where_the_model_was(folder: Path) -> None:
    model = load(folder)
    before = logits(model)
    lora.add(model, CONFIG)
    assert torch.equal(logits(model), before)
    assert {name.rpartition(".")[2] for name, _ in lora.layers(model)} == set(CONFIG.target_modules)
    learns = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learns
    assert all("lora_" in name for name in learns)


def test_switched_off_and_taken_off_it_is_the_base(folder: Path) -> None:
    model = load(folder)
    before = logits(model)
    lora.add(model, CONFIG)
    shake(model)
    changed = logits(model)
    assert not torch.equal(changed, before)
    with lora.disabled(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), changed)
    lora.remove(model)
    assert torch.equal(logits(model), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # between PEFT and transformers
@pytest.mark.parametrize("rslora", [False, True])
def test_ours_in_peft_and_peft_s_here(folder: Path, tmp_path: Path, rslora: bool) -> None:
    model = load(folder)
    config = LoraConfig(3, 12.0, 0.0, CONFIG.target_modules, rslora)
    lora.add(model, config)
    shake(model)
    ours = tmp_path / "ours"
    ours.mkdir()
    adapter.save(model, config, str(folder), ours)

    theirs = peft_model(folder, ours, is_trainable=True)
    their_logits = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(model), their_logits, rtol=1e-4, atol=1e-5)

    loss = torch.nn.functional.cross_entropy(logits(model)[:-1], torch.tensor(IDS[1:]))
    loss.backward()
    torch.nn.functional.cross_entropy(their_logits[:-1], torch.tensor(IDS[1:])).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, layer in lora.layers(model):
        for part in ("lora_A", "lora_B"):
            expected = gradients[f"base_model.model.{name}.{part}.default.weight"]
            torch.testing.assert_close(getattr(layer, part).grad, expected, rtol=1e-4, atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs")
    again = load(folder)
    assert adapter.load(again, tmp_path / "theirs") == config
    assert torch.equal(logits(again), logits(model))


def test_dropout_is_for_training_alone(folder: Path) -> None:
    model = load(folder)
    lora.add(model, LoraConfig(rank=3, dropout=0.5))
    shake(model)
    model.eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def saved(folder: Path, tmp_path: Path) -> Path:
    model = load(folder)
    lora.add(model, CONFIG)
    shake(model)
    adapter.save(model, CONFIG, "base", tmp_path)
    return tmp_path


def test_an_adapter_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    assert read_config(saved(folder, tmp_path)) == (CONFIG, "base")


def edited(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / adapter.CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


@pytest.mark.parametrize(
    ("harm", "kind", "problem"),
    [
        (lambda f: (f / adapter.CONFIG).unlink(), ModelNotFound, "no adapter in this folder"),
        (lambda f: (f / adapter.WEIGHTS).unlink(), ModelNotFound, "and no adapter_model.safetensors"),
        (lambda f: (f / adapter.CONFIG).write_text("{"), BadFile, "adapter_config.json"),
        (edited({"peft_type": "IA3"}), Unsupported, "peft_type='IA3' is not supported"),
        (edited({"use_dora": True}), BadFile, "lora_magnitude_vector.*absent: it is no adapter"),
        (edited({"init_lora_weights": "pissa"}), Unsupported, "which changes the base model's weights; save it with"),
        (edited({"modules_to_save": ["lm_head"]}), Unsupported, "modules_to_save="),
        (edited({"bias": "all"}), Unsupported, "bias='all'"),
        (edited({"target_modules": ".*proj"}), Unsupported, "only a list of names"),
        (edited({"target_modules": ["lm_head"]}), BadFile, "no target module 'lm_head'"),
        (edited({"r": 0}), BadFile, "rank of LoRA"),
        (edited({"r": 4}), BadFile, r"shape \(3, \d+\), but this model wants \(4, \d+\)"),
        (edited({"target_modules": ["q_proj"]}), BadFile, "belongs to no module of this model"),
        (edited({"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}), BadFile, "absent: it is no adapter"),
    ],
)
def test_an_adapter_that_does_not_fit(
    folder: Path, tmp_path: Path, harm: Callable[[Path], Any], kind: type[Exception], problem: str
) -> None:
    harm(saved(folder, tmp_path))
    model = load(folder)
    before = logits(model)
    with pytest.raises(kind, match=problem):
        adapter.load(model, tmp_path)
    assert torch.equal(logits(model), before)  # as if nothing had been tried


@pytest.mark.parametrize(
    "options",
    [{"rank": 0}, {"rank": 2.5}, {"alpha": 0}, {"alpha": float("nan")}, {"dropout": 1.0}, {"target_modules": ()},
     {"target_modules": ("lm_head",)}],
)  # fmt: skip
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="LoRA"):
        LoraConfig(**options)


def test_twice_is_refused(folder: Path) -> None:
    model = load(folder)
    lora.add(model, CONFIG)
    with pytest.raises(BadRequest, match="LoRA layers already"):
        lora.add(model, CONFIG)
