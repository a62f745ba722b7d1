"""Compiled grammars: structures joined with a model's tokens, and the matchers that follow one text each."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from pronk.engine.grammar import Bools, Ungrammatical
from pronk.errors import BadRequest, PronkError
from pronk.grammar import bounds, trial
from pronk.grammar.structure import Structure
from pronk.grammar.tokens import Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pronk.tokenizer import Tokenizer

_KEPT = 64  # grammars, of which one takes from 0.1 to some MB


class Compiler:
    """Of one model's tokens. Any thread may use it; those that compile wait for nobody but the trial's process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._made: tuple[LLTokenizer, Vocabulary] | None = None
        self._kept: OrderedDict[Structure, CompiledGrammar] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def compile(self, structure: Structure) -> CompiledGrammar:
        """Raises BadRequest, naming what cannot be followed, and PronkError where llguidance is not installed."""
        with self._lock:
            if found := self._kept.get(structure):
                self._kept.move_to_end(structure)
                return found
        bounds.check(structure)
        import_llguidance()
        trial.check(structure)
        from pronk.grammar import guidance

        tokenizer, vocabulary = self._of_tokens()
        try:
            first = guidance.matcher(structure.kind, structure.source, tokenizer)
        except ValueError as error:
            raise BadRequest(trial.refusal(structure, str(error))) from None
        made = CompiledGrammar(first, vocabulary)
        with self._lock:
            self._kept[structure] = made
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _of_tokens(self) -> tuple[LLTokenizer, Vocabulary]:
        """Made when the first grammar is: a fifth of a second for 49,152 tokens."""
        from pronk.grammar import guidance

        with self._lock:
            if self._made is None:
                tokens = Tokens(self._tokenizer, self._vocab_size, self._eos_ids)
                self._made = guidance.tokenizer(tokens), Vocabulary(self._tokenizer, tokens)
            return self._made


class Vocabulary:
    """What matchers ask of the tokens beside the bytes."""

    def __init__(self, tokenizer: Tokenizer, tokens: Tokens) -> None:
        self.size = len(tokens.tokens)
        self.text = np.ones(self.size, np.bool_)  # [V]: what may be part of a text
        self.text[tokens.special_token_ids] = False
        self._tokenizer = tokenizer
        self._spaced: Bools = np.array([spelled.startswith(b" ") for spelled in tokens.tokens])

    def first(self, prompt: Sequence[int]) -> Bools:
        """[V]: what may begin a text after a prompt. Where decoding takes away a first space, none that has one."""
        if not self._tokenizer.strips_first_space:
            return self.text
        if any(not self._tokenizer.is_special(token) and self._tokenizer.token_bytes(token) for token in prompt):
            return self.text
        return self.text & ~self._spaced


class CompiledGrammar:
    """A pronk.engine.grammar.Grammar."""

    def __init__(self, first: LLMatcher, vocabulary: Vocabulary) -> None:
        self._first, self._vocabulary, self.vocab_size = first, vocabulary, vocabulary.size

    def matcher(self, prompt: Sequence[int]) -> GrammarMatcher:
        vocabulary = self._vocabulary
        return GrammarMatcher(self._first.deep_copy(), vocabulary.text, vocabulary.first(prompt))


class GrammarMatcher:
    """A pronk.engine.grammar.Matcher. llguidance raises nothing: it is asked after each call whether it has failed."""

    def __init__(self, state: LLMatcher, text: Bools, first: Bools, position: int = 0) -> None:
        self.position = position
        self._state, self._text, self._first = state, text, first
        self._allowed: Bools | None = None  # of this position

    @property
    def may_end(self) -> bool:
        return self._state.is_accepting()

    @property
    def has_ended(self) -> bool:
        return self._state.is_stopped() and self._state.is_accepting()

    def allowed(self) -> Bools:
        if self._allowed is None:
            packed = np.frombuffer(self._state.compute_bitmask(), np.uint8)
            self._check()
            bits = np.unpackbits(packed, count=len(self._text), bitorder="little").view(np.bool_)
            text = self._text if self.position else self._first
            allowed: Bools = np.asarray(bits & text, np.bool_)
            self._allowed = allowed
        return self._allowed

    def accepts(self, tokens: Sequence[int]) -> int:
        return max(0, self._state.validate_tokens(list(tokens)))

    def advance(self, token: int) -> None:
        self._allowed = None
        self.position += 1
        if not self._state.consume_token(token):
            self._check()
            raise Ungrammatical(f"the grammar lets no token {token} follow")

    def rollback(self, count: int) -> None:
        if count and not self._state.is_error():
            self._allowed = None
            self.position -= count
            self._state.rollback(count)
            self._check()

    def fork(self) -> GrammarMatcher:
        forked = GrammarMatcher(self._state.deep_copy(), self._text, self._first, self.position)
        forked._allowed = self._allowed
        return forked

    def _check(self) -> None:
        if self._state.is_error():
            lines = self._state.get_error().splitlines() or ["it failed"]
            raise Ungrammatical(f"the grammar can be followed no further: {lines[0]}")


def import_llguidance() -> None:
    """Raises PronkError where there is none."""
    try:
        import_module("llguidance")
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise PronkError("structured output needs llguidance; install it with: pip install 'pronk[grammar]'") from None
