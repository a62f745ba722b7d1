"""What a tokenizer.json may ask of the `tokenizers` library: steps that pronk knows not to multiply a text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, Unsupported, short

_NORMALIZERS = frozenset(
    """BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip
    StripAccents""".split()
)
_PRE_TOKENIZERS = frozenset(
    """BertPreTokenizer ByteLevel CharDelimiterSplit Digits Metaspace Punctuation Split UnicodeScripts Whitespace
    WhitespaceSplit""".split()
)
_POST_PROCESSORS = frozenset("BertProcessing ByteLevel RobertaProcessing TemplateProcessing".split())
# These make more of a text each time they run.
_ONCE = frozenset(("ByteLevel", "Metaspace", "Precompiled"))
_MAX_STEPS = 16
_MAX_GROWTH = 16  # by all Replace steps together
_MAX_PATTERN = 4096  # characters
_MAX_PREFIX = 64  # characters

# The library turns these into automata that take some hundred bytes for each byte of a spelling.
_MAX_ADDED_BYTES = 1 << 20
_MAX_UNIGRAM_BYTES = 1 << 20


def check(path: Path, raw: Mapping[str, Any]) -> bool:
    """Whether a text must have no long runs of digits and white space, see `patterns`.

    Raises Unsupported for steps that pronk does not know, BadFile for those that would swell or fail.
    """
    short_runs = False
    _normalizer(path, normalizers := list(_steps(path, raw, "normalizer", "normalizers", _NORMALIZERS)))
    short_runs |= any(map(partial(_wants_short_runs, path), normalizers))
    for step in _steps(path, raw, "pre_tokenizer", "pretokenizers", _PRE_TOKENIZERS):
        if step["type"] == "Split":
            _pattern(path, step, "pre_tokenizer")
        short_runs |= _wants_short_runs(path, step)
    for step in _steps(path, raw, "post_processor", "processors", _POST_PROCESSORS):
        if step["type"] == "TemplateProcessing":
            _template(path, step)
    check_added(path, (token["content"] for token in raw.get("added_tokens") or ()))
    _model(path, raw["model"])
    return short_runs


def check_added(path: Path, spellings: Iterable[str]) -> None:
    if sum(len(spelling.encode("utf-8", "replace")) for spelling in spellings) > _MAX_ADDED_BYTES:
        raise BadFile(path, f"special tokens of more than {_MAX_ADDED_BYTES >> 20} MB", field="added_tokens")


def _steps(
    path: Path, raw: Mapping[str, Any], key: str, inner: str, known: frozenset[str]
) -> Iterator[Mapping[str, Any]]:
    """The steps under `key` in the order they run, however deep in sequences."""
    rest, count, once = [raw.get(key)], 0, set[str]()
    while rest:
        step = rest.pop()
        if step is None:
            continue
        count += 1
        if count > _MAX_STEPS:
            raise BadFile(path, f"more than {_MAX_STEPS} steps", field=key)
        if not isinstance(step, dict):
            raise BadFile(path, "must be an object", field=key)
        kind = step.get("type")
        if kind == "Sequence" and isinstance(step.get(inner), list):
            rest += reversed(step[inner])
            continue
        if not isinstance(kind, str) or kind not in known:
            raise Unsupported(f"{path}: a tokenizer whose {key} has a step {short(kind)} is not supported")
        if kind in _ONCE & once:
            raise BadFile(path, f"{kind} stands there twice", field=key)
        once.add(kind)
        yield step


def _normalizer(path: Path, steps: list[Mapping[str, Any]]) -> None:
    field, growth = "normalizer", 1.0
    for step in steps:
        if step["type"] == "Prepend" and len(_text(path, step, "prepend", field)) > _MAX_PREFIX:
            raise BadFile(path, f"puts more than {_MAX_PREFIX} characters before a text", field=field)
        if step["type"] == "Replace":
            content, shortest = _text(path, step, "content", field), _pattern(path, step, field)
            # A regular expression may match one character, or between two.
            growth *= max(1.0, len(content) / shortest if shortest else 1 + len(content))
        if step["type"] == "Precompiled":
            from pronk.tokenizer.charsmap import check_charsmap

            try:
                check_charsmap(path, base64.b64decode(_text(path, step, "precompiled_charsmap", field), validate=True))
            except binascii.Error:
                raise BadFile(path, "not base64", field=f"{field} precompiled_charsmap") from None
    if growth > _MAX_GROWTH:
        raise BadFile(path, f"makes a text up to {growth:g} times as long; {_MAX_GROWTH} are allowed", field=field)


def _pattern(path: Path, step: Mapping[str, Any], field: str) -> int:
    """The length of what it matches; 0 for a regular expression, which may match nothing."""
    pattern = step.get("pattern")
    kind, text = next(iter(pattern.items())) if isinstance(pattern, dict) and len(pattern) == 1 else (None, None)
    if kind not in ("String", "Regex") or not isinstance(text, str) or not 0 < len(text) <= _MAX_PATTERN:
        raise BadFile(path, f"{short(pattern)} is no pattern of up to {_MAX_PATTERN} characters", field=field)
    return len(text) if kind == "String" else 0


def _wants_short_runs(path: Path, step: Mapping[str, Any]) -> bool:
    regex = step["pattern"].get("Regex") if step["type"] in ("Replace", "Split") else None
    if regex is None:
        return False
    from pronk.tokenizer import patterns

    try:
        return patterns.check(regex)
    except patterns.Refused as why:
        raise Unsupported(f"{path}: the pattern {short(regex)} has {why}") from None


def _template(path: Path, step: Mapping[str, Any]) -> None:
    """The library looks its special tokens up without asking whether they are there."""
    single, known = step.get("single"), step.get("special_tokens")
    if not isinstance(single, list) or not all(isinstance(piece, dict) for piece in single):
        raise Unsupported(f"{path}: a tokenizer whose post_processor has a template that is no list")
    if sum("Sequence" in piece for piece in single) > 1:
        raise BadFile(path, "a template with the text in it twice", field="post_processor")
    for piece in single:
        if isinstance(special := piece.get("SpecialToken"), dict):
            name = special.get("id")
            if not isinstance(name, str) or not isinstance(known, dict) or name not in known:
                raise BadFile(path, f"a template with the undefined token {short(name)}", field="post_processor")


def _text(path: Path, step: Mapping[str, Any], key: str, field: str) -> str:
    value = step.get(key)
    if not isinstance(value, str):
        raise BadFile(path, "must be a string", field=f"{field} {key}")
    return value


def _model(path: Path, model: Mapping[str, Any]) -> None:
    kind, vocab, unknown = model.get("type"), model["vocab"], model.get("unk_token")
    if model.get("dropout"):
        raise Unsupported(f"{path}: a tokenizer with dropout gives other tokens each time; set it to null")
    if kind in ("WordLevel", "WordPiece") and (not isinstance(unknown, str) or unknown not in vocab):
        raise BadFile(path, f"the unknown token {short(unknown)} is not in the vocabulary", field="model.unk_token")
    if kind != "WordPiece" and model.get("continuing_subword_prefix"):
        raise Unsupported(f"{path}: a vocabulary of type {short(kind)} with continuing_subword_prefix")
    if isinstance(vocab, list):
        size = sum(len(entry[0].encode("utf-8", "replace")) for entry in vocab)
        if size > _MAX_UNIGRAM_BYTES:
            raise Unsupported(
                f"{path}: a Unigram vocabulary of more than {_MAX_UNIGRAM_BYTES >> 20} MB; "
                "give the model's tokenizer.model with --tokenizer"
            )
