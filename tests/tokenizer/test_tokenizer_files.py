"""Telling tokenizer files apart, by content alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kinds import GPT2_WORDS, bpe_json, llama2c_file, small_bpe, small_spm_records, tiktoken_lines, write_json

from pronk.errors import BadFile
from pronk.tokenizer.files import identify, vocabulary_size

LETTERS = [bytes((b,)) for b in range(256)]


def test_real_files(data: Path) -> None:
    folder = data / "llama-tokenizers"
    expected = {
        folder / "llama2.tokenizer.model": ("sentencepiece", 32000),
        folder / "llama2.tokenizer.bin": ("llama2c", 32000),
        folder / "llama3.tokenizer.bin": ("llama2c", 128256),
        data / "stories260K" / "tok512.bin": ("llama2c", 512),
    }
    assert {path: (identify(path), vocabulary_size(path)) for path in expected} == expected


def test_models_and_texts_are_no_tokenizers(data: Path, smollm2: Path) -> None:
    others = [
        data / "stories260K" / "stories260K.bin",
        data / "stories260K" / "stories260K_q80.bin",
        data / "wikitext-2" / "test.txt",
        data / "alpaca" / "alpaca_data_200.json",
        data,
        data / "no such file",
        smollm2,
    ]
    assert [identify(path) for path in others] == [None] * len(others)


def test_names_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tiktoken_lines(LETTERS))
    assert identify(path) == "tiktoken"
    assert vocabulary_size(path) == 512  # 256 special tokens follow the file's own
    path.write_bytes(llama2c_file(small_spm_records()))
    assert identify(path) == "llama2c"
    path = write_json(tmp_path / "tokenizer.model", bpe_json(small_bpe(), GPT2_WORDS))
    assert identify(path) == "tokenizer.json"
    assert vocabulary_size(path) == len(small_bpe().tokens)


def test_json_that_is_no_tokenizer(tmp_path: Path) -> None:
    for raw in ({"model_type": "llama"}, {"model": "BPE"}, {"added_tokens_decoder": {}}):
        assert identify(write_json(tmp_path / "config.json", raw)) is None


def test_the_model_may_stand_far_behind(tmp_path: Path) -> None:
    raw = bpe_json(small_bpe(), GPT2_WORDS)
    raw = {"added_tokens": raw["added_tokens"], "padding_of_a_kind": "x" * 100_000, **raw}
    assert identify(write_json(tmp_path / "t", raw)) == "tokenizer.json"


def test_a_size_counts_added_tokens(tmp_path: Path) -> None:
    raw = bpe_json(small_bpe(), GPT2_WORDS)
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 999, "content": "<|far|>"})
    assert vocabulary_size(write_json(tmp_path / "t", raw)) == 1000


def test_no_tokenizer_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("plain text")
    with pytest.raises(BadFile, match="no tokenizer"):
        vocabulary_size(path)
