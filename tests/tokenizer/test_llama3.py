"""Llama 3: its tiktoken file, llama2.c's export of it, and its tokenizer.json."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import awkward
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import GPT2_WORDS, LLAMA3_PATTERN, bpe_json, llama2c_file, tiktoken_lines, write_json

from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.pre_tokenizers import LLAMA3
from pronk.tokenizer.tiktoken_bpe import _cuts, merged

LETTERS = [bytes((b,)) for b in range(256)]


def test_the_published_pattern() -> None:
    assert LLAMA3 == LLAMA3_PATTERN


def test_three_files_one_tokenizer(every_kind: dict[str, Tokenizer]) -> None:
    """tiktoken's algorithm on two files, and the tokenizers library's on merges that were recovered from the ranks."""
    ours, export, library = (every_kind[k] for k in ("tiktoken", "llama2c-llama3", "json-llama3"))
    for text in awkward.strings(3_000, seed=10):
        ids = ours.encode(text)
        assert export.encode(text) == ids, repr(text)
        assert library.encode(text) == ids, repr(text)
        assert export.decode(ids) == library.decode(ids) == ours.decode(ids)


def test_against_the_library_itself(every_kind: dict[str, Tokenizer]) -> None:
    ours = every_kind["tiktoken"]
    for text in awkward.strings(3_000, seed=11):
        assert ours.encode(text, bos=False, special=False) == reference(ours).encode_ordinary(text), repr(text)
    for path in sorted(Path(__file__).parents[2].glob("docs/*.md")):
        text = path.read_text("utf-8")
        assert ours.encode(text, bos=False, special=False) == reference(ours).encode_ordinary(text), path


@st.composite
def _rank_files(draw: st.DrawFn) -> list[bytes]:
    """All bytes, then tokens of a small alphabet; most are made of two earlier ones, as training leaves them."""
    tokens = list(LETTERS)
    for _ in range(draw(st.integers(0, 24))):
        letters = [b"a", b"b", b"c", *tokens[256:]]
        part = st.sampled_from(letters)
        token = draw(st.one_of(st.tuples(part, part).map(b"".join), st.binary(min_size=2, max_size=5)))
        if token not in tokens and len(token) <= 32:
            tokens.append(token)
    return tokens


@given(_rank_files(), st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_merging_by_rank_on_any_vocabulary(tokens: list[bytes], words: list[str]) -> None:
    """Overlapping pairs that make the same token, tokens that nothing leads to, ranks out of order."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokens)}
    reference = tiktoken.Encoding("any", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for word in words:
        expected = reference.encode_ordinary(word)
        assert expected == ([ranks[word.encode()]] if word.encode() in ranks else merged(word.encode(), ranks))


@given(text=st.text(max_size=60))
@example("'ſ'S I'ſ k\u212a")  # letters whose other case is ASCII
@example("\x1c\x1d\x85\u180e\u200b\ufeff x")  # white space to some
@settings(max_examples=1000, deadline=None)
def test_any_unicode(every_kind: dict[str, Tokenizer], text: str) -> None:
    tokenizer = every_kind["tiktoken"]
    assert tokenizer.encode(text, bos=False, special=False) == reference(tokenizer).encode_ordinary(text)


@cache
def reference(tokenizer: Tokenizer) -> Any:
    """The library itself, given ranks by hand as Meta's code does."""
    import tiktoken

    ranks = {tokenizer.token_bytes(i): i for i in range(128000)}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_known_ids(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["tiktoken"]
    # From Meta's own test of its tokenizer.
    assert tokenizer.encode("This is a test sentence.") == [
        128000,  # <|begin_of_text|>
        2028,  # This
        374,  # is
        264,  # a
        1296,  # test
        11914,  # sentence
        13,  # .
    ]
    assert tokenizer.vocab_size == 128256
    assert tokenizer.eos_ids == (128001, 128009, 128008)
    header = tokenizer.encode("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")
    assert header == [128000, 128006, 882, 128007, 271, 13347, 128009]
    assert tokenizer.token_text(128255).startswith("<|reserved_special_token_")


def test_long_runs_do_not_break_the_engine(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["tiktoken"]
    for text in (" " * 100_000 + "x", "a" * 100_000, "\n" * 60_000, "\t x" * 10_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (tiktoken_lines(LETTERS[1:]), "no token for byte 0"),
        (tiktoken_lines([*LETTERS, b"a"]), "twice"),
        (tiktoken_lines(LETTERS).replace(b" 9\n", b" 8\n"), "rank '8', where 9"),
        (tiktoken_lines(LETTERS) + b"YQ= 256\n", "line 257"),
    ],
)
def test_broken_files(lines: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(lines)
    with pytest.raises(BadFile, match=problem):
        tokenizers.load(tokenizers.find(path))


def test_an_export_of_neither_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(llama2c_file([(float(i), token) for i, token in enumerate(LETTERS)]))
    with pytest.raises(Unsupported, match="neither"):
        tokenizers.load(tokenizers.find(path))


def test_unnamed_word_cutting_cannot_be_written(every_kind: dict[str, Tokenizer], tmp_path: Path) -> None:
    split: dict[str, Any] = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    words = {"type": "Sequence", "pretokenizers": [split, GPT2_WORDS]}
    raw = bpe_json(every_kind["json-bpe"].vocabulary(), words)
    tokenizer = tokenizers.load(tokenizers.find(write_json(tmp_path / "t.json", raw)))
    assert tokenizer.decode(tokenizer.encode("axxb", bos=False)) == "axxb"
    with pytest.raises(Unsupported, match="no name"):
        tokenizer.vocabulary()


def test_white_space_is_cut_in_one_pass() -> None:
    """As often as Meta's own pattern would cut it, without trying that at every space of every shorter run."""
    for text in (" " * 24_999, " " * 25_000, " " * 25_001, "a" + " \n" * 40_000 + "b" + " " * 50_000, ""):
        assert list(_cuts(text)) == [match.end() for match in re.finditer(r"\s{25000}(?=\s)", text)]
    started = process_time()
    assert list(_cuts((" " * 24_999 + "a") * 40)) == []
    assert process_time() - started < 1.0
