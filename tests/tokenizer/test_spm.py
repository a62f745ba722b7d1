"""SentencePiece vocabularies against the library on the original file, llama2.c's own algorithm, and transformers."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import awkward
import pytest
from kinds import gguf_source, llama2c_file, small_spm_records, write_json
from run_c import RunCTokenizer

from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.spm_file import parse
from pronk.tokenizer.vocabulary import TokenType


@pytest.fixture(scope="module")
def reference(data: Path) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(str(data / "llama-tokenizers" / "llama2.tokenizer.model"))


@pytest.mark.parametrize("kind", ["spm", "llama2c", "gguf-spm"])
def test_the_library_on_the_original_file(kind: str, every_kind: dict[str, Tokenizer], reference: Any) -> None:
    """Three files of one vocabulary; two of them we rebuilt the model from."""
    tokenizer = every_kind[kind]
    for text in awkward.strings(3_000):
        ids = reference.encode(text)
        assert tokenizer.encode(text, bos=False, special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids), repr(text)


@pytest.mark.parametrize("name", ["llama-tokenizers/llama2.tokenizer.bin", "stories260K/tok512.bin"])
def test_llama2c_s_own_algorithm(name: str, data: Path) -> None:
    tokenizer = tokenizers.load(tokenizers.find(data / name))
    reference = RunCTokenizer(data / name)
    for text in awkward.strings(700, seed=8):
        if "\0" in text:
            continue  # ends a string in C
        ids = reference.encode(text)
        assert tokenizer.encode(text, special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == b"".join(map(reference.piece, ids, ids[1:])).decode("utf-8", "replace")


@pytest.fixture(scope="module", params=[True, False], ids=["legacy", "not legacy"])
def hugging_face(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' own reading of Llama 2's tokenizer.model; "legacy" is a space after each special token."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("llama2")
    shutil.copy(data / "llama-tokenizers" / "llama2.tokenizer.model", folder / "tokenizer.model")
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": request.param}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


def test_transformers(hugging_face: Any) -> None:
    """Special tokens in the text included. Left out is what transformers 5 does unlike SentencePiece: it puts no space
    before text that begins with one, and merges runs of spaces first although they score last."""
    parts = re.compile("<s>|</s>|<unk>")
    texts = [t for t in awkward.strings(3_000, seed=9) if "  " not in t.replace("\u2581", " ")]
    texts = [t for t in texts if not any(part[:1] in (" ", "\u2581") for part in parts.split(t))]
    assert len(texts) > 1_500
    tokenizer = tokenizers.load(tokenizers.find(Path(hugging_face.name_or_path)))
    for text in texts:
        ids = hugging_face(text).input_ids
        assert tokenizer.encode(text) == (ids[1:] if ids[:2] == [1, 1] else ids), repr(text)


def test_its_tokenizer_json(
    every_kind: dict[str, Tokenizer], hugging_face: Any, reference: Any, tmp_path: Path
) -> None:
    """The layout that was published with Llama 2, merges in the order of their scores; and a GGUF made from that."""
    raw = json.loads(hugging_face.backend_tokenizer.to_str())
    raw["model"]["merges"].sort(key=lambda pair: -reference.get_score(reference.piece_to_id("".join(pair))))
    raw["pre_tokenizer"] = None
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    raw["normalizer"] = {"type": "Sequence", "normalizers": steps}
    tokenizer = tokenizers.load(tokenizers.find(write_json(tmp_path / "tokenizer.json", raw)))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id, tokenizer.add_bos) == (1, (2,), 0, True)
    rebuilt = tokenizers.load(gguf_source(tokenizer.vocabulary()))  # scores from the order of its merges
    for text in awkward.strings(2_000, seed=12):
        ids = every_kind["spm"].encode(text)
        assert tokenizer.encode(text) == ids, repr(text)
        assert rebuilt.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == rebuilt.decode(ids) == every_kind["spm"].decode(ids)


def test_llama2c_text_from_bos_has_no_space_first(data: Path) -> None:
    tokenizer = tokenizers.load(tokenizers.find(data / "stories260K" / "tok512.bin"))
    ids = tokenizer.encode("Once upon a time, there was a little girl")
    assert tokenizer.decode(ids) == "Once upon a time, there was a little girl"
    stream = tokenizer.stream_decoder(previous=[tokenizer.bos_id])
    assert "".join(map(stream.feed, ids[1:])).startswith("Once upon")
    middle = tokenizer.stream_decoder(previous=ids[:3])
    assert "".join(map(middle.feed, ids[3:])).startswith(" a time")


def test_bytes_between_words(tmp_path: Path) -> None:
    """A run of byte pieces is UTF-8 only together; a word in between breaks it."""
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(llama2c_file(small_spm_records()))
    tokenizer = tokenizers.load(tokenizers.find(path))
    word = [token for _, token in small_spm_records()].index(b" the")
    euro = [byte + 3 for byte in "€".encode()]
    assert tokenizer.decode([1, *euro, word]) == "€ the"
    assert tokenizer.decode([1, word, *euro[:2], word, euro[2]]) == "the\ufffd the\ufffd"


def test_the_parser_sees_what_the_library_sees(data: Path, reference: Any) -> None:
    path = data / "llama-tokenizers" / "llama2.tokenizer.model"
    vocabulary, rules = parse(path, path.read_bytes())
    size = reference.get_piece_size()
    assert list(vocabulary.tokens) == [reference.id_to_piece(i) for i in range(size)]
    assert list(vocabulary.scores) == [reference.get_score(i) for i in range(size)]
    assert [t is TokenType.BYTE for t in vocabulary.types] == [reference.is_byte(i) for i in range(size)]
    assert [t is TokenType.CONTROL for t in vocabulary.types] == [reference.is_control(i) for i in range(size)]
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id) == (1, 2, 0, None)
    assert (rules.collapse_spaces, rules.charsmap, vocabulary.add_space_prefix) == (False, b"", True)


def test_settings_beside_the_file(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "llama-tokenizers" / "llama2.tokenizer.model", tmp_path / "tokenizer.model")
    config: dict[str, Any] = {
        "add_bos_token": False,
        "legacy": False,
        "eos_token": {"content": "<|im_end|>"},
        "added_tokens_decoder": {
            "2": {"content": "</s>", "special": True},
            "32000": {"content": "<|im_start|>", "special": True},
            "32001": {"content": "<|im_end|>", "special": True},
            "32002": {"content": "own word", "special": False},
        },
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.load(tokenizers.find(tmp_path))
    assert tokenizer.vocab_size == 32003
    assert tokenizer.eos_ids == (32001,)
    assert not tokenizer.add_bos
    assert tokenizer.chat_template == "yes"
    hello, bare = tokenizer.encode("Hello"), 10994  # with and without the space before it
    assert hello == [15043]
    assert tokenizer.encode("<|im_start|>Hello<|im_end|>") == [32000, bare, 32001]  # not legacy: no space within
    assert 32002 in tokenizer.encode("an own word here")
    assert tokenizer.decode(tokenizer.encode("an own word here")) == "an own word here"

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True}))
    with pytest.raises(Unsupported, match="add_eos_token"):
        tokenizers.load(tokenizers.find(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": "yes"}))
    with pytest.raises(BadFile, match="add_bos_token"):
        tokenizers.load(tokenizers.find(tmp_path))


def test_unigram_and_its_normalizer(tmp_path: Path) -> None:
    """A trained model with NFKC rules: the trie passes our check, and ids are the library's."""
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the cat number {i} sat on the ﬁne mat" for i in range(300)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=60, minloglevel=2, hard_vocab_limit=False
    )
    path = tmp_path / "m.model"
    reference = sentencepiece.SentencePieceProcessor(str(path))
    tokenizer = tokenizers.load(tokenizers.find(path))
    for sample in ("the cat", "ﬁne  mat ①", "Ａｂｃ", " x  y "):
        assert tokenizer.encode(sample, bos=False) == reference.encode(sample)
    with pytest.raises(Unsupported, match="unigram"):
        tokenizer.vocabulary()
    # One unit of the trie bent: the library would walk out of it.
    proto = path.read_bytes()
    vocabulary, rules = parse(path, proto)
    at = proto.index(rules.charsmap)
    (unit,) = struct.unpack_from("<I", proto, at + 4)
    bent = bytearray(proto)
    struct.pack_into("<I", bent, at + 4, unit | 0x7FFFFC00)
    with pytest.raises(BadFile, match="trie"):
        parse(path, bytes(bent))
    assert vocabulary.tokens
