"""SentencePiece `tokenizer.model` files, parsed by us field by field; the library gets only what was checked here."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import settings as named
from pronk.tokenizer.charsmap import check_charsmap
from pronk.tokenizer.files import protobuf_fields, read_whole, sentencepiece_fields
from pronk.tokenizer.spm import SPACE, SpmRules, SpmTokenizer
from pronk.tokenizer.vocabulary import TokenizerSource, TokenType, Vocabulary

_TYPES: dict[int | bytes, TokenType] = {int(t): t for t in TokenType}
_PIECE_FIELDS = 4  # text, score, type, and one to spare
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def load(source: TokenizerSource) -> SpmTokenizer:
    """Raises BadFile or Unsupported."""
    path, settings = source.path, source.settings
    vocabulary, rules = parse(path, read_whole(path))
    vocabulary = _with_added_tokens(path, vocabulary, settings)
    ids = dict(zip(vocabulary.tokens, range(len(vocabulary.tokens)), strict=True))
    named.refuse_end_of_text(path, settings)

    def token(key: str, default: int | None) -> int | None:
        found = named.token_id(path, settings, key, ids.get)
        return default if found is None else found

    vocabulary = replace(
        vocabulary,
        bos_id=token("bos_token", vocabulary.bos_id),
        eos_id=token("eos_token", vocabulary.eos_id),
        pad_id=token("pad_token", vocabulary.pad_id),
        add_bos=named.flag(path, settings, "add_bos_token", True),
        chat_template=source.chat_template,
    )
    rules = replace(rules, space_after_special=named.flag(path, settings, "legacy", True))
    return SpmTokenizer("sentencepiece", path, vocabulary, rules)


def parse(path: Path, data: bytes) -> tuple[Vocabulary, SpmRules]:
    """A ModelProto as sentencepiece_model.proto defines it. Fields that change nothing here are skipped."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[TokenType] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in sentencepiece_fields(path, data):
        if number == 1:
            token, score, token_type = _piece(path, len(tokens), _message(path, "piece", value))
            tokens.append(token)
            scores.append(score)
            types.append(token_type)
        elif number in (2, 3) and (trainer if number == 2 else normalizer):
            raise BadFile(path, "stands in the file twice", field="trainer_spec" if number == 2 else "normalizer_spec")
        elif number == 2:
            trainer = dict(protobuf_fields(path, _message(path, "trainer_spec", value)))
        elif number == 3:
            normalizer = dict(protobuf_fields(path, _message(path, "normalizer_spec", value)))
        elif number == 5 and dict(protobuf_fields(path, _message(path, "denormalizer_spec", value))).get(2):
            raise Unsupported(f"{path}: a SentencePiece model that rewrites its output (denormalizer_spec)")

    model_type = _integer(path, trainer, 3, 1)
    if model_type not in (1, 2):
        raise Unsupported(
            f"{path}: SentencePiece models of type {_MODEL_TYPES.get(model_type, model_type)} are not supported; "
            "bpe and unigram are"
        )
    if _integer(path, trainer, 24, 0):
        raise Unsupported(f"{path}: SentencePiece models with treat_whitespace_as_suffix are not supported")
    if not _integer(path, normalizer, 5, 1):
        raise Unsupported(f"{path}: SentencePiece models without escape_whitespaces are not supported")
    charsmap = normalizer.get(2, b"")
    charsmap = charsmap if isinstance(charsmap, bytes) else b""
    if charsmap:
        check_charsmap(path, charsmap)

    def special(number: int, default: int) -> int | None:
        value = _integer(path, trainer, number, default)
        # The defaults stand in files that do not have the token; -1 is how a file says that it has none.
        return value if value < len(types) and types[value] is TokenType.CONTROL else None

    vocabulary = Vocabulary(
        model="spm",
        tokens=tuple(tokens),
        types=tuple(types),
        scores=tuple(scores),
        bos_id=special(41, 1),
        eos_id=special(42, 2),
        unk_id=types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else None,
        pad_id=special(43, (1 << 64) - 1),
        add_bos=True,
        add_space_prefix=bool(_integer(path, normalizer, 3, 1)),
    )
    rules = SpmRules(model_type, charsmap, collapse_spaces=bool(_integer(path, normalizer, 4, 1)))
    return vocabulary, rules


def _piece(path: Path, number: int, data: bytes) -> tuple[str, float, TokenType]:
    fields = dict(protobuf_fields(path, data, _PIECE_FIELDS))
    text, score, token_type = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), _TYPES.get(fields.get(3, 1))
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or token_type is None:
        raise BadFile(path, "not a piece's text, score and type", field=f"piece {number}")
    try:
        token = text.decode()
    except UnicodeDecodeError:
        raise BadFile(path, "not UTF-8", field=f"piece {number}") from None
    if not token:
        raise BadFile(path, "empty", field=f"piece {number}")
    (value,) = struct.unpack("<f", score)
    if not math.isfinite(value):
        raise BadFile(path, f"score {value} is not finite", field=f"piece {number}")
    return token, value, token_type


def _message(path: Path, name: str, value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise BadFile(path, "a number where a message should be", field=name)
    return value


def _integer(path: Path, fields: Mapping[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if isinstance(value, bytes):
        raise BadFile(path, "bytes where a number should be", field=f"specification field {number}")
    return value


def _with_added_tokens(path: Path, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> Vocabulary:
    """tokenizer_config.json's `added_tokens_decoder`: tokens that fine-tuning put after the model's own."""
    added = named.added_tokens(path, settings)
    tokens, types, scores = list(vocabulary.tokens), list(vocabulary.types), list(vocabulary.scores)
    for token_id, (content, special) in sorted(added.items()):
        token_type = TokenType.CONTROL if special else TokenType.USER_DEFINED
        if token_id < len(vocabulary.tokens):
            if special and tokens[token_id] == content and types[token_id] is not TokenType.UNKNOWN:
                types[token_id] = TokenType.CONTROL
        elif token_id == len(tokens):
            tokens.append(content if special else content.replace(" ", SPACE))
            types.append(token_type)
            scores.append(0.0)
        else:
            raise BadFile(path, f"token {token_id} leaves a gap after {len(tokens) - 1}", field="added_tokens_decoder")
    return replace(vocabulary, tokens=tuple(tokens), types=tuple(types), scores=tuple(scores))
