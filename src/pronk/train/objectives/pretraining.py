"""Pretraining: to go on with texts, all of whose tokens are learned.

A document becomes full sequences: <s> and then as many tokens as the context still holds, of one document alone. The
next sequence goes on where it ended, and a document's last token is the one that ends a text. Each token is learned
once an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.records import Record
from pronk.train.objectives.objective import NextToken

_STRETCH = 1 << 20  # characters encoded at once


@dataclass(frozen=True)
class Pretraining(NextToken):
    name = "pretraining"
    kinds = ("text",)

    def encode(self, record: Record, encoder: Encoder) -> list[Example]:
        """Sequences of at most `max_length` tokens that are read, and one more to foretell."""
        codec = encoder.tokenizer
        if codec.bos_id is None:
            raise BadRequest("texts are told apart by a token that begins one, and this tokenizer lacks it")
        parts: list[NDArray[np.int32]] = []
        for stretch in _stretches(record.values["text"]):
            parts.append(np.array(codec.encode(stretch, bos=False, special=False), np.int32))
            encoder.heard(len(stretch))
        ids = np.concatenate([*parts, np.array(codec.eos_ids[:1], np.int32)])
        begin, found = np.array([codec.bos_id], np.int32), []
        for at in range(0, len(ids), encoder.max_length):
            sequence = np.concatenate([begin, ids[at : at + encoder.max_length]])
            found.append(Example(sequence, np.arange(len(sequence)) > 0))
        return found


def _stretches(text: str) -> Iterator[str]:
    """Long texts in several, cut after a line: a list of all tokens of a book takes more memory than the model."""
    at = 0
    while at < len(text):
        end = at + _STRETCH
        end = text.rfind("\n", at, end) + 1 or end if end < len(text) else len(text)
        yield text[at:end]
        at = end
