"""Where a tokenizer comes from, and what is in it: plain data that checkpoints and tokenizers hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

# The largest published ones have some 262,000 tokens.
MAX_VOCABULARY = 300_000

TokenizerKind = Literal["tokenizer.json", "sentencepiece", "tiktoken", "llama2c", "gguf"]


@dataclass(frozen=True)
class TokenizerSource:
    """The tokenizer that belongs to a checkpoint, found but not yet loaded.

    `settings` holds what stands beside the vocabulary: the object of tokenizer_config.json for `tokenizer.json` and
    `sentencepiece`, the `tokenizer.*` metadata for `gguf` (with the vocabulary itself), nothing for the rest.
    """

    kind: TokenizerKind
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


def gguf_token_id(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """`tokenizer.ggml.<name>_token_id` of a GGUF file, None where it says that there is none. Raises ValueError."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    # -1, in two's complement where the field is unsigned, is how converters write "none".
    if value in (None, -1, 0xFFFFFFFF):
        return None
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is not a token id")
    return value


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`, which are also SentencePiece's piece types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The content of a tokenizer, enough to write it into another format.

    `tokens` are spelled as GGUF spells them: U+2581 for a space in `spm`, GPT-2's visible bytes in `bpe`.
    """

    model: Literal["spm", "bpe"]
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    scores: tuple[float, ...] = ()  # spm
    merges: tuple[str, ...] = ()  # bpe
    pre: str = "default"  # bpe: llama.cpp's name of the pre-tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None
