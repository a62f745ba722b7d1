"""What the `tokenizers` library runs: tokenizer.json files, and byte-level BPE built from a GGUF's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from pronk.errors import BadFile, BadRequest, PronkError
from pronk.tokenizer import pre_tokenizers
from pronk.tokenizer.base import HIDDEN, SpecialTokens, Tokenizer, check
from pronk.tokenizer.hf_checks import check_added
from pronk.tokenizer.vocabulary import TokenType, Vocabulary


def _byte_of_character() -> dict[str, int]:
    """GPT-2's visible bytes: printable Latin-1 stands for itself, every other byte for a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    hidden = (b for b in range(256) if b not in printable)
    return table | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_of_character()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def visible(data: bytes) -> str:
    """Bytes as byte-level BPE spells them."""
    return "".join(CHARACTER_OF[byte] for byte in data)


def unvisible(spelling: str) -> bytes:
    """The inverse of `visible`; a token that is spelled in other characters stands for itself."""
    try:
        return bytes(BYTE_OF[character] for character in spelling)
    except KeyError:
        return spelling.encode()


_LONG = 1 << 14  # letters, beyond which other threads are to run meanwhile: `encode` lets none


class HfTokenizer(Tokenizer):
    def __init__(
        self,
        kind: str,
        library: Library,
        special: SpecialTokens,
        *,
        spell: Callable[[int], bytes],
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        chat_template: str | None,
        strips_first_space: bool = False,
        short_runs: bool = False,
    ) -> None:
        """`spell`: the bytes that a token adds to a text. `vocabulary`: see Tokenizer.vocabulary. `short_runs`:
        see patterns.check."""
        super().__init__(kind, vocab_size, special, chat_template)
        self.strips_first_space, self._short_runs = strips_first_space, short_runs
        self._library, self._spell, self._make_vocabulary = library, spell, vocabulary
        self._lock = threading.RLock()  # a signal handler must not wait for the call that it interrupts

    def vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @contextmanager
    def at_once(self) -> Iterator[bool]:
        mine = self._lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._short_runs:
            from pronk.tokenizer.patterns import costly_runs

            if length := costly_runs(text):
                raise BadRequest(f"a run of {length} digits or spaces would take this tokenizer too long; break it up")
        # The library keeps this choice in the tokenizer, so another thread must not change it meanwhile.
        with self._lock, panics_as(PronkError("the tokenizers library failed on this text")):
            before = self._library.encode_special_tokens
            self._library.encode_special_tokens = not special
            try:
                if len(text) < _LONG:
                    return list(self._library.encode(text, add_special_tokens=False).ids)
                return list(self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            except Exception as error:  # the library raises plain Exception, as for a character without a token
                raise PronkError(f"the tokenizer cannot encode this text: {error}") from None
            finally:
                self._library.encode_special_tokens = before

    def _token_bytes(self, token: int) -> bytes:
        return self._spell(token)


def library_of(path: Path, v: Vocabulary) -> Library:
    """Byte-level BPE from its vocabulary and merges. Raises BadFile or, for an unknown pre-tokenizer, Unsupported."""
    check(path, v)
    ids = {token: i for i, token in enumerate(v.tokens)}
    if "" in ids:
        raise BadFile(path, "empty", field=f"token {ids['']}")
    merges: list[Any] = [tuple(merge.split(" ")) for merge in v.merges]
    if not set(map(len, merges)) <= {2}:
        wrong = next(i for i, merge in enumerate(merges) if len(merge) != 2)
        raise BadFile(path, f"{v.merges[wrong][:40]!r} is not two tokens", field=f"merge {wrong}")
    try:
        with panics_as(BadFile(path, "no BPE vocabulary", field="merges")):
            model = BPE(vocab=ids, merges=merges, ignore_merges=pre_tokenizers.takes_whole_words(v.pre))
    except Exception as error:  # the library raises plain Exception
        raise BadFile(path, f"no BPE vocabulary: {error}", field="merges") from None
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.build(v.pre)
    hidden, own = _ids_of(v, *HIDDEN), _ids_of(v, TokenType.USER_DEFINED)
    check_added(path, (v.tokens[i] for i in (*hidden, *own)))
    library.add_special_tokens([AddedToken(v.tokens[i], special=True, normalized=False) for i in hidden])
    library.add_tokens([AddedToken(v.tokens[i], special=False, normalized=False) for i in own])
    return library


def byte_level_bpe(kind: str, path: Path, v: Vocabulary) -> HfTokenizer:
    """See `library_of`."""
    verbatim = frozenset(_ids_of(v, *HIDDEN, TokenType.USER_DEFINED))

    def spell(token: int) -> bytes:
        return v.tokens[token].encode() if token in verbatim else unvisible(v.tokens[token])

    return HfTokenizer(
        kind,
        library_of(path, v),
        SpecialTokens.of(v),
        spell=spell,
        vocabulary=lambda: v,
        vocab_size=len(v.tokens),
        chat_template=v.chat_template,
    )


def _ids_of(v: Vocabulary, *wanted: TokenType) -> list[int]:
    return [i for i, token_type in enumerate(v.types) if token_type in wanted]


@contextmanager
def panics_as(error: PronkError) -> Iterator[None]:
    """Rust code that hits a broken file may panic, and that arrives as a BaseException no one would catch."""
    try:
        yield
    except BaseException as caught:
        if type(caught).__name__ == "PanicException":
            raise error from None
        raise
