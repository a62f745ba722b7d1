"""Training computes what answers; and where it would not, that is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import save_huggingface
from planted import values_scaled
from tiny import CONFIGS, random_weights, tiny_config

import pronk
from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.engine.batch import Batch
from pronk.llm import LLM
from pronk.measure.verify_training import verify_training
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import Rows, TorchBatch
from pronk.train import adapter, lora, passes
from pronk.train.objectives import objective

FLOATS = {"cpu": {"quantize": "f32", "threads": 1}, "torch": {"quantize": "f32", "device": "cpu"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_huggingface(path, tiny_config(), random_weights(tiny_config()))
    return path


def loader(folder: Path, engine: str = "torch") -> Callable[[Path | None], LLM]:
    return lambda named: pronk.load(folder, engine=engine, adapter=named, **FLOATS[engine])  # type: ignore[arg-type]


def wrong(found: dict[str, Any]) -> set[str]:
    return {row["path"] for row in found["paths"] if row["verdict"] == "bug"}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_what_is_trained_answers(folder: Path, engine: str) -> None:
    done: list[tuple[int, int]] = []
    found = verify_training(loader(folder, engine), progress=lambda _, at, of: done.append((at, of)))
    assert found["verdict"] in ("identical", "rounding"), found
    assert not wrong(found)
    verdicts = {row["path"]: row["verdict"] for row in found["paths"]}
    assert verdicts["LoRA switched off"] == verdicts["gradients, recomputed"] == "identical"
    assert len(verdicts) == 12
    assert abs(found["loss"]["trained"] - found["loss"]["answered"]) < 1e-5
    assert (found["engine"], found["adapter"]) == (engine, None)
    assert done == [(at, len(done)) for at in range(1, len(done) + 1)]


@pytest.mark.parametrize("name", ["tied", "biases", "odd", "llama3", "dynamic"])
def test_other_shapes(tmp_path: Path, name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    save_huggingface(tmp_path / "m", config, random_weights(config))
    assert not wrong(verify_training(loader(tmp_path / "m")))


def test_an_adapter_of_one_s_own(folder: Path, tmp_path: Path) -> None:
    """Its dropout is no part of what it answers."""
    model, config = load_module(checkpoint.open(folder)), LoraConfig(3, 6, 0.5, ("q_proj", "down_proj"))
    lora.add(model, config)
    with torch.no_grad():
        for _, layer in lora.layers(model):
            layer.lora_B.normal_(generator=torch.Generator().manual_seed(2), std=0.3)
    adapter.save(model, config, "", tmp_path)
    found = verify_training(loader(folder), tmp_path)
    assert found["adapter"] == str(tmp_path)
    assert not wrong(found)


# -- Planted bugs --


def another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training alone; an adapter that is served knows no layer."""
    monkeypatch.setattr(lora.LoraLinear, "scale", property(lambda self: 0.99, lambda self, value: None), raising=False)


def packed_texts_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    of = TorchBatch.of

    def leaky(batch: Batch, *more: Any) -> TorchBatch:
        made = of(batch, *more)
        return replace(made, runs=(Rows(0, len(made.token_ids), 0, None),)) if made.slots is None else made

    monkeypatch.setattr(TorchBatch, "of", leaky)


def not_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that remembers having been asked."""

    def recompute(model: Any, every: int) -> None:
        block, asked = model.model.layers[0], [0]
        inner = block.forward

        def forward(*arguments: Any) -> Any:
            asked[0] += 1
            return inner(*arguments) * (1 + 1e-3 * asked[0])

        block.forward = forward

    monkeypatch.setattr(passes, "recompute", recompute)


def another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = objective.cross_entropy
    monkeypatch.setattr(objective, "cross_entropy", lambda *arguments: whole(*arguments) * 0.999)


@pytest.mark.parametrize(
    ("plant", "paths"),
    [
        (another_scale, {"adapter answered, cache-free", "adapter answered, cached", "adapter answered, chunked"}),
        (packed_texts_see_each_other, {"trained, packed", "LoRA, packed"}),
        (values_scaled, {f"{which}answered, {how}" for which in ("", "adapter ") for how in ("cached", "chunked")}),
        (not_the_same_again, {"LoRA, recomputed", "gradients, recomputed"}),
        (another_loss, {"loss"}),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], paths: set[str]
) -> None:
    plant(monkeypatch)
    found = verify_training(loader(folder))
    assert found["verdict"] == "bug"
    assert wrong(found) == paths
