"""One model in every format that people have it in gives one set of logits, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracle
import pytest
from formats import save_huggingface, save_meta
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk.checkpoint.writers import write
from pronk.config import ModelConfig, RopeScaling

# llama2.c has room for one base, one epsilon and no scaling; this model can be said in every format.
PLAIN = tiny_config()
# Llama 3.1's scaling, which Meta states as a switch, Hugging Face as numbers and GGUF as a tensor.
SCALED = tiny_config(
    rope_theta=500000.0,
    max_position_embeddings=131072,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
)

Writer = Callable[[Path, ModelConfig, dict[str, NDArray]], Path]


def ours(to: str, name: str, **options) -> Writer:
    def save(folder: Path, config: ModelConfig, weights: dict[str, NDArray]) -> Path:
        folder.mkdir()
        return write.save(in_memory(config, weights), folder / name, to=to, dtype="f32", **options)

    return save


def meta(shards: int, split: str) -> Writer:
    return lambda folder, config, weights: save_meta(folder, config, weights, shards, split)


WRITERS: dict[str, Writer] = {
    "huggingface": save_huggingface,
    "huggingface, 3 shards": lambda folder, *model: save_huggingface(folder, *model, shards=3),
    "huggingface, pytorch_model.bin": lambda folder, *model: save_huggingface(folder, *model, container="bin"),
    "meta, 1 shard": meta(1, "rows"),
    "meta, 2 shards, Llama 2": meta(2, "columns"),
    "meta, 2 shards, Llama 3": meta(2, "rows"),
    "meta, 4 shards, Llama 2": meta(4, "columns"),
    "meta, 4 shards, Llama 3": meta(4, "rows"),
    "our safetensors": ours("safetensors", "out"),
    "our gguf": ours("gguf", "out.gguf"),
    "our llama2.c v0": ours("llama2c", "out.bin", version=0),
    "our llama2.c v1": ours("llama2c", "out.bin", version=1),
}
IDS = np.random.default_rng(5).integers(0, PLAIN.vocab_size, 60).tolist()


def logits(path: Path) -> NDArray[np.float32]:
    """Of both engines, [2, T, V]."""
    torch, cpu = pronk.load(path, engine="torch", device="cpu"), pronk.load(path, engine="cpu")
    return np.stack([torch.logits(IDS), cpu.logits(IDS)])


@pytest.mark.parametrize("name", WRITERS)
def test_logits_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    weights = random_weights(PLAIN)
    reference = logits(save_huggingface(tmp_path / "reference", PLAIN, weights))
    found = logits(WRITERS[name](tmp_path / "model", PLAIN, weights))
    assert np.array_equal(found, reference)
    assert np.abs(found - oracle.logits(PLAIN, weights, IDS)).max() < 1e-4


@pytest.mark.parametrize("name", [n for n in WRITERS if "llama2.c" not in n])
def test_llama_3_scaling_means_the_same_everywhere(name: str, tmp_path: Path) -> None:
    weights = random_weights(SCALED)
    reference = logits(save_huggingface(tmp_path / "reference", SCALED, weights))
    found = logits(WRITERS[name](tmp_path / "model", SCALED, weights))
    assert np.array_equal(found, reference)
    assert np.abs(found - oracle.logits(SCALED, weights, IDS)).max() < 1e-4


def test_equal_to_the_bit_can_fail(tmp_path: Path) -> None:
    """Joined along the other axis, a square matrix would still have the right shape."""
    weights = random_weights(PLAIN)
    right = logits(save_huggingface(tmp_path / "a", PLAIN, weights))
    name = "model.layers.0.self_attn.o_proj.weight"
    columns = np.split(weights[name], 2, axis=1)
    rejoined = np.concatenate([np.concatenate(np.split(c, 2, axis=0), axis=1) for c in columns], axis=0)
    assert rejoined.shape == weights[name].shape
    wrong = logits(save_huggingface(tmp_path / "b", PLAIN, weights | {name: rejoined}))
    assert not np.array_equal(wrong, right)
