"""Documents: a text cut where it says that another begins, some of it held out, and made into full sequences.

A sequence is <s> and then as many tokens as the context still holds, of one document alone. The next sequence goes on
where it ended, and a document's last token is the one that ends a text. Each token is learned once an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest, os_problem, short
from pronk.system import expanded
from pronk.tokenizer import Tokenizer
from pronk.train.data import records
from pronk.train.data.examples import Example

SEPARATOR = "<|endoftext|>"  # GPT-2's, and TinyStories'
_RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_FEW = 10  # documents: of fewer, the one in which the held-out share begins is cut
_BYTES = 16  # of memory for each byte of a text: itself, its tokens and sequences (measured: 15 to 17)
_STRETCH = 1 << 20  # characters encoded at once


def read(source: str, separator: str = SEPARATOR) -> list[str]:
    """The documents of a text, which lines of `separator` alone part; or records of {"text"}, one document each.

    Raises BadFile or ModelNotFound, and PronkError where memory does not suffice.
    """
    path = expanded(source)
    if path.suffix.lower() in _RECORDS or not path.exists():
        return _of_records(source)
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


def _of_records(source: str) -> list[str]:
    found = records.read(source)
    for record in found.items:
        if record.kind != "text":
            raise found.problem(record, f'is no text to learn from: it must be {{"text"}}, not {short(record.kind)}')
    return [record.values["text"] for record in found.items]


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


@dataclass(frozen=True)
class Sequences:
    """`names`: where each stands, for messages. `nbytes`: of the text that they spell, in UTF-8."""

    examples: list[Example]
    names: list[str]
    nbytes: int

    @property
    def tokens(self) -> int:
        """That are learned."""
        return sum(example.targets for example in self.examples)


def sequences(
    documents: Sequence[str], tokenizer: Tokenizer, ctx_size: int, source: str, progress: Progress | None = None
) -> Sequences:
    """Of at most `ctx_size` tokens that are read, and one more to foretell."""
    if tokenizer.bos_id is None or not tokenizer.eos_ids:
        raise BadRequest("texts are told apart by tokens that begin and end one, and this tokenizer lacks one of them")
    examples, names, done = [], [], 0
    characters = sum(map(len, documents))
    for number, document in enumerate(documents, 1):
        parts: list[NDArray[np.int32]] = []
        for stretch in _stretches(document):
            parts.append(np.array(tokenizer.encode(stretch, bos=False, special=False), np.int32))
            done += len(stretch)
            if progress:
                progress("", done, characters)
        ids = np.concatenate([*parts, np.array(tokenizer.eos_ids[:1], np.int32)])
        for at in range(0, len(ids), ctx_size):
            sequence = np.concatenate([np.array([tokenizer.bos_id], np.int32), ids[at : at + ctx_size]])
            examples.append(Example(sequence, np.arange(len(sequence)) > 0))
            names.append(f"{source}: document {number}, from token {at} on")
    return Sequences(examples, names, sum(len(document.encode()) for document in documents))


def _stretches(text: str) -> Iterator[str]:
    """Long texts in several, cut after a line: a list of all tokens of a book takes more memory than the model."""
    at = 0
    while at < len(text):
        end = at + _STRETCH
        end = text.rfind("\n", at, end) + 1 or end if end < len(text) else len(text)
        yield text[at:end]
        at = end
