"""Documents: a text cut where it says that another begins, and some of it held out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pronk import system
from pronk.errors import BadFile, os_problem
from pronk.system import expanded
from pronk.train.data import plain, records

SEPARATOR = "<|endoftext|>"  # GPT-2's, and TinyStories'
_RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_FEW = 10  # documents: of fewer, the one in which the held-out share begins is cut
_BYTES = 16  # of memory for each byte of a text: itself, its tokens and sequences (measured: 15 to 17)


def read(source: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of a text, which lines of `separator` alone part, or of all texts of a folder; or records of
    {"text"}, one document each.

    Raises BadFile or ModelNotFound, and PronkError where memory does not suffice.
    """
    path = expanded(source)
    if not path.is_dir() and (path.suffix.lower() in _RECORDS or not path.exists()):
        return [record.values["text"] for record in records.read(source, ("text",)).items]
    found = plain.files(path) if path.is_dir() else [path]
    try:
        size = sum(one.stat().st_size for one in found)
    except OSError as error:
        raise BadFile(error.filename or path, f"cannot be read: {error.strerror or os_problem(error)}") from None
    system.check_memory(_BYTES * size, f"{path}: training on it", "take a part of the text")
    parts = re.compile(rf"^{re.escape(separator)}[ \t]*$", re.MULTILINE)
    documents = [part.strip("\n") for one in found for part in parts.split(plain.read(one)) if part.strip()]
    if not documents:
        raise BadFile(path, "holds no text")
    return documents


def held_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """The text's beginning, to train on, and its end. Of few documents one is cut for it, at the end of a line."""
    border = round((1 - share) * sum(map(len, documents)))
    for number, document in enumerate(documents):
        if border < len(document) and share:
            if number and len(documents) >= _FEW:
                return list(documents[:number]), list(documents[number:])
            at = document.find("\n", border) + 1 or border
            parts = [*documents[:number], document[:at]], [document[at:], *documents[number + 1 :]]
            return [part for part in parts[0] if part.strip()], [part for part in parts[1] if part.strip()]
        border -= len(document)
    return list(documents), []
