"""What holds for all tokenizers, whatever their file."""

from __future__ import annotations

from typing import Any

import awkward
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import KINDS, gguf_source, small_bpe

from pronk import tokenizer as tokenizers
from pronk.errors import BadRequest
from pronk.tokenizer import Tokenizer, hf

pytestmark = pytest.mark.parametrize("kind", KINDS)
SPM = {"spm", "llama2c", "gguf-spm", "json-spm"}


def test_text_survives(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind[kind]
    for text in awkward.strings(1500, seed=1, special=False):
        # SentencePiece spells spaces with U+2581, so one in the text comes back as a space.
        expected = text.replace("\u2581", " ") if kind in SPM else text
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == expected


def test_special_spellings_survive_as_text(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind[kind]
    for spelling in (tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_ids[0])):
        text = f"a {spelling}b"
        plain = tokenizer.encode(text, special=False, bos=False)
        assert not any(map(tokenizer.is_special, plain))
        assert tokenizer.decode(plain) == text
        honoured = tokenizer.encode(text, bos=False)
        assert sum(map(tokenizer.is_special, honoured)) == 1
        assert spelling not in tokenizer.decode(honoured)
        assert spelling in tokenizer.decode(honoured, skip_special=False)


def test_long_texts_are_cut_as_short_ones_are(
    kind: str, every_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For these the tokenizers library is called in another way, in which it lets other threads run."""
    tokenizer = every_kind[kind]
    texts = [*awkward.strings(200, seed=2, special=True), f"a {tokenizer.token_text(tokenizer.bos_id)}b"]
    for special in (True, False):
        short = [tokenizer.encode(text, special=special) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr(hf, "_LONG", 0)
            assert [tokenizer.encode(text, special=special) for text in texts] == short


class _Counted:
    """A library of the tokenizers package, of which it is told which method was called."""

    def __init__(self, library: Any) -> None:
        self.library, self.called = library, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.library, name)


def test_a_long_text_lets_other_threads_run(
    kind: str, every_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`encode` held up a server's streams for 0.8 s at a million letters."""
    tokenizer = every_kind[kind]
    if isinstance(tokenizer, hf.HfTokenizer):
        counted = _Counted(tokenizer._library)
        monkeypatch.setattr(tokenizer, "_library", counted)
        tokenizer.encode("ab " * hf._LONG)
        assert "encode_batch_fast" in counted.called
        assert "encode" not in counted.called


def test_never_two_bos(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind[kind]
    bos = tokenizer.bos_id
    spelled = tokenizer.token_text(bos) + "Hello"
    ids = tokenizer.encode(spelled, bos=True)
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert tokenizer.encode(spelled, bos=False) == ids  # it is in the text: there to stay
    assert tokenizer.encode("Hello", bos=True) == ids
    assert bos not in tokenizer.encode("Hello", bos=False)
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", bos=tokenizer.add_bos)
    assert tokenizer.encode("", bos=True) == [bos]


def test_lone_surrogates_are_refused_by_position(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    for text in ("ab\ud83d", "ab\udc00c"):
        with pytest.raises(BadRequest, match=r"character 2 .*lone surrogate \(U\+D[8C]"):
            every_kind[kind].encode(text)


def test_ids_out_of_range_are_refused_by_name(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind[kind]
    for token in (-1, tokenizer.vocab_size, 2**63):
        with pytest.raises(BadRequest, match=f"token id {token} "):
            tokenizer.decode([1, token])
        with pytest.raises(BadRequest, match=f"token id {token} "):
            tokenizer.stream_decoder().feed(token)
    tokenizer.decode([tokenizer.vocab_size - 1])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streaming_is_decoding(kind: str, every_kind: dict[str, Tokenizer], data: st.DataObject, skip: bool) -> None:
    """Random ids: most sequences are not UTF-8 at all."""
    tokenizer = every_kind[kind]
    ids = data.draw(_mostly_bytes(tokenizer))
    stream = tokenizer.stream_decoder(skip_special=skip)
    assert "".join([stream.feed(i) for i in ids]) + stream.flush() == tokenizer.decode(ids, skip_special=skip)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and tokenizer.is_special(i)))
    # Nothing but one space at the beginning may be missing.
    assert tokenizer.decode(ids, skip_special=skip).replace(" ", "") == joined.decode("utf-8", "replace").replace(
        " ", ""
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_follows_a_prompt(kind: str, every_kind: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = every_kind[kind]
    prompt = tokenizer.encode(data.draw(st.sampled_from(awkward.AWKWARD)))
    new = data.draw(_mostly_bytes(tokenizer))
    stream = tokenizer.stream_decoder(previous=prompt)
    text = "".join(map(stream.feed, new)) + stream.flush()
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *new])


def _mostly_bytes(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of the vocabulary, many from its beginning, where single bytes stand."""
    some = st.integers(0, min(300, tokenizer.vocab_size - 1)) | st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(some, max_size=40)


def test_characters_never_come_in_halves(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind[kind]
    for text in ("naïve 😀👩‍👩‍👧‍👦 日本語 \U0010ffff", "😀" * 9):
        stream = tokenizer.stream_decoder()
        chunks = [stream.feed(i) for i in tokenizer.encode(text)]
        assert "\ufffd" not in "".join(chunks)
        assert stream.flush() == ""
        assert "".join(chunks) == text


def test_a_larger_embedding_decodes_to_nothing(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    v = small_bpe()
    tokenizer = tokenizers.load(gguf_source(v), model_vocab_size=len(v.tokens) + 5)
    padding = len(v.tokens) + 4
    assert tokenizer.decode([padding, *tokenizer.encode("Hi"), padding]) == "Hi"
    assert tokenizer.stream_decoder().feed(padding) == ""
    with pytest.raises(BadRequest, match=f"token id {padding + 1} "):
        tokenizer.decode([padding + 1])


def test_the_vocabulary_makes_the_same_tokenizer(kind: str, every_kind: dict[str, Tokenizer]) -> None:
    """Through Vocabulary and GGUF metadata and back: what converting a checkpoint does."""
    tokenizer = every_kind[kind]
    again = tokenizers.load(gguf_source(tokenizer.vocabulary()))
    assert (again.bos_id, again.eos_ids, again.add_bos) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos)
    for text in awkward.strings(800, seed=2):
        assert again.encode(text) == tokenizer.encode(text), repr(text)
    sample = range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 3000))
    assert [again.token_bytes(i) for i in sample] == [tokenizer.token_bytes(i) for i in sample]
