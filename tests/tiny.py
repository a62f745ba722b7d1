"""Tiny models with random weights: every shape a test needs, small enough to write out in any format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.config import ModelConfig, RopeScaling

DEFAULTS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}


# Changes to these that engines are held against their oracles with.
CONFIGS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 8},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd": {"hidden_size": 56, "intermediate_size": 33, "vocab_size": 51, "head_dim": 6},
    "linear": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 32), "rope_theta": 500.0},
    "factors": {"rope_scaling": RopeScaling("factors", factors=(1.0, 1.5, 2.0, 8.0))},
    "dynamic": {"rope_scaling": RopeScaling("dynamic", 4.0), "max_position_embeddings": 16},
}


def tiny_config(**changes: Any) -> ModelConfig:
    """GQA, untied, all sizes divisible by 32 and by 4 shards unless changed."""
    return ModelConfig(**{**DEFAULTS, **changes})


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights of a size that keeps activations near 1, so that mistakes show in the logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        scale = 0.1 if len(shape) == 1 else shape[1] ** -0.5
        values = rng.normal(0.0, scale, shape)
        if "norm" in name:
            values += 1.0
        weights[name] = values.astype(np.float32)
    return weights


_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


def in_memory(config: ModelConfig, weights: dict[str, NDArray[Any]], path: str = "memory") -> Checkpoint:
    """A Checkpoint of arrays, as a reader would give it."""
    tensors = {
        name: LazyTensor(name, array.shape, _NAMES[array.dtype], array.nbytes, lambda array=array: array)
        for name, array in weights.items()
    }
    return Checkpoint(Path(path), "memory", config, tensors)


def byte_tokenizer(path: Path) -> Path:
    """A llama2.c tokenizer.bin whose pieces are the 256 bytes: 259 ids, and every text has one."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    entries = b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)
    path.write_bytes(struct.pack("<i", max(map(len, pieces))) + entries)
    return path
