"""The object of tokenizer_config.json, read with suspicion: what stands beside a vocabulary in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, Unsupported, short


def spelling(path: Path, settings: Mapping[str, Any], key: str) -> str | None:
    """How the special token `key` ("bos_token", ...) is spelled: a string, or an object with its `content`."""
    value = settings.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BadFile(path, f"{str(value)[:60]!r} is no token", field=f"tokenizer_config {key}")
    return value


def token_id(path: Path, settings: Mapping[str, Any], key: str, find: Callable[[str], int | None]) -> int | None:
    """The id of the special token `key`, None where the settings name none. Raises BadFile for an unknown one."""
    text = spelling(path, settings, key)
    if not text:
        return None
    found = find(text)
    # Padding never stands in a prompt, and many files name a token for it that was to be added when training began.
    if found is None and key != "pad_token":
        raise BadFile(path, f"{short(text)} is not in the vocabulary", field=f"tokenizer_config {key}")
    return found


def flag(path: Path, settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadFile(path, f"must be true or false, not {str(value)[:60]!r}", field=f"tokenizer_config {key}")
    return default if value is None else value


def added_tokens(path: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """`added_tokens_decoder`: id -> (spelling, whether it is special)."""
    raw = settings.get("added_tokens_decoder") or {}
    field = "tokenizer_config added_tokens_decoder"
    if not isinstance(raw, Mapping):
        raise BadFile(path, "must be an object", field=field)
    found = {}
    for key, token in raw.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if (
            not (isinstance(key, str) and key.isdecimal() and len(key) < 9)
            or not content
            or not isinstance(content, str)
        ):
            raise BadFile(path, f"{str(key)[:40]!r} is not a token's id and content", field=field)
        found[int(key)] = content, bool(token.get("special"))
    return found


def refuse_end_of_text(path: Path, settings: Mapping[str, Any]) -> None:
    """A tokenizer that ends every prompt leaves a model nothing to say; that it was meant is unlikely."""
    if flag(path, settings, "add_eos_token", False):
        raise Unsupported(f"{path}: add_eos_token would end every prompt before an answer; set it to false")
