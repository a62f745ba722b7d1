"""Grammars over every kind of tokenizer: what a mask allows, against trying every token."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import numpy as np
import pytest
from kinds import KINDS

from pronk.grammar.compiled import Compiler, GrammarMatcher
from pronk.grammar.structure import Structure
from pronk.grammar.tokens import Tokens
from pronk.tokenizer import Tokenizer

CHOICES = ["yes", "no", "nothing at all", "naïve 😀", "no\nmore", " leading", "日本", "{}", "1.5"]


@cache
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size + 3, tokenizer.eos_ids)  # a model's embedding may have more rows


@cache
def spelled(tokenizer: Tokenizer) -> list[bytes | None]:
    """What each token adds to a text; None for what is no part of one."""
    return [
        None if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
    ]


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed()).tolist())


def check_walk(tokenizer: Tokenizer, structure: Structure, texts: list[bytes], walks: int, seed: int) -> None:
    """At each step of random walks: nothing else is allowed than what some text begins with, and where more than one
    byte may follow, all of that."""
    of, spelling, rng = compiler(tokenizer).compile(structure), spelled(tokenizer), random.Random(seed)
    prompt = tokenizer.encode("a", bos=False)
    for _ in range(walks):
        matcher, so_far = of.matcher(prompt), b""
        while True:
            rest = [text[len(so_far) :] for text in texts if text.startswith(so_far)]
            fit = {token for token, said in enumerate(spelling) if said and any(text.startswith(said) for text in rest)}
            found = allowed(matcher)
            assert found <= fit
            assert bool(found) == bool(fit)
            if len({text[:1] for text in rest}) > 1:
                assert found == fit
            assert matcher.may_end == (b"" in rest)
            assert matcher.has_ended == (rest == [b""])
            if not found:
                break
            token = rng.choice(sorted(found))
            assert matcher.accepts([token, -1 % of.vocab_size]) == 1
            twin = matcher.fork()
            for other in rng.sample(sorted(found), min(3, len(found))):
                twin.advance(other)
                twin.rollback(1)
            assert allowed(twin) == found
            matcher.advance(token)
            so_far += spelling[token] or b""
        assert so_far in texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_followed_to_its_end(every_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_kind[kind]
    texts = [text.encode() for text in CHOICES if tokenizer.decode(tokenizer.encode(text)) == text]
    assert len(texts) > 3
    check_walk(tokenizer, Structure.choice([text.decode() for text in texts]), texts, 5, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["(ab|a)*b{1,2}", "a?(b|ca)+", "[a-c]{2}(x|aa)?", "(a|b){0,6}"])
def test_a_regular_expression_is_followed(every_kind: dict[str, Tokenizer], kind: str, pattern: str) -> None:
    """Against all texts of up to 8 characters that Python's `re` matches; longer ones are not walked to."""
    texts = [
        "".join(word).encode()
        for length in range(9)
        for word in itertools.product("abcx", repeat=length)
        if re.fullmatch(pattern, "".join(word))
    ]
    tokenizer = every_kind[kind]
    of, spelling, rng = compiler(tokenizer).compile(Structure.regex(pattern)), spelled(tokenizer), random.Random(2)
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    whole = set(texts)
    for _ in range(6):
        matcher, so_far = of.matcher(tokenizer.encode("a", bos=False)), b""
        while len(so_far) < 4:
            fit = {token for token, said in enumerate(spelling) if said and so_far + said in beginnings}
            found = allowed(matcher)
            # Where one byte is sure to follow, only the tokenizer's own tokens are taken.
            sure = (
                so_far not in whole
                and len({b[len(so_far)] for b in beginnings if len(b) > len(so_far) and b.startswith(so_far)}) == 1
            )
            assert {token for token in found if len(so_far + (spelling[token] or b"")) <= 6} <= fit
            assert sure or fit <= found
            assert matcher.may_end == (so_far in whole)
            if not found:
                break
            token = rng.choice(sorted(found & fit))
            so_far += spelling[token] or b""
            matcher.advance(token)


@pytest.mark.parametrize("kind", KINDS)
def test_sure_bytes_are_cut_as_the_tokenizer_cuts_them(every_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_kind[kind]
    tokens = Tokens(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for text in (b"", b" the name", b"name", b'{"name": "', b"na\xc3\xafve", b"\xf0\x9f\x98", b"\n\n", b"<s>", b"</s>"):
        assert b"".join(tokens.tokens[token] for token in tokens(text)) == text
    within = tokenizer.encode("one two", bos=False)
    assert tokens(b" two") == within[-len(tokens(b" two")) :]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_never_text(every_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_kind[kind]
    matcher = compiler(tokenizer).compile(Structure.regex("(?s:.)*")).matcher([])
    found = allowed(matcher)
    assert not any(tokenizer.is_special(token) for token in found)
    assert not set(tokenizer.eos_ids) & found
    assert matcher.may_end
    if tokenizer.eos_ids and kind != "json-spm":
        end = tokenizer.token_bytes(tokenizer.eos_ids[0]).decode()
        spelling = compiler(tokenizer).compile(Structure.choice([end])).matcher([])
        assert not set(tokenizer.eos_ids) & allowed(spelling), "its letters, and not the token"


@pytest.mark.parametrize("kind", ["spm", "llama2c", "gguf-spm"])
def test_a_space_that_decoding_takes_away_begins_no_text(every_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_kind[kind]
    assert tokenizer.strips_first_space
    grammar = compiler(tokenizer).compile(Structure.regex("( ?name)+"))
    spaced = {token for token, said in enumerate(spelled(tokenizer)) if said and said.startswith(b" ")}
    assert not allowed(grammar.matcher([tokenizer.bos_id or 1])) & spaced
    assert allowed(grammar.matcher(tokenizer.encode("x"))) & spaced
