"""Telling tokenizer files apart by their content, and walking through those whose format is ours to parse.

Every length in a file is checked against the bytes that are there before anything is read or allocated.
"""

from __future__ import annotations

import codecs
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from pronk.errors import BadFile
from pronk.tokenizer import counted_json as tokenizer_json
from pronk.tokenizer.vocabulary import MAX_VOCABULARY, TokenizerKind

# Of every kind but tokenizer.json; the largest published ones take some 5 MB.
MAX_FILE_BYTES = 8 << 20
_MAX_FIELDS = 1 << 15  # in one protobuf message

# Llama 3's file holds the mergeable tokens only; this many special ones follow them in every model that uses it.
TIKTOKEN_SPECIAL_TOKENS = 256

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,9}\r?")
_JSON_MODEL = re.compile(rb'"model"\s*:\s*\{')


def identify(path: Path) -> TokenizerKind | None:
    """The kind of tokenizer file at `path`, from its first bytes; None for anything else, folders included."""
    if not path.is_file():  # opening a pipe would wait for ever
        return None
    try:
        with path.open("rb") as file:
            head = file.read(1 << 14)
            if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{":
                # Hundreds of added tokens may stand before the model.
                head += file.read(1 << 20)
                return "tokenizer.json" if _JSON_MODEL.search(head) else None
            size = file.seek(0, 2)
    except OSError:
        return None
    if _starts_as_sentencepiece(head):
        return "sentencepiece"
    if _starts_as_tiktoken(head, whole=len(head) == size):
        return "tiktoken"
    if _starts_as_llama2c(head, whole=len(head) == size):
        return "llama2c"
    return None


def vocabulary_size(path: Path) -> int:
    """How many token ids the file defines, special tokens included. Raises BadFile."""
    kind = identify(path)
    if kind == "tokenizer.json":
        return tokenizer_json.vocabulary_size(path, read_whole(path, tokenizer_json.MAX_BYTES))
    data = read_whole(path)
    if kind == "sentencepiece":
        size = sum(1 for number, _ in sentencepiece_fields(path, data) if number == 1)
    elif kind == "tiktoken":
        size = data.count(b"\n") + (not data.endswith(b"\n")) + TIKTOKEN_SPECIAL_TOKENS
    elif kind == "llama2c":
        size = sum(1 for _ in llama2c_records(path, data))
    else:
        raise BadFile(path, "no tokenizer of a kind that pronk knows")
    if size > MAX_VOCABULARY:
        raise BadFile(path, f"{size} tokens, more than the {MAX_VOCABULARY} that are allowed")
    return size


def read_whole(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Raises BadFile where the file is absent, unreadable or absurdly large."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(path, "not a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise BadFile(path, f"larger than {most >> 20} MB; no tokenizer of this kind is")
            return file.read(size)
    except OSError as error:
        raise BadFile(path, error.strerror or str(error)) from None


def llama2c_records(path: Path, data: bytes) -> Iterator[tuple[float, bytes]]:
    """(score, token) of every record in a llama2.c tokenizer.bin: int32 longest, then float32, int32 n, n bytes."""
    if len(data) < 4:
        raise BadFile(path, "truncated", field="longest token", offset=0)
    offset, number = 4, 0
    while offset < len(data):
        field = f"token {number}"
        if number == MAX_VOCABULARY:
            raise BadFile(path, f"more than {MAX_VOCABULARY} tokens", field=field, offset=offset)
        if offset + 8 > len(data):
            raise BadFile(path, "truncated", field=field, offset=offset)
        score, length = struct.unpack_from("<fi", data, offset)
        if not math.isfinite(score):
            raise BadFile(path, f"score {score} is not finite", field=field, offset=offset)
        if length == 0:
            raise BadFile(path, "empty", field=field, offset=offset + 4)
        if not 0 <= length <= len(data) - offset - 8:
            raise BadFile(path, f"length {length} does not fit in the file", field=field, offset=offset + 4)
        yield score, data[offset + 8 : offset + 8 + length]
        offset += 8 + length
        number += 1


def sentencepiece_fields(path: Path, data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a whole ModelProto: its pieces, and the few that describe them."""
    return protobuf_fields(path, data, MAX_VOCABULARY + _MAX_FIELDS)


def protobuf_fields(path: Path, data: bytes, most: int = _MAX_FIELDS) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) in order; a value is an int (varint) or the bytes of a fixed or length-delimited field."""
    offset = count = 0
    while offset < len(data):
        start = offset
        count += 1
        if count > most:
            raise BadFile(path, f"a message of more than {most} fields", offset=start)
        tag, offset = data[offset], offset + 1
        if tag > 0x7F:
            tag, offset = _varint(path, data, start)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, offset = _varint(path, data, offset)
            yield number, value
            continue
        if wire == 2:
            length, offset = _varint(path, data, offset)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise BadFile(path, f"wire type {wire} is not one of protobuf's", field=f"field {number}", offset=start)
        if length > len(data) - offset:
            raise BadFile(path, f"length {length} does not fit", field=f"field {number}", offset=start)
        yield number, data[offset : offset + length]
        offset += length


def _varint(path: Path, data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            raise BadFile(path, "truncated", offset=offset)
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise BadFile(path, "a number of more than 64 bits", offset=offset)


def _starts_as_sentencepiece(head: bytes) -> bool:
    """A ModelProto begins with its pieces: field 1, a message whose own field 1 is the piece's text."""
    if head[:1] != b"\n":
        return False
    try:
        _, length_end = _varint(Path(), head, 1)
        number, piece = next(protobuf_fields(Path(), head))
        inner = dict(protobuf_fields(Path(), piece if isinstance(piece, bytes) else b""))
    except BadFile:
        return False
    return number == 1 and isinstance(inner.get(1), bytes) and set(inner) <= {1, 2, 3} and length_end <= 11


def _starts_as_tiktoken(head: bytes, *, whole: bool) -> bool:
    lines = head.split(b"\n")
    if not whole or not lines[-1]:
        lines.pop()  # cut off by the reading, or empty after the last newline
    return bool(lines) and all(_TIKTOKEN_LINE.fullmatch(line) for line in lines)


def _starts_as_llama2c(head: bytes, *, whole: bool) -> bool:
    """Records that follow each other without a gap; no model file looks so, its integers being tiny floats here."""
    if len(head) < 4:
        return False
    (longest,) = struct.unpack_from("<i", head)
    if not 1 <= longest <= 1 << 16:
        return False
    offset, records = 4, 0
    while offset + 8 <= len(head):
        score, length = struct.unpack_from("<fi", head, offset)
        if not (score == 0 or 1e-20 < abs(score) < 1e20) or not 0 <= length <= longest:
            return False
        offset += 8 + length
        records += 1
    return records > 0 and (offset == len(head) if whole else offset + 8 + longest >= len(head))
