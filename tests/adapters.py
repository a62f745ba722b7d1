"""Random LoRA adapters, in memory and as folders that PEFT reads, and what they make of a model in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from pronk.checkpoint import adapter
from pronk.checkpoint.adapter import TARGETS, Adapter, LowRank
from pronk.config import ModelConfig


def random_adapter(
    config: ModelConfig,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = TARGETS,
    size: float = 0.3,
    scale: float = 2.0,
    uneven: bool = True,
) -> Adapter:
    """A begins as LoRA's does, and B is of `size`. `uneven`: the ranks are `rank` and `rank` + 1 in turn."""
    draw, products = np.random.default_rng(seed), {}
    for number, (name, shape) in enumerate(config.tensor_shapes().items()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in targets:
            r = rank + number % 2 * uneven
            a = draw.uniform(-1, 1, (r, shape[1])) * (3 / shape[1]) ** 0.5
            products[module] = LowRank(
                a.astype(np.float32), draw.normal(0, size, (shape[0], r)).astype(np.float32), scale
            )
    return Adapter(Path("adapter"), products, {}, sum(2 * (p.a.size + p.b.size) for p in products.values()))


def save(folder: Path, given: Adapter) -> Path:
    """As PEFT saves it; every module of the same rank."""
    (rank,) = {len(product.a) for product in given.products.values()}
    (scale,) = {product.scale for product in given.products.values()}
    weights = {}
    for module, product in given.products.items():
        weights[adapter.key(module, "lora_A")], weights[adapter.key(module, "lora_B")] = product.a, product.b
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, folder / adapter.WEIGHTS)
    targets = sorted({module.rpartition(".")[2] for module in given.products})
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": targets,
    }
    (folder / adapter.CONFIG).write_text(json.dumps(told))
    return folder
