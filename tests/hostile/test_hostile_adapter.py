"""Adapters that lie: one error of pronk's own each, or a model that can be read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from mutations import survives
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint import adapter
from pronk.errors import BadFile, PronkError

CONFIG = tiny_config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4,
)  # fmt: skip
BASE = in_memory(CONFIG, random_weights(CONFIG))
MODULE = "model.layers.0.mlp.up_proj"
GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"], "bias": "none"}
EXAMPLES = 300


def save(folder: Path, size: float = 0.1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    parts = {"lora_A": (2, 8), "lora_B": (8, 2)}
    weights = {adapter.key(MODULE, part): np.full(shape, size, np.float32) for part, shape in parts.items()}
    safetensors.numpy.save_file(weights, folder / adapter.WEIGHTS)
    (folder / adapter.CONFIG).write_text(json.dumps(GOOD | changes))
    return folder


def outcome(folder: Path) -> str:
    try:
        for tensor in adapter.applied(BASE, adapter.open(folder, BASE)).tensors.values():
            assert tensor.read().shape == tensor.shape
    except PronkError as error:
        message = str(error).encode()
        assert b"\n" not in message
        assert len(message) < 900
        return type(error).__name__
    return "read"


@pytest.mark.parametrize("name", [adapter.CONFIG, adapter.WEIGHTS])
def test_broken_at_random(tmp_path: Path, name: str) -> None:
    file = save(tmp_path / "adapter") / name
    assert outcome(file.parent) == "read"
    outcomes: Counter = Counter()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        outcomes[outcome(file.parent)] += 1

    whole = file.read_bytes()
    assert survives(EXAMPLES, [(whole, len(whole))], check) >= EXAMPLES
    assert outcomes.total() - outcomes["read"] > EXAMPLES / 3, outcomes


KEYS = """lora_dropout use_rslora use_dora rank_pattern alpha_pattern layers_to_transform layers_pattern exclude_modules
modules_to_save ensure_weight_tying""".split()


@pytest.mark.parametrize("key", [*GOOD, *KEYS])
@pytest.mark.parametrize(
    "value",
    [0, -1, 1 << 64, 10**300, 1e308, True, None, "", "x", [], {}, [[]], [None], ["."], {"up_proj": None}, "(a+)+"],
)
def test_values_of_every_kind(tmp_path: Path, key: str, value: Any) -> None:
    outcome(save(tmp_path / "adapter", **{key: value}))


def test_numbers_whose_product_is_none(tmp_path: Path) -> None:
    """Finite, each of them; it is the adapter that is named, not the model."""
    for folder in (save(tmp_path / "a", size=1e30), save(tmp_path / "b", lora_alpha=1e308)):
        tensor = adapter.applied(BASE, adapter.open(folder, BASE)).tensors[f"{MODULE}.weight"]
        with pytest.raises(BadFile, match="its change': holds infinity or NaN") as caught:
            tensor.read()
        assert str(folder / adapter.WEIGHTS) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {".*.*.*x" + "y" * i: 2 for i in range(32)}},
        {"alpha_pattern": {"(up|u|p)_.*[a-z]*[a-z]" + "y" * i: 2 for i in range(32)}},
        {"alpha_pattern": {f"up_proj{i}": 2 for i in range(1024)}},
        {"alpha_pattern": {f"up_proj{i}": 2 for i in range(1025)}},
        {"rank_pattern": {"(.|.)" * 26 + "x": 2}},  # once 2^26 steps a module
        {"rank_pattern": {"(" + "|".join("abcdefghijklmnopqr") + ").*": 2}},
        {"target_modules": r"(.*)*up_proj"},
        {"exclude_modules": r"(.*.*)*z"},
        {"target_modules": [*(f"m{i}" for i in range(4000)), "up_proj"], "modules_to_save": ["z"] * 4096},
        {"target_modules": ["up_proj"], "modules_to_save": ["(.*)*z"]},
        {"layers_to_transform": [0, *range(10**5)], "layers_pattern": "(l*)*x"},
        {"layers_to_transform": [0, *range(10**5)]},
    ],
)
def test_names_and_expressions_cost_little(tmp_path: Path, changes: dict[str, Any]) -> None:
    """On a model of 90 layers; Python's own matcher would take years over some of these."""
    config = replace(CONFIG, num_hidden_layers=90)
    weights = {
        adapter.key(MODULE.replace("0", str(layer)), part): np.ones(shape, np.float32)
        for layer in range(90)
        for part, shape in {"lora_A": (2, 8), "lora_B": (8, 2)}.items()
    }
    folder = save(tmp_path / "adapter", **changes)
    safetensors.numpy.save_file(weights, folder / adapter.WEIGHTS)
    base = in_memory(config, random_weights(config))
    begun = process_time()
    try:
        adapter.open(folder, base)
    except PronkError:
        # One more than is allowed, of patterns, groups or alternatives.
        assert len(changes.get("alpha_pattern", {})) == 1025 or "(" in next(iter(changes.get("rank_pattern", [""])))
    assert process_time() - begun < 5


@pytest.mark.parametrize("name", ["lora_embedding_A", "base_layer.weight", "lora_B.bias", "weight", "bias", "lora_A"])
def test_tensors_of_no_kind(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "adapter")
    parts = safetensors.numpy.load_file(folder / adapter.WEIGHTS)
    for prefix in ("", "base_model.model."):
        more = {f"{prefix}{MODULE}.{name}": np.ones((8, 8), np.float32)}
        safetensors.numpy.save_file(parts | more, folder / adapter.WEIGHTS)
        assert outcome(folder) == "BadFile"
