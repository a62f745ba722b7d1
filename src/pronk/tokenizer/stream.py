"""StreamDecoder: token ids in, whole characters out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What decoding needs to know of a tokenizer."""

    strips_first_space: bool

    def token_bytes(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class StreamDecoder:
    """Turns tokens into text as they come, at constant cost each.

    Everything fed and then `flush()`, joined, is the tokenizer's `decode` of all ids, wherever it is cut; a character
    whose bytes lie in several tokens appears with its last byte.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool, previous: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._space_to_strip = tokenizer.strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in previous:
            self.feed(token)

    def feed(self, token: int) -> str:
        """The characters that `token` completes, often none. Raises BadRequest for an id out of range."""
        return self._utf8.decode(self.take(token))

    def flush(self) -> str:
        """U+FFFD where the last character never became whole; afterwards the decoder is as after a finished text."""
        return self._utf8.decode(b"", final=True)

    def take(self, token: int) -> bytes:
        """The bytes that `token` adds here, less the space that encoding put before the text's first word."""
        piece = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_special(token):
            return b"" if self._skip_special else piece
        if self._space_to_strip and piece:
            self._space_to_strip = False
            return piece.removeprefix(b" ")
        return piece
