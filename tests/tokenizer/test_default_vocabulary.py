"""The default model's vocabulary: same ids as Hugging Face's, on ten thousand strings.

The model's published tokenizer.json cuts digits apart and then cuts as GPT-2 does. transformers, reading the GGUF,
knows nothing of the first step (it ignores `tokenizer.ggml.pre`), so it is an oracle as it is for text without digits,
and for all text once its pre-tokenizer is set to the published one. A third oracle uses no library at all.
"""

from __future__ import annotations

import shutil
import time
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import awkward
import pytest

from pronk import checkpoint
from pronk import tokenizer as tokenizers
from pronk.errors import Unsupported
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.vocabulary import TokenizerSource


@pytest.fixture(scope="module")
def source(smollm2: Path) -> TokenizerSource:
    found = checkpoint.open(smollm2).tokenizer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer(source: TokenizerSource) -> Tokenizer:
    return tokenizers.load(source)


@pytest.fixture(scope="module")
def hugging_face(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def published(hugging_face: Any) -> Any:
    """transformers' own reading of vocabulary, merges and special tokens, with the published pre-tokenizer."""
    from tokenizers import Tokenizer as Library
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    library = Library.from_str(hugging_face.backend_tokenizer.to_str())
    library.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return library


def test_ten_thousand_strings(tokenizer: Tokenizer, published: Any) -> None:
    texts = awkward.strings(10_000)
    assert len(set(texts)) == 10_000
    for text in texts:
        assert tokenizer.encode(text) == published.encode(text, add_special_tokens=False).ids, repr(text)


def test_text_without_digits_as_transformers_reads_the_file(tokenizer: Tokenizer, hugging_face: Any) -> None:
    texts = [t for t in awkward.strings(3_000, seed=3) if not any(unicodedata.category(c)[0] == "N" for c in t)]
    assert len(texts) > 1_500
    for text in texts:
        assert tokenizer.encode(text) == hugging_face(text, add_special_tokens=False).input_ids, repr(text)


def test_against_plain_python(tokenizer: Tokenizer, source: TokenizerSource) -> None:
    reference = PlainBpe(source)
    for text in awkward.strings(600, seed=4, special=False):
        assert tokenizer.encode(text) == reference.encode(text), repr(text)


class PlainBpe:
    """Byte-level BPE as its papers tell it, for text without special tokens."""

    def __init__(self, source: TokenizerSource) -> None:
        import regex

        raw = source.settings
        self.ids = {token: i for i, token in enumerate(raw["tokenizer.ggml.tokens"])}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(raw["tokenizer.ggml.merges"])}
        self.words = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        self.digit = regex.compile(r"(\p{N})")
        self.letters = self._letters()

    def _letters(self) -> dict[int, str]:
        shown = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
        hidden = iter(range(256, 512))
        return {b: chr(b) if b in shown else chr(next(hidden)) for b in range(256)}

    def encode(self, text: str) -> list[int]:
        words = [w for part in self.digit.split(text) for w in self.words.findall(part)]
        return [self.ids[t] for w in words for t in self._merge([self.letters[b] for b in w.encode()]) if t in self.ids]

    def _merge(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            ranks = [self.rank.get((a, b), len(self.rank)) for a, b in pairwise(parts)]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == len(self.rank):
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return parts


def test_decoding_as_hugging_face_does(tokenizer: Tokenizer, published: Any) -> None:
    for text in awkward.strings(2_000, seed=5):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == published.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special=False) == published.decode(ids, skip_special_tokens=False)


def test_streamed_text_is_decoded_text(tokenizer: Tokenizer) -> None:
    for text in awkward.strings(500, seed=6):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)


def test_what_the_file_says(tokenizer: Tokenizer) -> None:
    assert (tokenizer.kind, tokenizer.vocab_size) == ("gguf", 49152)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id, tokenizer.pad_id) == (1, (2,), 0, 2)
    assert not tokenizer.add_bos
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("Hello") == [19556]
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"


def test_an_unknown_pre_tokenizer_is_refused_by_name(source: TokenizerSource) -> None:
    settings = {**source.settings, "tokenizer.ggml.pre": "kimi-k2"}
    with pytest.raises(Unsupported, match=r"kimi-k2.*--tokenizer"):
        tokenizers.load(TokenizerSource("gguf", source.path, settings))


def test_the_pre_tokenizer_matters(source: TokenizerSource, published: Any) -> None:
    """The inverse: with another model's way of cutting, the comparison above must fail."""
    other = tokenizers.load(TokenizerSource("gguf", source.path, {**source.settings, "tokenizer.ggml.pre": "gpt-2"}))
    differ = [t for t in awkward.strings(500) if other.encode(t) != published.encode(t, add_special_tokens=False).ids]
    assert differ


def test_loading_is_quick(source: TokenizerSource) -> None:
    """Under 0.3 s of this process's time; the best of three, because the machine may be busy."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        tokenizers.load(source)
        times.append(time.process_time() - begun)
    assert min(times) < 0.3


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    """Whether special tokens count is a choice per call, and must not leak into another thread's."""
    from concurrent.futures import ThreadPoolExecutor

    text = "<|im_start|>user\nHi<|im_end|>"
    expected = {special: tokenizer.encode(text, special=special) for special in (True, False)}
    assert expected[True] != expected[False]
    choices = [True, False] * 400
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda special: tokenizer.encode(text, special=special), choices))
    assert results == [expected[special] for special in choices]


def test_its_tokenizer_json_gives_the_same(tokenizer: Tokenizer, published: Any, tmp_path: Path) -> None:
    published.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "any name")
    from_json = tokenizers.load(tokenizers.find(tmp_path / "any name"))
    for text in awkward.strings(1_000, seed=7):
        assert from_json.encode(text, bos=False) == tokenizer.encode(text)
    assert from_json.vocabulary().pre == "smollm"
    assert from_json.vocabulary().merges == tokenizer.vocabulary().merges
    assert from_json.vocabulary().tokens == tokenizer.vocabulary().tokens
