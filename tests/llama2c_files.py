"""llama2.c models written tensor by tensor, in the order in which its run.c and runq.c read them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from formats import interleave
from numpy.typing import NDArray

from pronk.config import ModelConfig


def save_llama2c(
    path: Path, config: ModelConfig, weights: Mapping[str, NDArray[Any]], version: int, group_size: int = 8
) -> Path:
    """Version 0, 1 or 2. Everything but norms is quantized in version 2."""
    fields = [config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads]
    fields += [config.num_key_value_heads, config.vocab_size, config.max_position_embeddings]
    tied = config.tie_word_embeddings
    if version == 0:
        fields[5] *= 1 if tied else -1
        header = struct.pack("<7i", *fields)
    else:
        header = struct.pack("<Ii7iB", 0x616B3432, version, *fields, tied)
        header = (header + (struct.pack("<i", group_size) if version == 2 else b"")).ljust(256, b"\0")

    def numbers(name: str) -> NDArray[np.float32]:
        array = weights[name]
        if "q_proj" in name:
            array = interleave(array, config.num_attention_heads)
        if "k_proj" in name:
            array = interleave(array, config.num_key_value_heads)
        return array.astype("<f4")

    def stored(name: str) -> bytes:
        array = numbers(name)
        if version < 2 or array.ndim == 1:
            return array.tobytes()
        quants, scales = quantize(array, group_size)
        return quants.tobytes() + scales.tobytes()

    def layers(part: str) -> bytes:
        return b"".join(stored(f"model.layers.{i}.{part}.weight") for i in range(config.num_hidden_layers))

    attention = b"".join(layers(f"self_attn.{part}_proj") for part in "qkvo")
    mlp = b"".join(layers(f"mlp.{part}_proj") for part in ("gate", "down", "up"))
    norms = layers("input_layernorm"), layers("post_attention_layernorm"), stored("model.norm.weight")
    embedding = stored("model.embed_tokens.weight")
    head = b"" if tied else stored("lm_head.weight")
    if version == 0:
        tables = b"\xff" * (config.max_position_embeddings * config.head_dim * 4)  # NaN: no reader may use them
        body = embedding + norms[0] + attention + norms[1] + mlp + norms[2] + tables + head
    else:
        body = b"".join(norms) + embedding + attention + mlp + head
    path.write_bytes(header + body)
    return path


def quantize(array: NDArray[np.float32], group_size: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """As llama2.c's export does: absmax / 127 a group of the flattened tensor, rounded half to even."""
    groups = array.reshape(-1, group_size)
    scales = np.abs(groups).max(axis=1) / np.float32(127)
    return np.round(groups / scales[:, None]).astype(np.int8), scales
