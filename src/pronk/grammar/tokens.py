"""Tokens: a tokenizer as llguidance asks for one, whichever kind it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pronk.errors import PronkError
from pronk.tokenizer import Tokenizer


class Tokens:
    """The bytes of each of a model's `vocab_size` tokens. Those that are no part of a text, or end it, are special:
    no grammar asks for them as text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.vocab_size  # a model may have more rows, which are no text
        self.tokens = [tokenizer.token_bytes(token) if token < known else b"" for token in range(vocab_size)]
        apart = [token for token in range(vocab_size) if tokenizer.is_special(token) or not self.tokens[token]]
        ends = [token for token in eos_ids if 0 <= token < vocab_size]
        if not ends:  # the library wants one; it is no text, so that nobody draws it
            if not apart:
                raise PronkError("this vocabulary has no token that ends a text, and no other special one")
            ends = apart[-1:]
        self.special_token_ids = sorted({*apart, *ends})
        self.eos_token_ids, self.eos_token_id, self.bos_token_id = ends, ends[0], tokenizer.bos_id

    def __call__(self, text: bytes) -> list[int]:
        """As the tokenizer cuts it within a text, where a space before the first word would be another text.

        Where a grammar leaves no choice of bytes, these are the tokens that are taken. Their bytes are always the
        text's: else, as where it ends amid a character, the longest token is taken each time.
        """
        for before in ("", "\n"):
            try:
                ids = self._tokenizer.encode(before + text.decode(), bos=False, special=False)
            except (UnicodeDecodeError, PronkError):
                break
            start, said = 0, b""
            while before and start < len(ids) and before.encode() not in said:
                said += self.tokens[ids[start]]
                start += 1
            if b"".join(self.tokens[token] for token in ids[start:]) == text:
                return ids[start:]
        return self._longest_first(text)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        apart = set(self.special_token_ids)
        return {spelled: token for token, spelled in enumerate(self.tokens) if token not in apart}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    def _longest_first(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token := self._ids.get(text[at:end])) is not None:
                    ids.append(token)
                    at = end
                    break
            else:  # a byte that no token has
                return ids
        return ids
