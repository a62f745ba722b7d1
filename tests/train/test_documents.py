"""Documents: where a text is cut, what is held out, and that each token is learned once, beside its own text alone."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from pronk.errors import BadFile, ModelNotFound, PronkError
from pronk.tokenizer.spm import SpmTokenizer
from pronk.train.data import documents, vocabulary
from pronk.train.data.encoded import encoded
from pronk.train.data.examples import Encoder
from pronk.train.data.records import Record, Records
from pronk.train.objectives import pretraining
from pronk.train.objectives.pretraining import Pretraining

TALES = "one one\ntwo\n<|endoftext|>\n\nthree <|endoftext|> three\n<|endoftext|>  \n<|endoftext|>\nfour"


@pytest.fixture(scope="module")
def codec() -> SpmTokenizer:
    return vocabulary.train(["the theme of the other; then the theory"], 275)


def written(tmp_path: Path, content: bytes | str, name: str = "text.txt") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


@pytest.mark.parametrize("text", [TALES, "\ufeff" + TALES, TALES.replace("\n", "\r\n")], ids=["plain", "BOM", "CRLF"])
def test_lines_of_their_own_part_documents(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    assert documents.read(path) == ["one one\ntwo", "three <|endoftext|> three", "four"]
    assert documents.read(path, "two") == ["one one", TALES.partition("two\n")[2]]


def test_records_are_documents(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(json.dumps({"text": text}) + "\n" for text in ("a", "b\nc")), "tales.jsonl")
    assert documents.read(path) == ["a", "b\nc"]
    path = written(tmp_path, '{"prompt": "a", "completion": "b"}\n', "tales.jsonl")
    with pytest.raises(BadFile, match=r"line 1: prompt\+completion is what pronk .*; here it is text$"):
        documents.read(path)


def test_a_folder_is_documents(tmp_path: Path) -> None:
    """Each file one or several, the files by their names."""
    (tmp_path / "more").mkdir()
    written(tmp_path, TALES)
    written(tmp_path, "five\n", "more/a.txt")
    written(tmp_path, "zero", "a.rst")
    assert documents.read(str(tmp_path)) == ["zero", "five", "one one\ntwo", "three <|endoftext|> three", "four"]
    written(tmp_path, b"\0", "more/b")
    with pytest.raises(BadFile, match=r"more.b.*is no text"):
        documents.read(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"<|endoftext|>\n", "holds no text"),
        (b"a text\0", "byte 6: is no text"),
        (b"\x7fELF\x02\x01\x01\x00", "byte 7: is no text"),
        ("Größe".encode("latin-1"), r"not UTF-8 text \(byte 2\); convert it first"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        documents.read(written(tmp_path, content))


def test_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        documents.read(str(tmp_path / "text.txt"))
    with pytest.raises(BadFile, match="holds no text"):
        documents.read(str(tmp_path))
    path = written(tmp_path, "a" * 1000)
    monkeypatch.setattr("pronk.system.free_memory", lambda: 1000)
    with pytest.raises(PronkError, match=r"training on it needs .* are free; take a part of the text"):
        documents.read(path)


def test_the_end_is_held_out() -> None:
    """Of many documents whole ones, of few the last lines: and nothing is in both, or in neither."""
    many = [f"tale {n}" * 5 for n in range(20)]
    assert documents.held_out(many, 0.1) == (many[:18], many[18:])
    book = ["a line\n" * 100, "last\n" * 20]
    begin, end = documents.held_out(book, 0.25)
    assert ("".join(begin + end), len(begin), len(end)) == ("".join(book), 1, 2)
    assert begin[0].endswith("\n")
    assert 0.2 < sum(map(len, end)) / sum(map(len, book)) <= 0.25
    assert documents.held_out(book, 0.0) == (book, [])
    assert documents.held_out(["one line"], 0.25) == (["one li"], ["ne"])


@pytest.mark.parametrize("ctx_size", [4, 7, 1000])
def test_each_token_is_learned_once_in_its_own_document(codec: SpmTokenizer, ctx_size: int) -> None:
    texts = ["the theme of the theme\n\nof others", "then <s> and </s> are text", "x"]
    items = [Record("text", {"text": text}, f"document {number}") for number, text in enumerate(texts, 1)]
    found, names = encoded(Pretraining(), Encoder(codec, ctx_size), Records("tales.txt", items))
    assert len(found) == len(names) > 2
    learned = [example.ids[example.loss_mask].tolist() for example in found]
    of_texts = [[*codec.encode(text, bos=False, special=False), 1] for text in texts]
    assert [*chain(*learned)] == [*chain(*of_texts)]
    ends = [n for n, ids in enumerate(learned) if ids[-1] == 1]
    assert len(ends) == len(texts)  # none goes on in the next: <s> as text is no end either
    for example in found:
        assert example.ids[0] == 1
        assert not example.loss_mask[0]
        assert 1 <= example.targets <= ctx_size
    assert names[-1] == "tales.txt: document 3"
    assert names[0] == "tales.txt: document 1" + ", part 1" * (len(names) > len(texts))


def test_long_documents_are_encoded_by_stretches(codec: SpmTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after lines, or anywhere in longer ones; nothing gets lost."""
    monkeypatch.setattr(pretraining, "_STRETCH", 16)
    text = "the theme\nof the other\n" + "then" * 12
    assert "".join(pretraining._stretches(text)) == text
    assert list(pretraining._stretches(text))[:2] == ["the theme\n", "of the other\n"]
    told: list[int] = []
    encoder = Encoder(codec, 1000, heard=told.append)
    (found,) = Pretraining().encode(Record("text", {"text": text}, ""), encoder)
    assert codec.decode(found.ids.tolist()).replace(" ", "") == text.replace(" ", "")
    assert sum(told) == len(text)
    assert len(told) == 5
    assert found.ids.dtype == np.int32
