"""Bounds: how much JSON a body holds, found before any of it is parsed.

A parser makes all that a body holds in one go, and no other thread runs meanwhile: 5 million lists, which are 10 MB,
held up every stream for seconds, and so did as many members of an object. Texts cost little by the byte, and count as
one value.
"""

from __future__ import annotations

import math
import re

import msgspec

MAX_DEPTH = 64  # of nested lists and objects
MAX_VALUES = 1 << 18  # and keys: what of them takes longest is parsed in some 50 ms
MAX_NUMBER = 64  # characters: whole numbers take quadratic time
_PIECE = 1 << 16  # bytes that are looked at in one go; between two of them others run
_MARKS, _BRACKETS = b"[{:,", b"[]{}"
_BUT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % (MAX_NUMBER + 1))


def problem(body: bytes) -> str | None:
    """What is wrong with a body that holds too much. What is no JSON is counted right up to where it ceases to be."""
    values = depth = 0
    quoted = False  # whether the piece before ended within a text
    slash = before = b""  # a backslash that ended it, and how it ended
    for at in range(0, len(body), _PIECE):
        piece = slash + body[at : at + _PIECE]
        kept = piece.rstrip(b"\\")
        slash = b"\\" * ((len(piece) - len(kept)) % 2)
        # Without the quotes that stand in texts, those that are left begin and end them.
        parts = kept.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        plain = b'"'.join(parts[quoted::2])
        if len(parts) % 2 == 0:
            quoted = not quoted
        values += sum(map(plain.count, _MARKS))
        if values > MAX_VALUES:
            return f"the body has more than {MAX_VALUES} values"
        if _LONG_NUMBER.search(before + plain):
            return f"the body has a number of more than {MAX_NUMBER} characters"
        before = plain[-MAX_NUMBER:]
        for bracket in plain.translate(None, _BUT_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                return f"the body nests deeper than {MAX_DEPTH} levels"
            if depth < 0:
                return None  # what closes more than was opened is no JSON
    return None


def _real(digits: str) -> float:
    """Python's, for msgspec's own takes 50 µs for one near the smallest that there are."""
    value = float(digits)
    if not math.isfinite(value):
        raise msgspec.DecodeError(f"the number {digits} is out of range")
    return value


parsed = msgspec.json.Decoder(float_hook=_real).decode
