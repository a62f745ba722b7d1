"""A GGUF file, version 3, little-endian, each tensor in a type of its own, with the vocabulary where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_file import BOOL, DEFAULT_ALIGNMENT, FLOAT32, INT32, STRING, UINT32
from pronk.checkpoint.readers.gguf import ROPE_FREQS
from pronk.checkpoint.readers.names import hf_to_gguf
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.checkpoint.writers.gguf_header import Pair, header, printable
from pronk.checkpoint.writers.gguf_types import stored
from pronk.checkpoint.writers.numbers import require_finite, write_array, write_numbers
from pronk.config import ModelConfig
from pronk.config.rope import frequency_factors, inverse_frequencies
from pronk.errors import BadRequest, Unsupported
from pronk.formats import FORMATS, GROUP
from pronk.system import processors
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

BASE = "general.base_model.0.name"  # as the format has it
_END_TOKENS = ("eos", "eot", "eom")

Tensors = dict[str, tuple[str, tuple[int, ...], str]]  # by GGUF's name: the model's, shape and format


def check(config: ModelConfig, vocabulary: Vocabulary | None) -> None:
    """Raises Unsupported, by name, for what GGUF has no place for; BadRequest for a vocabulary that is too large."""
    if config.num_labels:
        raise Unsupported("GGUF has no place for a reward model's score; write safetensors")
    if config.rope_scaling and config.rope_scaling.rope_type == "dynamic":
        raise Unsupported("GGUF has no place for rope_scaling (dynamic); write safetensors")
    if len(config.eos_token_ids) > len(_END_TOKENS):
        raise Unsupported(f"GGUF holds {len(_END_TOKENS)} end tokens, and this model has {len(config.eos_token_ids)}")
    if vocabulary and len(vocabulary.tokens) > config.vocab_size:
        raise BadRequest(f"the vocabulary has {len(vocabulary.tokens)} tokens, the model only {config.vocab_size}")
    for name, token in _special_tokens(config, vocabulary).items():
        if not 0 <= token < config.vocab_size:
            raise Unsupported(
                f"the {name} token is {token}, which a vocabulary of {config.vocab_size} does not have; GGUF's readers "
                "refuse that: correct it in the source's config, or write safetensors"
            )


def write(
    file: BinaryIO,
    stream: TensorStream,
    formats: Mapping[str, str],
    file_type: int,
    vocabulary: Vocabulary | None,
    name: str,
    base: str | None = None,
) -> None:
    """`formats` and `file_type` are gguf_types'; `base`: what it was made of, if the file is to say so."""
    config = stream.config
    tensors, factors = _tensors(config, formats)
    head, _ = _header(config, tensors, file_type, vocabulary, name, base)
    file.write(head)
    for hf_name, _, format in tensors.values():
        file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))
        if hf_name:
            _write_tensor(file, stream, hf_name, format)
        elif factors is not None:
            write_array(file, factors)
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def size(config: ModelConfig, formats: Mapping[str, str], vocabulary: Vocabulary | None, name: str) -> int:
    """Bytes of the file that `write` would write of the same."""
    head, data = _header(config, _tensors(config, formats)[0], 0, vocabulary, name)
    return -(-len(head) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT + data


def _tensors(config: ModelConfig, formats: Mapping[str, str]) -> tuple[Tensors, NDArray[np.float32] | None]:
    """All that a file holds, in its order; the factors are not the model's, and have no name there."""
    tensors = {hf_to_gguf(hf): (hf, shape, formats[hf]) for hf, shape in config.tensor_shapes().items()}
    factors = _rope_factors(config)
    if factors is not None:
        tensors[ROPE_FREQS] = ("", factors.shape, "f32")
    return tensors, factors


def _header(
    config: ModelConfig,
    tensors: Tensors,
    file_type: int,
    vocabulary: Vocabulary | None,
    name: str,
    base: str | None = None,
) -> tuple[bytes, int]:
    """All before the data, and how many bytes these take."""
    made_of: list[Pair] = [("general.base_model.count", UINT32, 1), (BASE, STRING, printable(base))] if base else []
    pairs = [
        *_model_pairs(config, file_type, name),
        *made_of,
        *_token_pairs(config, vocabulary),
        *_vocabulary_pairs(vocabulary, config),
    ]
    return header(pairs, {name: (shape, stored(format)) for name, (_, shape, format) in tensors.items()})


def _write_tensor(file: BinaryIO, stream: TensorStream, name: str, format: str) -> None:
    kind = stored(format)
    rows = stream.rows(name, () if format in FORMATS else (format,), interleaved=True)
    if kind in PLAIN_DTYPES:
        for piece in rows:
            write_numbers(file, name, piece, kind)
    elif format not in FORMATS:
        for piece in rows:
            write_array(file, piece)
    else:

        def encode(piece: NDArray[Any]) -> NDArray[np.uint8]:
            require_finite(name, piece, format)
            try:
                return gguf_blocks.encode(piece.astype(np.float32, copy=False).reshape(-1, GROUP), format)
            except BadRequest as error:
                raise Unsupported(f"tensor {name!r}: {error}; use bf16 or f32") from None

        # numpy works without Python's lock: pieces side by side use all processors.
        with ThreadPoolExecutor(processors()) as pool:
            for blocks in pool.map(encode, rows):
                write_array(file, blocks)


def _rope_factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """What `rope_freqs.weight` holds, [D / 2]; linear scaling is metadata instead."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "linear":
        return None
    return frequency_factors(scaling, inverse_frequencies(replace(config, rope_scaling=None)))


def _model_pairs(config: ModelConfig, file_type: int, name: str) -> list[Pair]:
    pairs: list[Pair] = [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "model"),
        ("general.name", STRING, printable(name)),
        ("general.file_type", UINT32, file_type),
        ("general.quantization_version", UINT32, 2),
        ("llama.vocab_size", UINT32, config.vocab_size),
        ("llama.context_length", UINT32, config.max_position_embeddings),
        ("llama.embedding_length", UINT32, config.hidden_size),
        ("llama.block_count", UINT32, config.num_hidden_layers),
        ("llama.feed_forward_length", UINT32, config.intermediate_size),
        ("llama.attention.head_count", UINT32, config.num_attention_heads),
        ("llama.attention.head_count_kv", UINT32, config.num_key_value_heads),
        ("llama.attention.key_length", UINT32, config.head_dim),
        ("llama.attention.value_length", UINT32, config.head_dim),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, config.rms_norm_eps),
        ("llama.rope.dimension_count", UINT32, config.head_dim),
        ("llama.rope.freq_base", FLOAT32, config.rope_theta),
    ]
    if config.rope_scaling and config.rope_scaling.rope_type == "linear":
        pairs.append(("llama.rope.scaling.type", STRING, "linear"))
        pairs.append(("llama.rope.scaling.factor", FLOAT32, config.rope_scaling.factor))
    return pairs


def _token_pairs(config: ModelConfig, vocabulary: Vocabulary | None) -> list[Pair]:
    tokens = _special_tokens(config, vocabulary)
    return [(f"tokenizer.ggml.{name}_token_id", UINT32, token) for name, token in tokens.items()]


def _special_tokens(config: ModelConfig, vocabulary: Vocabulary | None) -> dict[str, int]:
    """The config's, by GGUF's names; where it has none, the vocabulary's."""
    tokens = {"bos": config.bos_token_id, "padding": config.pad_token_id}
    tokens |= dict(zip(_END_TOKENS, config.eos_token_ids, strict=False))
    if vocabulary:
        others = {
            "bos": vocabulary.bos_id,
            "eos": vocabulary.eos_id,
            "padding": vocabulary.pad_id,
            "unknown": vocabulary.unk_id,
        }
        tokens = others | {name: token for name, token in tokens.items() if token is not None}
    return {name: token for name, token in tokens.items() if token is not None}


def _vocabulary_pairs(vocabulary: Vocabulary | None, config: ModelConfig) -> list[Pair]:
    """Rows of the embedding that no token has get one of a name of its own, as llama.cpp gives them."""
    if vocabulary is None:
        return []
    spare = range(len(vocabulary.tokens), config.vocab_size)
    tokens = [*vocabulary.tokens, *(f"[PAD{token}]" for token in spare)]
    types = [*vocabulary.types, *(TokenType.UNUSED for _ in spare)]
    pairs: list[Pair] = [
        ("tokenizer.ggml.model", STRING, "llama" if vocabulary.model == "spm" else "gpt2"),
        ("tokenizer.ggml.pre", STRING, vocabulary.pre),
        ("tokenizer.ggml.tokens", STRING, tokens),
        ("tokenizer.ggml.token_type", INT32, [int(kind) for kind in types]),
        ("tokenizer.ggml.add_bos_token", BOOL, vocabulary.add_bos),
        ("tokenizer.ggml.add_space_prefix", BOOL, vocabulary.add_space_prefix),
    ]
    if vocabulary.model == "spm":
        scores = [*vocabulary.scores, *(0.0 for _ in spare)]
        pairs.append(("tokenizer.ggml.scores", FLOAT32, scores))
    else:
        pairs.append(("tokenizer.ggml.merges", STRING, list(vocabulary.merges)))
    if vocabulary.chat_template is not None:
        pairs.append(("tokenizer.chat_template", STRING, vocabulary.chat_template))
    return pairs
