"""Llama 3's own `tokenizer.model`: base64 tokens and their ranks.

They are run as the `tiktoken` library runs them, by rank and without a table of merges, which for Llama 3 would be
280,000 pairs to derive and keep.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from pronk.errors import BadFile, PronkError
from pronk.tokenizer import settings as named
from pronk.tokenizer.base import SpecialTokens, Tokenizer, end_ids
from pronk.tokenizer.files import TIKTOKEN_SPECIAL_TOKENS, read_whole
from pronk.tokenizer.hf import panics_as, visible
from pronk.tokenizer.pre_tokenizers import LLAMA3
from pronk.tokenizer.special_split import SpecialSplit
from pronk.tokenizer.vocabulary import MAX_VOCABULARY, TokenizerSource, TokenType, Vocabulary

BEGIN = "<|begin_of_text|>"
_END = "<|end_of_text|>"
_LONGEST = 256  # bytes; Llama 3's longest token, of spaces, has 128
_PAD = "<|finetune_right_pad_id|>"

# The places of Llama 3.1 and later; Llama 3 had reserved tokens where these have pad, eom and python_tag.
_NAMED = {0: BEGIN, 1: _END, 4: _PAD, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>"}
_NAMED |= {9: "<|eot_id|>", 10: "<|python_tag|>"}

# Meta's own code cuts runs of white space at this length, and what is not cut is tokenized otherwise.
_LONGEST_SPACE = 25_000
_SPACE = re.compile(r"\s+")


def special_names() -> tuple[str, ...]:
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(TIKTOKEN_SPECIAL_TOKENS))
    return tuple(_NAMED.get(i) or next(reserved) for i in range(TIKTOKEN_SPECIAL_TOKENS))


def load(source: TokenizerSource) -> TiktokenTokenizer:
    named.refuse_end_of_text(source.path, source.settings)
    tokens = parse(source.path, read_whole(source.path))
    return TiktokenTokenizer("tiktoken", source.path, tokens, special_names(), source.chat_template)


def parse(path: Path, data: bytes) -> list[bytes]:
    """The mergeable tokens by rank. One line each: base64, a space, the rank in decimal."""
    tokens: list[bytes] = []
    if data.count(b"\n") > MAX_VOCABULARY:
        raise BadFile(path, f"more than {MAX_VOCABULARY} lines")
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        field = f"line {number + 1}"
        encoded, _, rank = line.removesuffix(b"\r").partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise BadFile(path, f"not base64: {error}", field=field) from None
        if not 0 < len(token) <= _LONGEST:
            raise BadFile(path, f"a token of {len(token)} bytes, not 1 to {_LONGEST}", field=field)
        if rank != b"%d" % number:
            raise BadFile(path, f"rank {rank[:20].decode('latin-1')!r}, where {number} should stand", field=field)
        tokens.append(token)
    return tokens


def _cuts(text: str) -> Iterator[int]:
    """Where runs of white space are cut; one pass, however many runs just short of that there are."""
    for run in _SPACE.finditer(text):
        yield from range(run.start() + _LONGEST_SPACE, run.end(), _LONGEST_SPACE)


def merged(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Of all neighbours that are a token together those of the lowest rank merge first, of equals the leftmost.

    `ranks` holds every single byte. Takes O(n log n) steps for n bytes.
    """
    size = len(word)
    end = list(range(1, size + 1))  # of the part that begins here; 0 once that has been merged into the one before
    previous = list(range(-1, size - 1))  # where the part before the one that begins here begins
    pairs = [(rank, i, i + 2) for i in range(size - 1) if (rank := ranks.get(word[i : i + 2])) is not None]
    heapify(pairs)
    while pairs:
        _, start, stop = heappop(pairs)
        middle = end[start]
        if not 0 < middle < stop or end[middle] != stop:
            continue  # one of the two has been merged with its other neighbour
        end[start], end[middle] = stop, 0
        if stop < size:
            previous[stop] = start
            if (rank := ranks.get(word[start : end[stop]])) is not None:
                heappush(pairs, (rank, start, end[stop]))
        if (before := previous[start]) >= 0 and (rank := ranks.get(word[before:stop])) is not None:
            heappush(pairs, (rank, before, stop))
    ids = []
    start = 0
    while start < size:
        ids.append(ranks[word[start : end[start]]])
        start = end[start]
    return ids


class TiktokenTokenizer(Tokenizer):
    def __init__(
        self,
        kind: str,
        path: Path,
        tokens: list[bytes],
        specials: tuple[str, ...],
        chat_template: str | None,
    ) -> None:
        """`tokens` by rank, and after them the special tokens. Raises BadFile."""
        ranks = {token: rank for rank, token in enumerate(tokens)}
        names = {name: len(tokens) + i for i, name in enumerate(specials)}
        if len(ranks) != len(tokens) or len(names) != len(specials):
            raise BadFile(path, "a token that stands there twice", field="vocabulary")
        if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
            raise BadFile(path, f"no token for byte {missing[0]}", field="vocabulary")
        if len(tokens) + len(specials) > MAX_VOCABULARY:
            raise BadFile(path, f"more than {MAX_VOCABULARY} tokens", field="vocabulary")
        special = SpecialTokens(
            hidden=frozenset(names.values()),
            bos_id=names.get(BEGIN),
            eos_ids=end_ids(names.get(_END), names.items()),
            pad_id=names.get(_PAD),
            add_bos=BEGIN in names,
        )
        super().__init__(kind, len(tokens) + len(specials), special, chat_template)
        self._tokens = [*tokens, *(name.encode() for name in specials)]
        self._ranks, self._names = ranks, names
        self._special_split = SpecialSplit(names)
        self._words = Split(Regex(LLAMA3), "isolated")

    def vocabulary(self) -> Vocabulary:
        count = len(self._ranks)
        spellings = (*map(visible, self._tokens[:count]), *self._names)
        return Vocabulary(
            model="bpe",
            tokens=spellings,
            types=(TokenType.NORMAL,) * count + (TokenType.CONTROL,) * len(self._names),
            merges=tuple(self._merges()),
            pre="llama-bpe",
            bos_id=self.bos_id,
            eos_id=self.eos_ids[0] if self.eos_ids else None,
            pad_id=self.pad_id,
            add_bos=self.add_bos,
            chat_template=self.chat_template,
        )

    def _merges(self) -> Iterator[str]:
        """tiktoken merges any two neighbours that are a token together, the lowest rank first: so all such pairs."""
        rank = self._ranks
        for token in self._tokens[: len(rank)]:
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            for left, right in sorted((rank[a], rank[b]) for a, b in pairs if a in rank and b in rank):
                yield f"{visible(self._tokens[left])} {visible(self._tokens[right])}"

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        for is_special, part in self._special_split.split(text) if special else ((False, text),):
            if is_special:
                ids.append(self._names[part])
                continue
            start = 0
            for end in (*_cuts(part), len(part)):
                self._extend(ids, part[start:end])
                start = end
        return ids

    def _extend(self, ids: list[int], text: str) -> None:
        with panics_as(PronkError("the tokenizers library failed on this text")):
            words = self._words.pre_tokenize_str(text)
        for word, _ in words:
            data = word.encode()
            whole = self._ranks.get(data)
            if whole is None:
                ids += merged(data, self._ranks)
            else:
                ids.append(whole)

    def _token_bytes(self, token: int) -> bytes:
        return self._tokens[token]
