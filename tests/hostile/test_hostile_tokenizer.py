"""Tokenizer files that lie: one PronkError each, fast and without memory, and no crash in the libraries behind."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutations import modestly, soon, survives
from tokenizer.kinds import (
    GPT2_WORDS,
    bpe_json,
    gguf_source,
    llama2c_file,
    small_bpe,
    small_spm_records,
    spm_json,
    tiktoken_lines,
)

from pronk import checkpoint
from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, ModelNotFound, PronkError
from pronk.tokenizer import chat, spm
from pronk.tokenizer.files import identify, vocabulary_size
from pronk.tokenizer.vocabulary import MAX_VOCABULARY, TokenizerKind, TokenizerSource, TokenType

EXAMPLES = 1000
HUGE = (1 << 63) - 1
LETTERS = [bytes((b,)) for b in range(256)]


def load(path: Path, kind: TokenizerKind) -> tokenizers.Tokenizer:
    return tokenizers.load(TokenizerSource(kind, path))


def small_vocabulary(folder: Path, count_of_bytes: int = 256) -> Any:
    path = folder / "small.bin"
    path.write_bytes(llama2c_file(small_spm_records(count_of_bytes)))
    return load(path, "llama2c").vocabulary()


def valid_files(folder: Path) -> dict[TokenizerKind, list[bytes]]:
    """The SentencePiece ones with the 256 byte pieces first, then without, which is quicker to break."""
    return {
        "sentencepiece": [spm.model_proto(small_vocabulary(folder, n), spm.SpmRules(), True) for n in (256, 0)],
        "tiktoken": [tiktoken_lines([*LETTERS, b"in", b"the"])],
        "llama2c": [llama2c_file(small_spm_records(n)) for n in (256, 0)],
        "tokenizer.json": [json.dumps(raw).encode() for raw in (bpe_json(small_bpe(), GPT2_WORDS), spm_json())],
    }


KINDS = ("sentencepiece", "tiktoken", "llama2c", "tokenizer.json")


def use(tokenizer: tokenizers.Tokenizer) -> None:
    """What loaded must also work, or say why not."""
    ids = tokenizer.encode("the <s> é😀\n12", bos=False)
    tokenizer.decode([i for i in [*ids, 0, tokenizer.vocab_size - 1] if i < tokenizer.vocab_size])
    if tokenizer.chat_template is not None:
        chat.ChatTemplate(tokenizer.chat_template).render([])
    tokenizer.vocabulary()


def endure(act: Callable[[], object]) -> bool:
    """Whether it worked; the only other thing it may do is to raise a PronkError of one line."""
    problem = ""
    with modestly(seconds=2.0):
        try:
            act()
        except PronkError as error:
            problem = str(error) or "?"
    assert "\n" not in problem
    assert len(problem) < 500
    return not problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_valid_ones_are_valid(kind: TokenizerKind, tmp_path: Path) -> None:
    """Else every test here would pass for the wrong reason."""
    for data in valid_files(tmp_path)[kind]:
        path = tmp_path / "t"
        path.write_bytes(data)
        assert identify(path) == kind
        tokenizer = load(path, kind)
        assert tokenizer.vocab_size == vocabulary_size(path)
        assert tokenizer.decode(tokenizer.encode("the té", bos=False)) == "the té"
        use(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_at_every_byte(kind: TokenizerKind, tmp_path: Path) -> None:
    path = tmp_path / "t"
    for data in valid_files(tmp_path)[kind][-1:]:
        loaded = 0
        assert endure(lambda data=data: (path.write_bytes(data), load(path, kind)))
        for length in range(0, len(data), 1 if kind in ("sentencepiece", "llama2c") else 7):
            path.write_bytes(data[:length])
            identify(path)
            loaded += endure(lambda: load(path, kind))
        # A cut between two records or lines leaves a shorter file, and a protobuf may end after any field.
        assert loaded < len(data) / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_damage(kind: TokenizerKind, tmp_path: Path) -> None:
    path = tmp_path / "t"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        endure(look)

    def look() -> None:
        identify(path)
        with suppress(PronkError):
            vocabulary_size(path)
        use(load(path, kind))

    files = valid_files(tmp_path)[kind]
    assert survives(EXAMPLES, [(data, len(data)) for data in files], check) >= EXAMPLES / 2


@pytest.mark.parametrize("model", ["spm", "bpe"])
def test_random_damage_to_gguf_metadata(model: str, tmp_path: Path) -> None:
    """Damaged as JSON, so that names, types, lists and numbers all suffer."""
    vocabulary = small_vocabulary(tmp_path) if model == "spm" else small_bpe()
    source = gguf_source(vocabulary)
    valid = json.dumps(source.settings, ensure_ascii=False).encode()
    parsed = 0

    def check(data: bytes) -> None:
        nonlocal parsed
        try:
            settings = json.loads(data.decode("utf-8", "surrogatepass"))
        except ValueError:
            return
        if isinstance(settings, dict):
            parsed += 1
            endure(lambda: use(tokenizers.load(TokenizerSource("gguf", source.path, settings))))

    survives(2 * EXAMPLES, [(valid, len(valid))], check)
    assert parsed > EXAMPLES / 8  # the rest is no JSON any more


NAN = float("nan")
BAD_METADATA: list[tuple[str, dict[str, Any], str]] = [
    ("spm", {"tokens": []}, "vocabulary|scores"),
    ("spm", {"tokens": None}, "tokens"),
    ("spm", {"scores": [NAN] * 273}, "scores"),
    ("spm", {"scores": [float("inf")] * 273}, "scores"),
    ("spm", {"scores": [1e300] * 273}, "SentencePiece"),
    ("spm", {"scores": [0.0]}, "scores"),
    ("spm", {"scores": "a" * 273}, "scores"),
    ("spm", {"token_type": [1] * 273}, "unknown"),
    ("spm", {"token_type": [1]}, "types"),
    ("spm", {"token_type": [[]] * 273}, "token_type"),
    ("spm", {"bos_token_id": 273}, "bos"),
    ("spm", {"bos_token_id": HUGE}, "bos"),
    ("spm", {"eos_token_id": -7}, "eos"),
    ("spm", {"eos_token_id": "x"}, "eos"),
    ("spm", {"unknown_token_id": 273}, "unk"),
    ("spm", {"unknown_token_id": -7}, "unk"),
    ("spm", {"add_bos_token": 1}, "add_bos"),
    ("spm", {"add_space_prefix": "no"}, "add_space"),
    ("bpe", {"tokens": []}, "vocabulary"),
    ("bpe", {"tokens": ["a"] * 268}, "spelled as"),
    ("bpe", {"tokens": ["\ud800"] * 268}, "UTF-8"),
    ("bpe", {"tokens": [1, 2]}, "tokens"),
    ("bpe", {"merges": None}, "merges"),
    ("bpe", {"merges": ["Ġ nothing"]}, "merges"),
    ("bpe", {"merges": ["Ġt"]}, "merge 0"),
    ("bpe", {"merges": ["a b c"]}, "merge 0"),
    ("bpe", {"merges": ["Ġ t", 5]}, "merges"),
    ("bpe", {"unknown_token_id": 268}, "unk"),
    ("bpe", {"pre": 5}, "pre"),
    ("bpe", {"pre": "x" * 10}, "xxxxxxxxxx"),
    ("bpe", {"model": "bert"}, "bert"),
    ("bpe", {"model": None}, "None"),
    ("bpe", {"add_eos_token": True}, "add_eos_token"),
]


@pytest.mark.parametrize(("model", "change", "problem"), BAD_METADATA, ids=lambda v: str(v)[:40])
def test_gguf_metadata_that_lies(model: str, change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    vocabulary = small_vocabulary(tmp_path) if model == "spm" else small_bpe()
    source = gguf_source(vocabulary, **change)
    with modestly(), pytest.raises(PronkError, match=problem) as caught:
        tokenizers.load(source)
    assert len(str(caught.value)) < 300


def refused(path: Path, kind: TokenizerKind, data: bytes, problem: str = ".") -> None:
    path.write_bytes(data)
    with modestly(), pytest.raises(BadFile, match=problem):
        load(path, kind)


def test_llama2c_files_that_lie(tmp_path: Path) -> None:
    path, records = tmp_path / "t", small_spm_records()
    refused(path, "llama2c", b"", "truncated")
    refused(path, "llama2c", llama2c_file([]), "0 tokens")
    for length in (-1, 0x7FFFFFFF, 6):
        refused(path, "llama2c", struct.pack("<ifi", 7, 0.0, length) + b"<unk>", "token 0 at byte 8")
    refused(path, "llama2c", llama2c_file([*records, (NAN, b"x")]), "not finite")
    refused(path, "llama2c", llama2c_file([*records, (0.0, b"\xff\xfe")]), "UTF-8")
    refused(path, "llama2c", llama2c_file([*records, records[-1]]), "spelled as token")
    refused(path, "llama2c", llama2c_file([*records, (0.0, b"")]), "empty")
    refused(path, "llama2c", llama2c_file([*records, (0.0, b"a\0b")]), "NUL")
    refused(path, "llama2c", b"\x07\0\0", "truncated")


def piece(text: bytes, score: float = 0.0, kind: int = 1) -> bytes:
    body = b"\x0a%c" % len(text) + text + b"\x15" + struct.pack("<f", score) + b"\x18%c" % kind
    return b"\x0a%c" % len(body) + body


def test_sentencepiece_files_that_lie(tmp_path: Path) -> None:
    path, unknown = tmp_path / "t", piece(b"<unk>", kind=2)
    refused(path, "sentencepiece", b"", "empty")
    refused(path, "sentencepiece", b"\x0a" + b"\xff" * 9 + b"\x01", "does not fit")
    refused(path, "sentencepiece", b"\x0a" + b"\xff" * 20, "64 bits")
    refused(path, "sentencepiece", b"\x0f", "wire type 7")
    refused(path, "sentencepiece", unknown + piece(b"\xff\xfe"), "piece 1: not UTF-8")
    refused(path, "sentencepiece", unknown + piece(b"a", NAN), "not finite")
    refused(path, "sentencepiece", unknown + piece(b"a", kind=9), "piece 1")
    refused(path, "sentencepiece", unknown + piece(b"a") * 2, "spelled as token 1")
    refused(path, "sentencepiece", piece(b"a"), "unknown")
    refused(path, "sentencepiece", unknown * 2, "spelled as")
    refused(path, "sentencepiece", unknown + piece(b"<0x41>", kind=6), "SentencePiece")  # not all 256 bytes
    refused(path, "sentencepiece", unknown + piece(b"no", kind=6), "not <0xNN>")
    refused(path, "sentencepiece", unknown + b"\x10\x05", "number where a message")
    for charsmap in (b"x", b"\xff\xff\xff\xff", struct.pack("<I", 1024) + b"\xff" * 1024 + b"\0", b"\0\0\0\0\0"):
        refused(path, "sentencepiece", _with_charsmap(unknown, charsmap), "trie")


def _with_charsmap(pieces: bytes, charsmap: bytes) -> bytes:
    return pieces + spm._bytes_field(3, spm._bytes_field(2, charsmap))


def changed(**changes: Any) -> bytes:
    """A valid tokenizer.json with keys, or keys of its model, replaced."""
    raw = bpe_json(small_bpe(), GPT2_WORDS)
    for key, value in changes.items():
        if key in raw["model"] and key != "type":
            raw["model"][key] = value
        else:
            raw[key] = value
    return json.dumps(raw).encode()


def test_json_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for data in (b"", b"{", b"[]", b"\xff", b'{"model": {"vocab": 5}}', b'{"model": 1e999}'):
        refused(path, "tokenizer.json", data)
    refused(path, "tokenizer.json", b"[" * 200_000, "nested")
    refused(path, "tokenizer.json", b'{"model": {"vocab": ' + b'{"a":' * 40_000, "nested")
    nested = changed(normalizer=0).replace(b'"normalizer": 0', b'"normalizer": ' + b"[" * 900 + b"]" * 900)
    refused(path, "tokenizer.json", nested)
    refused(path, "tokenizer.json", changed(vocab={}))
    refused(path, "tokenizer.json", changed(vocab={"a": -1}), "id -1")
    refused(path, "tokenizer.json", changed(vocab={"a": HUGE}), "id 9223372036854775807")
    refused(path, "tokenizer.json", changed(vocab={"a": 1.5}), "id 1.5")
    refused(path, "tokenizer.json", changed(merges=["a nothing"]), "out of vocabulary")
    refused(path, "tokenizer.json", changed(merges=[["a"]]))
    refused(path, "tokenizer.json", changed(merges=[5]))


def test_json_that_wants_memory(tmp_path: Path) -> None:
    """Padding to a thousand million tokens is the file's wish, not ours; and prompts are never cut."""
    path = tmp_path / "t"
    padding: dict[str, Any] = {"strategy": {"Fixed": 1_000_000_000}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    path.write_bytes(changed(padding=padding, truncation=cut))
    with modestly():
        assert len(load(path, "tokenizer.json").encode("a b c d", bos=False)) > 3


BOMBS: dict[str, tuple[TokenizerKind, bytes, bytes, int]] = {
    "empty pieces": ("sentencepiece", b"", b"\n\0", 4_000_000),
    "fields of two bytes": ("sentencepiece", b"", b"\x40\0", 4_000_000),
    "fields within a piece": ("sentencepiece", b"\n\x80\x92\xf4\x01", b"\x40\0", 2_000_000),
    "fields of the trainer": ("sentencepiece", b"\x12\x80\x92\xf4\x01", b"\x40\0", 2_000_000),
    "trainers": ("sentencepiece", b"", b"\x12\4\x08\1\x08\1", 1_000_000),
    "lists": ("tokenizer.json", b'{"model": {"vocab": [', b"[],", 6_000_000),
    "objects": ("tokenizer.json", b'{"model": {"vocab": [', b"{},", 6_000_000),
    "numbers": ("tokenizer.json", b'{"model": {"vocab": [', b"1,", 9_000_000),
    "keys": ("tokenizer.json", b'{"model": {"vocab": {', b'"":0,', 4_000_000),
    "keys within bounds": ("tokenizer.json", b'{"model": {"vocab": {', b'"":0,', 399_000),
    "one wide character": ("tokenizer.json", b'{"model": {"vocab": {"\xf0\x9f\x98\x80', b"aaaaaaaa", 2_000_000),
    "empty lines": ("tiktoken", b"YQ== 0\n", b"\n", 8_000_000),
    "carriage returns": ("tiktoken", b"YQ== 0\n", b"\r", 8_000_000),
    "empty records": ("llama2c", b"\7\0\0\0" + struct.pack("<fi", 0.0, 5) + b"<unk>", bytes(8), 1_000_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_many_small_parts(name: str, tmp_path: Path) -> None:
    kind, head, part, count = BOMBS[name]
    path = tmp_path / "t"
    path.write_bytes(head + part * count)
    for act in (
        lambda: load(path, kind),
        lambda: tokenizers.load(tokenizers.find(path)),
        lambda: vocabulary_size(path),
    ):
        with soon(1.5), suppress(BadFile):
            act()
    with modestly(seconds=10.0, megabytes=150), pytest.raises(BadFile):
        load(path, kind)


def test_the_largest_vocabulary_is_refused_soon(tmp_path: Path) -> None:
    """One token too many of every kind, after as many as are allowed; found only by reading them all."""
    words = [b"%06d" % i for i in range(MAX_VOCABULARY + 1)]
    files: dict[TokenizerKind, bytes] = {
        "sentencepiece": b"".join(map(piece, words)),
        "tiktoken": tiktoken_lines(words),
        "llama2c": llama2c_file([(0.0, word) for word in words]),
        "tokenizer.json": changed(vocab={word.decode(): i for i, word in enumerate(words)}),
    }
    for kind, data in files.items():
        (tmp_path / "t").write_bytes(data)
        with soon(3.0), pytest.raises(BadFile):
            load(tmp_path / "t", kind)


def test_files_beside_a_model_are_hardly_read(tmp_path: Path, data: Path) -> None:
    """llama2.c's model names no tokenizer, so whatever lies beside it is looked at."""
    model = tmp_path / "model.bin"
    model.write_bytes((data / "stories260K" / "stories260K.bin").read_bytes())
    bomb = b'{"model": {"vocab": [' + b"[]," * 100_000
    for i in range(20):
        (tmp_path / f"tok{i}.json").write_bytes(bomb if i % 2 else bomb * 70)
    (tmp_path / "tokens.bin").write_bytes((data / "stories260K" / "tok512.bin").read_bytes())
    with soon(3.0):
        source = checkpoint.open(model).tokenizer
    assert source is not None
    assert source.path.name == "tokens.bin"


def test_control_tokens_cost_no_more_than_others(tmp_path: Path) -> None:
    """Once one alternation of all of them, which a text then tried at every character."""
    vocabulary = small_vocabulary(tmp_path)
    words = tuple(f"<control {i}>" for i in range(50_000))
    many = replace(
        vocabulary,
        tokens=vocabulary.tokens + words,
        types=vocabulary.types + (TokenType.CONTROL,) * len(words),
        scores=vocabulary.scores + (0.0,) * len(words),
    )
    with soon(3.0):
        tokenizer = spm.SpmTokenizer("gguf", tmp_path, many)
        ids = tokenizer.encode("<" * 100_000 + words[-1], bos=False)
    assert ids[-1] == tokenizer.vocab_size - 1


def test_huge_files_are_not_read(tmp_path: Path) -> None:
    for head in (b'{"model": {', b"YQ== 0\n", struct.pack("<ifi", 7, 0.0, 5) + b"<unk>", piece(b"<unk>", kind=2)):
        path = tmp_path / "t"
        path.write_bytes(head)
        with path.open("r+b") as file:
            file.truncate(1 << 40)  # sparse
        with modestly(seconds=3.0, megabytes=10):
            identify(path)
            with pytest.raises(BadFile, match="larger than"):
                vocabulary_size(path)


def test_settings_that_lie(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    path.write_bytes(changed())
    bad: list[Any] = [
        {"bos_token": 5},
        {"bos_token": {"content": []}},
        {"chat_template": 5},
        {"add_bos_token": "yes"},
        {"add_eos_token": True},
        [],
    ]
    for settings in bad:
        config.write_text(json.dumps(settings))
        with modestly(), pytest.raises(PronkError):
            tokenizers.load(tokenizers.find(tmp_path))
    config.write_bytes(b"[" * 100_000)
    with modestly(), pytest.raises(BadFile, match="nested"):
        tokenizers.find(tmp_path)
    config.write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadFile, match="UTF-8"):
        tokenizers.find(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        tokenizers.find(tmp_path / "absent")
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        tokenizers.find(tmp_path)
    (tmp_path / "x").write_text("text")
    with pytest.raises(BadFile, match="not a tokenizer"):
        tokenizers.find(tmp_path / "x")
    with pytest.raises(BadFile):
        load(tmp_path / "absent", "sentencepiece")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"])
def test_what_is_no_file_is_not_absent(name: str, tmp_path: Path) -> None:
    """A pipe that is opened waits for ever, and one that is passed over leaves another tokenizer in its place."""
    (tmp_path / "tokenizer.json").write_bytes(changed())
    path = tmp_path / name
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    path.unlink(missing_ok=True)
    makers = (lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to(path), lambda: path.symlink_to("absent"))
    for make in makers:
        make()
        with pytest.raises(BadFile, match=rf"{name}: is not a regular file"):
            tokenizers.find(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_special_tokens_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    spm_data = spm.model_proto(small_vocabulary(tmp_path), spm.SpmRules(), True)
    for name, data in (("tokenizer.json", changed()), ("tokenizer.model", spm_data)):
        (tmp_path / name).write_bytes(data)
        for key in ("bos_token", "eos_token", *(["unk_token"] if data == changed() else [])):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: {"content": "no\npe" * 1000}}))
            with pytest.raises(BadFile, match=rf"tokenizer_config {key}: 'no\\npe.* not in the vocabulary") as caught:
                tokenizers.load(tokenizers.find(tmp_path))
            assert len(str(caught.value).removeprefix(str(tmp_path))) < 200
        (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "nope", "bos_token": ""}')
        assert tokenizers.load(tokenizers.find(tmp_path)).pad_id is None
        (tmp_path / name).unlink()


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + changed())
    assert identify(path) == "tokenizer.json"
    refused(path, "tokenizer.json", path.read_bytes(), "byte order mark")
    refused(path, "tokenizer.json", changed().decode().encode("utf-16"), "UTF-8")


def test_template_lists_with_odd_names(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(changed())
    odd = [{"name": []}, {"name": {}}, {"name": None, "template": 1}, 5, None, [], {"template": "x"}]
    for last, expected in (
        ({"name": "default", "template": "own"}, "own"),
        ({"name": "tool_use", "template": "x"}, None),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [*odd, last]}))
        assert tokenizers.find(tmp_path).chat_template == expected
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": 5}]}))
    with pytest.raises(BadFile, match="chat_template"):
        tokenizers.find(tmp_path)


def test_names_from_files_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    folder = tmp_path / "a\n\x1b[31m"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(changed(pre_tokenizer={"type": "\x1b[2J\n" * 2000}))
    with pytest.raises(PronkError) as caught:
        tokenizers.load(tokenizers.find(folder))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    for error in (BadFile("p\n" * 3000, "x\r" * 3000, field="\x07" * 3000), PronkError("\u202e\ud800" * 5000)):
        assert str(error).isprintable()
        assert len(str(error)) < 2100
