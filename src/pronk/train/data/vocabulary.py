"""A tokenizer of one's own: SentencePiece's BPE over a text, laid out as LLaMA's and llama2.c's are.

<unk>, <s> and </s>, the 256 bytes, and then what the text has most of: pairs merged, the commonest first
(arXiv 1508.07909), and single characters. What has no token is spelled in bytes, so that any text can be encoded.
A text ends with the token that begins the next one, <s>: that is where llama2.c's program stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import sentencepiece

from pronk.errors import BadRequest
from pronk.tokenizer import spm_file
from pronk.tokenizer.spm import SPACE, SpmTokenizer
from pronk.tokenizer.vocabulary import MAX_VOCABULARY

LEAST = 3 + 256  # tokens that are there before any text is read
SEEN = 16 << 20  # characters that a vocabulary is learned from: of longer texts, stretches from all over
COVERED = 0.9995  # of the text's characters have a token each; the rare rest would take up a small vocabulary
_LINE = 4000  # characters: a word's length must fit into 16 bits
_STRETCH = 1 << 16

_TOO_LARGE = re.compile(r"value <= (\d+)")
_TOO_SMALL = re.compile(r"required_chars\. \d+ vs (\d+)")


def train(texts: Sequence[str], size: int) -> SpmTokenizer:
    """`size` tokens. The same texts give the same tokens. Raises BadRequest where they do not support so many."""
    if size > MAX_VOCABULARY:
        raise BadRequest(f"a vocabulary of {size} tokens is too large; {MAX_VOCABULARY} are allowed")
    if size < LEAST:
        raise BadRequest(f"a vocabulary of {size} tokens is too small: the 256 bytes alone take {LEAST} with the rest")
    written = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(_sample(texts)),
            model_writer=written,
            vocab_size=size,
            model_type="bpe",
            character_coverage=COVERED,
            required_chars=SPACE,  # which every encoding begins with, in texts that have none, too
            byte_fallback=True,
            split_digits=True,  # as LLaMA: each digit is a token
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise BadRequest(_problem(str(error), size)) from None
    path = Path("the text's vocabulary")
    vocabulary, rules = spm_file.parse(path, written.getvalue())
    return SpmTokenizer("sentencepiece", path, replace(vocabulary, eos_id=vocabulary.bos_id), rules)


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """All of them, or stretches at equal distances that come to SEEN characters."""
    share = SEEN / max(1, sum(map(len, texts)))
    if share >= 1:
        yield from texts
        return
    read, taken = 0, 0
    for text in texts:
        for at in range(0, len(text), _STRETCH):
            stretch = text[at : at + _STRETCH]
            read += len(stretch)
            if taken < share * read:
                taken += len(stretch)
                yield stretch


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """No token reaches over the end of a line."""
    for text in texts:
        for line in text.split("\n"):
            yield from (line[at : at + _LINE] for at in range(0, len(line), _LINE))


def _problem(said: str, size: int) -> str:
    if found := _TOO_LARGE.search(said):
        return f"the text is too short for a vocabulary of {size} tokens; it supports {found[1]} (--vocab-size)"
    if found := _TOO_SMALL.search(said):
        return f"the text's characters alone take a vocabulary of {found[1]} tokens; {size} are too few (--vocab-size)"
    return f"no vocabulary can be made of the text: {said.strip().split('] ')[-1] or said}"
