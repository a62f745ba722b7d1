"""An adapter added to the weights as they stream in is the adapter as layers of their own, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny import CONFIGS, in_memory, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter
from pronk.errors import BadFile, BadRequest, ModelNotFound

IDS = [1, 50, 60, 70, 80, 90, 30, 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


def save(folder: Path, config: Any, targets: tuple[str, ...] = ("q_proj", "down_proj"), rank: int = 3) -> Path:
    """A random adapter for a model of this config."""
    draw = np.random.default_rng(4)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in targets:
            weights[adapter.key(module, "lora_A")] = draw.normal(0, 0.1, (rank, shape[1])).astype(np.float32)
            weights[adapter.key(module, "lora_B")] = draw.normal(0, 0.1, (shape[0], rank)).astype(np.float32)
    folder.mkdir()
    safetensors.numpy.save_file(weights, folder / adapter.WEIGHTS)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(targets)}
    (folder / adapter.CONFIG).write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd"])
def test_weights_and_the_adapter_s_product(tmp_path: Path, name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    folder = save(tmp_path / "adapter", config)
    parts = safetensors.numpy.load_file(folder / adapter.WEIGHTS)
    base = in_memory(config, weights)
    found = adapter.applied(base, adapter.open(folder, base)).tensors
    assert found.keys() == weights.keys()
    for tensor, weight in weights.items():
        module = tensor.removesuffix(".weight")
        expected = weight.astype(np.float64)
        if (a := parts.get(adapter.key(module, "lora_A"))) is not None:
            expected = expected + 2 * parts[adapter.key(module, "lora_B")].astype(np.float64) @ a
            assert tensor.split(".")[-2] in ("q_proj", "down_proj")
        np.testing.assert_allclose(found[tensor].read(), expected, rtol=1e-6, atol=1e-7)
        assert found[tensor].nbytes == found[tensor].read().nbytes


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_loaded_with_its_adapter(model: Path, tmp_path: Path, engine: Any) -> None:
    torch = pytest.importorskip("torch")
    from pronk.engine.batch import Batch, Run
    from pronk.torch_engine.backend import load_module
    from pronk.torch_engine.batch import TorchBatch
    from pronk.train import adapter as layers

    opened = checkpoint.open(model)
    folder = save(tmp_path / "adapter", opened.config)
    module = load_module(opened).eval()
    layers.load(module, folder)
    with torch.no_grad():
        batch = TorchBatch.of(Batch.of([Run(IDS, logits="all")]), torch.device("cpu"), None)
        expected = module(batch).numpy()
    np.testing.assert_allclose(
        pronk.load(model, adapter=folder, engine=engine).logits(IDS), expected, rtol=1e-4, atol=1e-5
    )
    assert not np.allclose(pronk.load(model, engine=engine).logits(IDS), expected, atol=0.05)


def test_an_adapter_over_quantized_weights(model: Path, tmp_path: Path) -> None:
    """What `quantize` asks for is made of the sum."""
    folder = save(tmp_path / "adapter", checkpoint.open(model).config)
    exact = pronk.load(model, adapter=folder, engine="cpu").logits(IDS)
    coarse = pronk.load(model, adapter=folder, engine="cpu", quantize="q8").logits(IDS)
    assert 0 < np.abs(coarse - exact).max() < 0.2


def test_another_model_s_adapter(model: Path, tmp_path: Path) -> None:
    """Wider, deeper, shallower: each is seen before weights are read."""
    cases = {
        "wide": ({"hidden_size": 32}, "another model's adapter"),
        "deep": ({"num_hidden_layers": 3}, "belongs to no module of this model"),
        "flat": ({"num_hidden_layers": 1}, "it is no adapter of this model"),
    }
    for name, (change, message) in cases.items():
        folder = save(tmp_path / name, tiny_config(vocab_size=259, **change))
        with pytest.raises(BadFile, match=message):
            pronk.load(model, adapter=folder)


def test_names_that_lead_nowhere(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no adapter in this folder"):
        pronk.load(model, adapter=tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder; an adapter is the folder"):
        pronk.load(model, adapter=tmp_path / "mistyped")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="is a file; an adapter is the folder"):
        pronk.load(model, adapter=tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadRequest, match="adapter is empty"):
        pronk.load(model, adapter="")
