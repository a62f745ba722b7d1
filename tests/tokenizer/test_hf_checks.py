"""tokenizer.json: what would swell a text, fail or panic in the library is refused before the library sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kinds import GPT2_WORDS, added_token, bpe_json, small_bpe, write_json

from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, PronkError, Unsupported
from pronk.tokenizer import Tokenizer


def load(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Tokenizer:
    raw = bpe_json(small_bpe(), GPT2_WORDS) | changes
    if model is not None:
        raw["model"] = (raw["model"] if "type" not in model else {}) | {"vocab": raw["model"]["vocab"]} | model
    # The model first, by which such a file is known.
    path = write_json(folder / "tokenizer.json", {"model": raw["model"], **raw})
    return tokenizers.load(tokenizers.find(path))


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(*pieces: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "growth": ({"normalizer": sequence(*[replace("a" * 10)] * 2)}, "100 times"),
    "growth, nested": ({"normalizer": sequence(sequence(replace("a" * 5)), sequence(replace("a" * 5)))}, "25 times"),
    "growth by nothing": ({"normalizer": replace("a" * 20, Regex="x*")}, "21 times"),
    "long prefix": ({"normalizer": {"type": "Prepend", "prepend": "a" * 100}}, "64 characters"),
    "prefixes": ({"normalizer": sequence(*[{"type": "Prepend", "prepend": "a"}] * 30)}, "16 steps"),
    "charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "trie"),
    "charsmap in what": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "base64"),
    "unheard": ({"normalizer": {"type": "Unheard\n"}}, "Unheard"),
    "bytes of bytes": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [GPT2_WORDS] * 2}}, "twice"),
    "no pattern": ({"normalizer": replace("", String="")}, "no pattern"),
    "long pattern": ({"pre_tokenizer": split("a" * 5000)}, "no pattern"),
    "backtracking": ({"pre_tokenizer": split("(a+)+b")}, "can take for ever"),
    "text twice": ({"post_processor": template(TEXT, TEXT)}, "twice"),
    "undefined token": ({"post_processor": template({"SpecialToken": {"id": "q", "type_id": 0}}, TEXT)}, "'q'"),
    "special tokens": ({"added_tokens": [added_token(265, "a" * 2_000_000)]}, "1 MB"),
    "dropout": ({"model": {"dropout": 0.5}}, "dropout"),
    "prefix": ({"model": {"continuing_subword_prefix": "abcdef"}}, "continuing_subword_prefix"),
    "unigram": ({"model": {"type": "Unigram", "vocab": [["a" * 2_000_000, 0.0]], "unk_id": 0}}, "Unigram"),
    "words": ({"model": {"type": "WordLevel", "unk_token": "[UNK]"}}, r"'\[UNK\]' is not"),
    "pieces": ({"model": {"type": "WordPiece", "unk_token": "[UNK]"}}, r"'\[UNK\]' is not"),
    "words, none": ({"model": {"type": "WordLevel"}}, "None is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes, problem = BAD[name]
    with pytest.raises((BadFile, Unsupported), match=problem) as caught:
        load(tmp_path, **changes)
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 200
    assert capfd.readouterr().err == ""  # where panics would report themselves


def test_what_published_files_ask_for_is_allowed(tmp_path: Path) -> None:
    normal = sequence({"type": "NFKC"}, {"type": "Lowercase"}, replace('"', String="``"), replace(" ", Regex=" {2,}"))
    assert load(tmp_path, normalizer=normal).encode("``A  B", bos=False) == load(tmp_path).encode('"a b', bos=False)


@pytest.mark.parametrize(
    "model", [{"unk_token": "?", "vocab": {"a": 0}, "merges": []}, {"type": "Unigram", "vocab": []}]
)
def test_a_character_without_a_token_is_an_error(model: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PronkError, match="cannot encode"):
        load(tmp_path, model).encode("é", bos=False)
