"""A vocabulary made of a text: LLaMA's layout, every text spelled and read back, and the ways it cannot be made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pronk.errors import BadRequest
from pronk.measure.windows import evaluation_text
from pronk.tokenizer.spm import SpmTokenizer
from pronk.tokenizer.vocabulary import TokenType
from pronk.train.data import vocabulary

sys.path.append(str(Path(__file__).parents[1] / "tokenizer"))
import awkward

TEXT = evaluation_text()


@pytest.fixture(scope="module")
def made() -> SpmTokenizer:
    return vocabulary.train([TEXT], 400)


def test_laid_out_as_llama_s(made: SpmTokenizer) -> None:
    v = made.vocabulary()
    assert v.tokens[:4] == ("<unk>", "<s>", "</s>", "<0x00>")
    assert v.types[:259] == (TokenType.UNKNOWN, *(TokenType.CONTROL,) * 2, *(TokenType.BYTE,) * 256)
    assert (made.vocab_size, made.bos_id, made.eos_ids, made.add_bos) == (400, 1, (1,), True)
    merged = v.tokens[259:]
    assert "\u2581the" in merged
    assert not any(len(token) > 1 and any(c.isdigit() for c in token) for token in merged)


def test_every_text_comes_back(made: SpmTokenizer) -> None:
    """What the vocabulary was never shown, too; U+2581 alone is read as the space that it stands for."""
    for text in (TEXT, *awkward.strings(1000)):
        assert made.decode(made.encode(text, special=False)) == text.replace("\u2581", " ")


def test_the_same_text_gives_the_same_tokens(made: SpmTokenizer) -> None:
    assert vocabulary.train([TEXT], 400).vocabulary() == made.vocabulary()
    assert vocabulary.train([TEXT[:12000]], 400).vocabulary() != made.vocabulary()


def test_common_words_are_short(made: SpmTokenizer) -> None:
    assert len(made.encode(TEXT)) < len(TEXT) / 1.5


def test_long_texts_are_seen_in_stretches_from_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SEEN", 400)
    monkeypatch.setattr(vocabulary, "_STRETCH", 20)
    texts = [chr(97 + n) * 100 for n in range(20)]
    seen = list(vocabulary._sample(texts))
    assert 400 <= sum(map(len, seen)) <= 420
    assert {stretch[0] for stretch in seen} == {text[0] for text in texts}
    assert list(vocabulary._sample(texts[:4])) == texts[:4]


def test_texts_without_spaces_and_with_what_the_library_reserves() -> None:
    """A word of 100,000 letters would end the program in the library; U+2585 parts its words in training."""
    made = vocabulary.train(["ab" * 50_000 + "\n" + "\u2585\t\u2047" + "cd" * 50], 264)
    assert made.decode(made.encode("abcd\u2585\u2047")) == "abcd\u2585\u2047"


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("abc abc", 512, "the text is too short for a vocabulary of 512 tokens; it supports 269"),
        (TEXT, 270, r"the text's characters alone take a vocabulary of 3\d\d tokens; 270 are too few"),
        (TEXT, 300_001, "a vocabulary of 300001 tokens is too large; 300000 are allowed"),
        (TEXT, 258, "a vocabulary of 258 tokens is too small"),
        ("\n\n", 300, "no vocabulary can be made of the text"),
    ],
)
def test_vocabularies_that_cannot_be(text: str, size: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        vocabulary.train([text], size)
    if "supports" in message:
        assert vocabulary.train([text], 269).vocab_size == 269
