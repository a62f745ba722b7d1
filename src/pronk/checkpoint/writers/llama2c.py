"""llama2.c's .bin files, versions 0, 1 and 2, and its tokenizer.bin."""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy as np

from pronk.checkpoint.readers.llama2c import (
    BEGIN_TOKEN,
    END_TOKENS,
    HEADER_BYTES,
    MAGIC,
    RMS_NORM_EPS,
    ROPE_THETA,
    Header,
    slots,
)
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.writers.numbers import require_finite, write_array, write_numbers
from pronk.config import ModelConfig
from pronk.config.rope import cos_sin, inverse_frequencies
from pronk.errors import Unsupported, short
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

_POSITIONS = 1024  # rows of the tables of angles that are made at once


def check(config: ModelConfig, version: int, group_size: int) -> None:
    """Raises Unsupported, by name, for what this format has no place for."""
    problem = None
    if config.rope_scaling is not None:
        problem = f"rope_scaling ({config.rope_scaling.rope_type})"
    elif config.rope_theta != ROPE_THETA:
        problem = f"rope_theta {config.rope_theta:g} (it is always {ROPE_THETA:g})"
    elif config.rms_norm_eps != RMS_NORM_EPS:
        problem = f"rms_norm_eps {config.rms_norm_eps:g} (it is always {RMS_NORM_EPS:g})"
    elif config.num_labels:
        problem = "a reward model's score"
    elif config.attention_bias or config.mlp_bias:
        problem = "biases"
    elif others := sorted(set(config.eos_token_ids) - set(END_TOKENS)):
        problem = f"eos_token_ids {short(others)} (its programs stop at {END_TOKENS[0]} and {END_TOKENS[1]} alone)"
    elif config.bos_token_id not in (None, BEGIN_TOKEN):
        problem = f"bos_token_id {config.bos_token_id} (it is always {BEGIN_TOKEN})"
    elif config.head_dim * config.num_attention_heads != config.hidden_size:
        problem = f"head_dim {config.head_dim} other than hidden_size / num_attention_heads"
    if problem:
        raise Unsupported(f"llama2.c's format has no place for {problem}; write safetensors or gguf")
    # Its program quantizes activations by the row, and would leave out what is left of one after the last whole group.
    rows = np.gcd(config.hidden_size, config.intermediate_size)
    if version == 2 and (group_size < 1 or rows % group_size):
        raise Unsupported(
            f"groups of {group_size} do not divide both the hidden size, {config.hidden_size}, and the intermediate "
            f"size, {config.intermediate_size}; groups of {rows} do, and of its divisors"
        )


def write(file: BinaryIO, stream: TensorStream, version: int, group_size: int) -> None:
    """float32 in versions 0 and 1, int8 groups in version 2; `check` has passed."""
    config = stream.config
    vocab_size = config.vocab_size
    if version == 0 and not config.tie_word_embeddings:
        vocab_size = -vocab_size
    header = struct.pack(
        "<7i",
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        vocab_size,
        config.max_position_embeddings,
    )
    if version > 0:
        header = struct.pack("<Ii", MAGIC, version) + header + struct.pack("<B", config.tie_word_embeddings)
    if version == 2:
        header += struct.pack("<i", group_size)
    file.write(header.ljust(HEADER_BYTES[version], b"\0"))
    for slot in slots(Header(version, config, group_size))[0]:
        if slot.name is None:
            _write_angles(file, config)
            continue
        scales = []
        for piece in stream.rows(slot.name, interleaved=True):
            if not slot.quantized:
                write_numbers(file, slot.name, piece, "F32")
                continue
            require_finite(slot.name, piece, "int8")
            groups = piece.astype(np.float32, copy=False).reshape(-1, group_size)
            scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
            quants = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
            write_array(file, np.rint(quants).astype(np.int8))
            scales.append(scale)
        if scales:
            write_array(file, np.concatenate(scales))


def _write_angles(file: BinaryIO, config: ModelConfig) -> None:
    """Two tables, [positions, D / 2] each: cosines, then sines. Later readers skip them; the first did not."""
    frequencies, positions = inverse_frequencies(config), config.max_position_embeddings
    for which in (0, 1):
        for start in range(0, positions, _POSITIONS):
            write_array(file, cos_sin(frequencies, start, min(start + _POSITIONS, positions))[which])


def tokenizer_problem(vocabulary: Vocabulary, vocab_size: int) -> str | None:
    """Why this vocabulary cannot be a tokenizer.bin; None where it can."""
    if vocabulary.model != "spm":
        return "a byte-level BPE vocabulary has no place in llama2.c's tokenizer.bin"
    if len(vocabulary.tokens) != vocab_size:
        return f"the vocabulary has {len(vocabulary.tokens)} tokens and the model {vocab_size}"
    laid_out = vocabulary.types[1:259] == (TokenType.CONTROL,) * 2 + (TokenType.BYTE,) * 256
    if vocabulary.bos_id != BEGIN_TOKEN or vocabulary.eos_id not in END_TOKENS or not laid_out:
        return "llama2.c's tokenizer.bin needs <s> as token 1, </s> as token 2 and the 256 bytes from token 3 on"
    return None


def tokenizer(vocabulary: Vocabulary) -> bytes:
    """The content of a tokenizer.bin; `tokenizer_problem` is None."""
    texts = [token.replace("\u2581", " ").encode() for token in vocabulary.tokens]
    texts[1], texts[2] = b"\n<s>\n", b"\n</s>\n"
    records = (struct.pack("<fi", s, len(t)) + t for s, t in zip(vocabulary.scores, texts, strict=True))
    return struct.pack("<i", max(map(len, texts))) + b"".join(records)
