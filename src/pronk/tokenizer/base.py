"""Tokenizer: what every kind of vocabulary gives, whichever file it came from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from pathlib import Path

from pronk.errors import BadFile, BadRequest
from pronk.tokenizer.stream import StreamDecoder
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)  # no part of the text

# Tokens that end an answer beside the declared end of text: chat models are often published with only one of the two.
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class SpecialTokens:
    """Which ids have a meaning of their own. `hidden` ids are not part of the text: control tokens and the unknown."""

    hidden: frozenset[int]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False

    @classmethod
    def of(cls, v: Vocabulary) -> SpecialTokens:
        hidden = [i for i, token_type in enumerate(v.types) if token_type in HIDDEN]
        ends = end_ids(v.eos_id, ((v.tokens[i], i) for i in hidden))
        return cls(frozenset(hidden), v.bos_id, ends, v.unk_id, v.pad_id, v.add_bos)


def check(path: Path, v: Vocabulary) -> None:
    """Raise BadFile where parts of a vocabulary do not fit each other, whichever its model is."""
    if not v.tokens:
        raise BadFile(path, "empty", field="vocabulary")
    if any(len(each) != len(v.tokens) for each in (v.types, *([v.scores] if v.model == "spm" else []))):
        problem = f"{len(v.tokens)} tokens, {len(v.types)} types and {len(v.scores)} scores"
        raise BadFile(path, problem, field="vocabulary")
    if len(set(v.tokens)) != len(v.tokens):
        seen: dict[str, int] = {}
        for i, token in enumerate(v.tokens):
            if seen.setdefault(token, i) != i:
                raise BadFile(path, f"spelled as token {seen[token]} is: {token[:40]!r}", field=f"token {i}")
    for name, token_id in (("bos", v.bos_id), ("eos", v.eos_id), ("unk", v.unk_id), ("pad", v.pad_id)):
        if token_id is not None and not 0 <= token_id < len(v.tokens):
            raise BadFile(path, f"{token_id} is not one of the {len(v.tokens)} tokens", field=f"{name} token")


def end_ids(eos_id: int | None, hidden_spellings: Iterable[tuple[str, int]]) -> tuple[int, ...]:
    """The declared end of text first, then the ends of a turn that are among the special tokens."""
    found = {spelling: token for spelling, token in hidden_spellings if spelling in _END_OF_TURN}
    declared = () if eos_id is None else (eos_id,)
    return tuple(dict.fromkeys((*declared, *(found[s] for s in _END_OF_TURN if s in found))))


class Tokenizer(ABC):
    """Text to token ids and back.

    Ids run from 0 to `vocab_size` - 1. A model whose embedding has more rows than that may emit those up to `last_id`:
    they decode to nothing. `decode` and `stream_decoder` share one rule: the bytes of all tokens
    joined, and each maximal invalid UTF-8 sequence replaced by U+FFFD.
    """

    #: True where encoding puts a space before the text, which decoding takes away again.
    strips_first_space = False

    def __init__(self, kind: str, vocab_size: int, special: SpecialTokens, chat_template: str | None) -> None:
        self.kind, self.vocab_size, self.chat_template = kind, vocab_size, chat_template
        self.bos_id, self.eos_ids, self.add_bos = special.bos_id, special.eos_ids, special.add_bos
        self.unk_id, self.pad_id = special.unk_id, special.pad_id
        self._hidden = special.hidden
        self.last_id = vocab_size - 1

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """Token ids of `text`, exactly as the vocabulary's reference implementation gives them.

        `bos`: whether the beginning-of-text token stands first; None is the tokenizer's own habit, `add_bos`. A text
        that already spells it (as chat templates do) gets no second one. `special=False` takes text that spells a
        special token for plain text. As in the reference, a character that a byte-level vocabulary without all 256
        bytes cannot spell leaves no token. Raises BadRequest for a lone surrogate, and for a BOS that does not exist.
        """
        if surrogate := _SURROGATE.search(text):
            raise BadRequest(
                f"character {surrogate.start()} of the text is a lone surrogate (U+{ord(surrogate[0]):04X}), "
                "half of a character; decode the text with the right encoding"
            )
        ids = self._encode(text, special)
        if (self.add_bos if bos is None else bos) and ids[:1] != [self.bos_id]:
            if self.bos_id is None:
                raise BadRequest(f"this {self.kind} tokenizer has no beginning-of-text token; encode with bos=False")
            ids.insert(0, self.bos_id)
        return ids

    @contextmanager
    def at_once(self) -> Iterator[bool]:
        """Whether `encode` waits for no other thread meanwhile."""
        yield True

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, without special tokens unless asked for. Raises BadRequest naming an id out of range."""
        stream = self.stream_decoder(skip_special=skip_special)
        return b"".join(map(stream.take, ids)).decode("utf-8", "replace")

    def stream_decoder(self, *, skip_special: bool = True, previous: Sequence[int] = ()) -> StreamDecoder:
        """Decodes one token at a time.

        `previous`: ids that stand before the first one fed, as a prompt does, so that decode(previous) + what is
        streamed == decode(previous + fed ids) wherever `previous` ends with a whole character.
        """
        return StreamDecoder(self, skip_special=skip_special, previous=previous)

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text, a special token its spelling. Raises BadRequest for an id out of range."""
        token = index(token)
        if not 0 <= token <= self.last_id:
            raise BadRequest(f"token id {token} is not in the vocabulary, which ends at {self.last_id}")
        return self._token_bytes(token) if token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        """The token for people to look at: bytes that are no whole character appear as \\xNN."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def is_special(self, token: int) -> bool:
        """Whether the token is no part of the text: a control token, the unknown one, or beyond the vocabulary."""
        return token in self._hidden or token >= self.vocab_size

    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The content, for writing into another format. Raises Unsupported where no Vocabulary can hold it."""

    @abstractmethod
    def _encode(self, text: str, special: bool) -> list[int]: ...

    @abstractmethod
    def _token_bytes(self, token: int) -> bytes: ...
