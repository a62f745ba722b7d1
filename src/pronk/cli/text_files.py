"""Texts that verbs read: files, and standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from pronk.errors import BadRequest

BOM = "\ufeff"  # which some editors put before UTF-8 text; it is no part of it


def read_file(path: str, *, whole: bool = False) -> str:
    """The text of a file, or of standard input for "-", less one newline at its end unless it is wanted `whole`. Raises
    BadRequest."""
    name = "standard input" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise BadRequest(f"{name}: {error.strerror or error}") from None
    return decode(raw, name, whole=whole).removeprefix(BOM)


def decode(raw: bytes, name: str, *, whole: bool = False) -> str:
    """UTF-8, less one newline at the end, which editors and `echo` put there."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name}: not UTF-8 text (byte {error.start}); convert it first") from None
    return text if whole else text.removesuffix("\n").removesuffix("\r")
