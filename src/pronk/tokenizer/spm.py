"""SentencePiece vocabularies from whichever file: a model is built in memory; the `sentencepiece` library runs it."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from pronk.errors import BadFile, Unsupported
from pronk.tokenizer.base import HIDDEN, SpecialTokens, Tokenizer, check
from pronk.tokenizer.special_split import SpecialSplit
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

SPACE = "\u2581"
BPE = 2  # TrainerSpec.model_type; 1 is unigram
_NONE = (1 << 64) - 1  # -1, as a varint has it

_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SpmRules:
    """What a SentencePiece file says beside its pieces; the defaults are those of every LLaMA model."""

    model_type: int = BPE
    charsmap: bytes = b""  # NormalizerSpec.precompiled_charsmap
    collapse_spaces: bool = False  # NormalizerSpec.remove_extra_whitespaces
    # False for tokenizers that put a space before the whole text only, and none after a special token within it.
    space_after_special: bool = True


class SpmTokenizer(Tokenizer):
    def __init__(self, kind: str, path: Path, vocabulary: Vocabulary, rules: SpmRules = SpmRules()) -> None:
        """Raises BadFile, with `path` as the file's name, where `vocabulary` is not a sound one."""
        _check(path, vocabulary)
        v = vocabulary
        super().__init__(kind, len(v.tokens), SpecialTokens.of(v), v.chat_template)
        hidden = {v.tokens[i]: i for i in sorted(self._hidden)}
        self.strips_first_space = v.add_space_prefix
        self._vocabulary, self._rules, self._special = v, rules, hidden
        self._split = SpecialSplit(hidden).split
        self._first = _processor(path, v, rules, v.add_space_prefix)
        self._inner = self._first if rules.space_after_special else _processor(path, v, rules, False)

    def vocabulary(self) -> Vocabulary:
        if self._rules.model_type != BPE:
            raise Unsupported(f"a {self.kind} vocabulary of type unigram cannot be written into another format")
        if self._rules.charsmap:
            raise Unsupported(
                f"a {self.kind} vocabulary that normalizes its text cannot be written into another format"
            )
        return self._vocabulary

    def _encode(self, text: str, special: bool) -> list[int]:
        if not special:
            return list(self._first.encode(text))
        ids: list[int] = []
        library = self._first
        for is_special, part in self._split(text):
            if is_special:
                ids.append(self._special[part])
            else:
                ids += library.encode(part)
            library = self._inner
        return ids

    def _token_bytes(self, token: int) -> bytes:
        spelling, token_type = self._vocabulary.tokens[token], self._vocabulary.types[token]
        if token_type in HIDDEN:
            return spelling.encode()
        if token_type is TokenType.BYTE:
            return bytes((int(spelling[3:5], 16),))
        return spelling.replace(SPACE, " ").encode()


def guess_types(tokens: tuple[str, ...]) -> tuple[TokenType, ...]:
    """For files that store none: LLaMA's own layout, <unk> <s> </s>, then byte pieces, then the words."""
    hidden = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    return tuple(
        hidden[t] if i < 3 and t in hidden else TokenType.BYTE if _BYTE.fullmatch(t) else TokenType.NORMAL
        for i, t in enumerate(tokens)
    )


def _check(path: Path, v: Vocabulary) -> None:
    check(path, v)
    if v.types.count(TokenType.UNKNOWN) != 1:
        raise BadFile(path, f"{v.types.count(TokenType.UNKNOWN)} unknown tokens, not one", field="vocabulary")
    for i, (token, token_type) in enumerate(zip(v.tokens, v.types, strict=True)):
        if not token or "\0" in token:
            raise BadFile(path, "empty, or with a NUL", field=f"token {i}")
        if token_type is TokenType.BYTE and not _BYTE.fullmatch(token):
            raise BadFile(path, f"a byte token spelled {token[:40]!r}, not <0xNN>", field=f"token {i}")


def _processor(path: Path, v: Vocabulary, rules: SpmRules, space: bool) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor()
        processor.load_from_serialized_proto(model_proto(v, rules, space))
    except (RuntimeError, ValueError, OverflowError, struct.error) as error:
        raise BadFile(path, f"no SentencePiece model: {error}", field="vocabulary") from None
    return processor


def model_proto(v: Vocabulary, rules: SpmRules, space: bool, *, special_ids: bool = False) -> bytes:
    """A ModelProto (sentencepiece_model.proto): pieces = 1, trainer_spec = 2, normalizer_spec = 3.

    `special_ids`: whether to state the ids of BOS, EOS and padding, as a file must. In memory they are pronk's own
    business, and a wrong one would be fatal to the library.
    """
    byte_fallback = TokenType.BYTE in v.types
    trainer = _varint_field(3, rules.model_type) + _varint_field(35, byte_fallback)
    for number, special in ((41, v.bos_id), (42, v.eos_id), (43, v.pad_id)):
        trainer += _varint_field(number, _NONE if special is None or not special_ids else special)
    trainer += _varint_field(40, v.types.index(TokenType.UNKNOWN))
    normalizer = _bytes_field(2, rules.charsmap) + _varint_field(3, space)
    normalizer += _varint_field(4, rules.collapse_spaces) + _varint_field(5, True)
    parts = []
    for token, score, token_type in zip(v.tokens, v.scores, v.types, strict=True):
        text = token.encode()
        piece = b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", score) + b"\x18%c" % int(token_type)
        parts.append(b"\x0a" + _varint(len(piece)) + piece)
    return b"".join(parts) + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


_SHORT = [bytes([value]) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:  # as nearly all of a vocabulary's 64,000 are
        return _SHORT[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value
