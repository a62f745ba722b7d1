"""Plain text: of a file, and of all files of a folder."""

from __future__ import annotations

import os
from pathlib import Path

from pronk.errors import BadFile, os_problem


def read(path: Path) -> str:
    """With lines that end in one newline. Raises BadFile for what is no UTF-8 text."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(path, "is a pipe or a device; write it to a file first")
        raw = path.read_bytes()
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or os_problem(error)}") from None
    if (nul := raw.find(b"\0")) >= 0:
        raise BadFile(path, "is no text: a byte of it is 0", offset=nul)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(path, f"not UTF-8 text (byte {error.start}); convert it first") from None
    return text.replace("\r\n", "\n")


def is_text(path: Path) -> bool:
    """Whether a file is one text by its name."""
    return path.suffix.lower() == ".txt"


def files(folder: Path) -> list[Path]:
    """Of the folder and those in it, by name; not what is hidden (.git, .DS_Store). Links to folders are not followed.

    Raises BadFile where a folder cannot be listed.
    """

    def refused(error: OSError) -> None:
        raise BadFile(error.filename or folder, f"cannot be read: {error.strerror or os_problem(error)}")

    found: list[Path] = []
    for at, inner, names in os.walk(folder, onerror=refused):
        inner[:] = (name for name in inner if not name.startswith("."))
        found += (Path(at, name) for name in names if not name.startswith("."))
    return sorted(found)
