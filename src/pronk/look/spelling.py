"""Spelling: how token ids are shown, with a tokenizer or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer


class Spelling:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def piece(self, token: int) -> str:
        """For people: bytes that are no whole character as \\xNN; without a tokenizer the id."""
        known = self._tokenizer is not None and token <= self._tokenizer.last_id
        return self._tokenizer.token_text(token) if self._tokenizer and known else f"<{token}>"

    def bytes_of(self, token: int) -> bytes:
        """What it adds to the text; nothing without a tokenizer."""
        known = self._tokenizer is not None and token <= self._tokenizer.last_id
        return self._tokenizer.token_bytes(token) if self._tokenizer and known else b""

    def special(self, token: int) -> bool:
        """Whether it is no part of the text."""
        return self._tokenizer.is_special(token) if self._tokenizer else False

    def to_dict(self, token: int) -> dict[str, Any]:
        return {"id": token, "piece": self.piece(token), "bytes": list(self.bytes_of(token))}
