"""The vocabulary inside a GGUF file, from its `tokenizer.*` metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import pre_tokenizers
from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.vocabulary import MAX_VOCABULARY, TokenizerSource, TokenType, Vocabulary, gguf_token_id

_MODELS = {"llama": "spm", "gpt2": "bpe"}
_TYPES = {int(t): t for t in TokenType}


def load(source: TokenizerSource) -> Tokenizer:
    """Raises BadFile or Unsupported."""
    vocabulary = parse(source.path, source.settings, source.chat_template)
    # One library or the other, each a while to import.
    if vocabulary.model == "spm":
        from pronk.tokenizer.spm import SpmTokenizer

        return SpmTokenizer("gguf", source.path, vocabulary)
    from pronk.tokenizer.hf import byte_level_bpe

    return byte_level_bpe("gguf", source.path, vocabulary)


def parse(path: Path, settings: Mapping[str, Any], chat_template: str | None = None) -> Vocabulary:
    name = settings.get("tokenizer.ggml.model")
    if name not in _MODELS:
        raise Unsupported(
            f"{path}: vocabularies of type {str(name)[:40]!r} are not supported; llama and gpt2 are. "
            "Give the model's tokenizer.json with --tokenizer"
        )
    is_spm = _MODELS[name] == "spm"
    tokens = _strings(path, settings, "tokens")
    types = settings.get("tokenizer.ggml.token_type")
    pre = settings.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise BadFile(path, "must be a string", field="tokenizer.ggml.pre")
    if _flag(path, settings, "add_eos_token", False):
        raise Unsupported(f"{path}: add_eos_token would end every prompt before an answer; it is not supported")
    return Vocabulary(
        model="spm" if is_spm else "bpe",
        tokens=tokens,
        types=_default_types(tokens, is_spm) if types is None else _types(path, types),
        scores=_scores(path, settings, len(tokens)) if is_spm else (),
        merges=() if is_spm else _strings(path, settings, "merges"),
        pre=pre,
        bos_id=_token(path, settings, "bos", 1 if is_spm else None),
        eos_id=_token(path, settings, "eos", 2 if is_spm else None),
        unk_id=_token(path, settings, "unknown", 0 if is_spm else None),
        pad_id=_token(path, settings, "padding", None),
        add_bos=_flag(path, settings, "add_bos_token", is_spm or pre_tokenizers.adds_bos(pre)),
        add_space_prefix=is_spm and _flag(path, settings, "add_space_prefix", True),
        chat_template=chat_template or _template(path, settings),
    )


def _default_types(tokens: tuple[str, ...], is_spm: bool) -> tuple[TokenType, ...]:
    if not is_spm:
        return (TokenType.NORMAL,) * len(tokens)
    from pronk.tokenizer.spm import guess_types

    return guess_types(tokens)


def _strings(path: Path, settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = settings.get(f"tokenizer.ggml.{name}")
    field = f"tokenizer.ggml.{name}"
    if not isinstance(values, list | tuple):
        raise BadFile(path, "required and absent", field=field)
    if len(values) > 2 * MAX_VOCABULARY or not set(map(type, values)) <= {str}:
        raise BadFile(path, "not a list of strings, or absurdly long", field=field)
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise BadFile(path, "not UTF-8", field=field) from None
    return tuple(values)


def _types(path: Path, values: Any) -> tuple[TokenType, ...]:
    try:
        # UNDEFINED (0) and whatever else a converter invented has no meaning of its own.
        return tuple([_TYPES.get(value, TokenType.NORMAL) for value in values])
    except TypeError:
        raise BadFile(path, "not a list of numbers", field="tokenizer.ggml.token_type") from None


def _scores(path: Path, settings: Mapping[str, Any], count: int) -> tuple[float, ...]:
    field = "tokenizer.ggml.scores"
    values = settings.get(field)
    if values is None:
        raise BadFile(path, "required and absent", field=field)
    try:
        scores = tuple(map(float, values))
    except (TypeError, ValueError, OverflowError):
        scores = ()
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise BadFile(path, f"not {count} finite numbers", field=field)
    return scores


def _token(path: Path, settings: Mapping[str, Any], name: str, default: int | None) -> int | None:
    try:
        return gguf_token_id(settings, name, default)
    except ValueError as error:
        raise BadFile(path, str(error), field=f"tokenizer.ggml.{name}_token_id") from None


def _flag(path: Path, settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise BadFile(path, "must be true or false", field=f"tokenizer.ggml.{name}")
    return value


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    value = settings.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise BadFile(path, "must be a string", field="tokenizer.chat_template")
    return value
