"""The JSON of a tokenizer.json from anyone: its parts are counted before it is parsed, so that parsing stays cheap."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.errors import BadFile, short
from pronk.tokenizer.vocabulary import MAX_VOCABULARY

# Llama 3's takes 17 MB: 128,000 tokens, and 280,000 merges that are lists of two.
MAX_BYTES = 20 << 20
_MOST_OF = {b"{": 50_000, b"[": 400_000, b":": 400_000, b",": 1_000_000}
# A single character beyond U+FFFF makes Python keep four bytes for every other one.
_MAX_TEXT_BYTES = 48 << 20


def parse(path: Path, data: bytes) -> dict[str, Any]:
    """The object in `data`. Raises BadFile."""
    if data.startswith(codecs.BOM_UTF8):
        raise BadFile(path, "begins with a byte order mark; save it as UTF-8 without one", offset=0)
    for sign, most in _MOST_OF.items():
        if (count := data.count(sign)) > most:
            raise BadFile(path, f"has {count} times {sign.decode()!r}; at most {most} are allowed")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadFile(path, "not UTF-8", offset=error.start) from None
    if sys.getsizeof(text) > _MAX_TEXT_BYTES:
        raise BadFile(path, f"takes more than {_MAX_TEXT_BYTES >> 20} MB in memory")
    try:
        value = json.loads(text)
        problem = strict_json.half_character(value, text)
    except RecursionError:
        raise BadFile(path, "nested too deeply") from None
    except ValueError as error:
        raise BadFile(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFile(path, "not a JSON object")
    if problem:
        raise BadFile(path, f"holds {problem}")
    return value


def tokens(path: Path, raw: dict[str, Any]) -> dict[int, str]:
    """id -> spelling, added tokens included; ids may have holes. Raises BadFile."""
    model, added = raw.get("model"), raw.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise BadFile(path, "no vocabulary", field="model.vocab")
    pairs: list[tuple[Any, Any]]
    if isinstance(vocab, dict):
        pairs = list(vocab.items())
    else:  # Unigram: [spelling, score] by id
        pairs = [(entry[0] if isinstance(entry, list) and entry else None, i) for i, entry in enumerate(vocab)]
    pairs += [(t.get("content"), t.get("id")) if isinstance(t, dict) else (None, None) for t in added]
    found: dict[int, str] = {}
    for spelling, token in pairs:
        if not isinstance(spelling, str) or type(token) is not int or not 0 <= token < MAX_VOCABULARY:
            raise BadFile(path, f"{short(spelling)} with id {short(token)}", field="model.vocab")
        found[token] = spelling
    if not found:
        raise BadFile(path, "empty", field="model.vocab")
    return found


def vocabulary_size(path: Path, data: bytes) -> int:
    """Raises BadFile."""
    return max(tokens(path, parse(path, data))) + 1
