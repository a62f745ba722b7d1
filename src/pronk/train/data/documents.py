"""Documents: a text cut where it says that another begins, and some of it held out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pronk import system
from pronk.errors import BadFile, os_problem
from pronk.system import expanded
from pronk.train.data import records

SEPARATOR = "<|endoftext|>"  # GPT-2's, and TinyStories'
_RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_FEW = 10  # documents: of fewer, the one in which the held-out share begins is cut
_BYTES = 16  # of memory for each byte of a text: itself, its tokens and sequences (measured: 15 to 17)


def read(source: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of a text, which lines of `separator` alone part; or records of {"text"}, one document each.

    Raises BadFile or ModelNotFound, and PronkError where memory does not suffice.
    """
    path = expanded(source)
    if path.suffix.lower() in _RECORDS or not path.exists():
        return [record.values["text"] for record in records.read(source, ("text",)).items]
    try:
        system.check_memory(_BYTES * path.stat().st_size, f"{path}: training on it", "take a part of the text")
        raw = path.read_bytes()
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or os_problem(error)}") from None
    if (nul := raw.find(b"\0")) >= 0:
        raise BadFile(path, "is no text: a byte of it is 0", offset=nul)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(path, f"not UTF-8 text (byte {error.start}); convert it first") from None
    text = text.replace("\r\n", "\n")
    parts = re.split(rf"^{re.escape(separator)}[ \t]*$", text, flags=re.MULTILINE)
    documents = [part.strip("\n") for part in parts if part.strip()]
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
