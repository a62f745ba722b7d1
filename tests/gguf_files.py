"""GGUF files written by other hands: whole models with the `gguf` package, and raw ones byte by byte, for breaking."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from formats import interleave
from numpy.typing import NDArray
from tiny import random_weights, tiny_config

from pronk.config import ModelConfig

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(name: str, array: NDArray[Any], config: ModelConfig) -> NDArray[Any]:
    if ".q_proj." in name:
        return interleave(array, config.num_attention_heads)
    return interleave(array, config.num_key_value_heads) if ".k_proj." in name else array


def save_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, NDArray[Any]],
    *,
    dtype: Callable[[str, NDArray[Any]], str] = lambda name, array: "F32",
    big_endian: bool = False,
    tensors_a_part: int = 0,
    rope_factors: NDArray[np.float32] | None = None,
    edit: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Written by the `gguf` package. `dtype` names a tensor's type: F32, F16, or a block type that it can quantize to;
    `edit` may add metadata. With `tensors_a_part`, `path` becomes the stem of several files."""
    endian = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, "llama", endianess=endian, split_max_tensors=tensors_a_part)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    edit(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, array in weights.items():
        kind = gguf.GGMLQuantizationType[dtype(name, array)]
        data = np.ascontiguousarray(gguf.quants.quantize(interleaved(name, array, config), kind))
        if big_endian and data.dtype == np.uint8:
            # The package would turn these bytes round one by one, which is to say not at all; ggml turns the scales.
            blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
            assert kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
            blocks[:, :2] = blocks[:, 1::-1].copy()
        raw = kind if data.dtype == np.uint8 else None
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, tokens: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_chat_template("{{ messages }}")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def f32(key: str, value: float) -> bytes:
    return pair(key, 6, struct.pack("<f", value))


def described(
    name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    """A tensor's description; `shape` is in numpy's order."""
    out = text(name) + struct.pack("<I", len(shape) if axes is None else axes)
    return out + struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset)


def raw_gguf(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    pair_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count, len(pairs) if pair_count is None else pair_count)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def array_of(kind: int, code: str, *values: float) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + struct.pack(f"<{len(values)}{code}", *values)


def model_pairs(**changes: bytes) -> list[bytes]:
    """Metadata of `tiny_config()`, byte by byte; `changes` replace pairs by the key without its "llama."."""
    pairs = {
        "architecture": pair("general.architecture", 8, text("llama")),
        "vocab_size": u32("llama.vocab_size", 96),
        "context_length": u32("llama.context_length", 128),
        "embedding_length": u32("llama.embedding_length", 64),
        "block_count": u32("llama.block_count", 2),
        "feed_forward_length": u32("llama.feed_forward_length", 96),
        "attention.head_count": u32("llama.attention.head_count", 8),
        "attention.head_count_kv": u32("llama.attention.head_count_kv", 4),
        "eps": f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "bos": u32("tokenizer.ggml.bos_token_id", 1),
        "eos": u32("tokenizer.ggml.eos_token_id", 2),
    }
    return list((pairs | changes).values())


def model_bytes(pairs: list[bytes], alignment: int = 32, gap: int = 0) -> bytes:
    """A whole file around `tiny_config()`'s tensors; every one begins `gap` bytes later than it might."""
    tensors, data = [], b""
    config = tiny_config()
    for name, values in random_weights(config).items():
        data += b"\0" * (gap + -(len(data) + gap) % alignment)
        tensors.append(described(gguf_name(name), values.shape, 0, len(data)))
        data += interleaved(name, values, config).tobytes()
    return raw_gguf(pairs, tensors, data, alignment=alignment)
