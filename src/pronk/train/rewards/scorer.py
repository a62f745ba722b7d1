"""Scorer: what gives each of several completions a number. The built ones that need no process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pronk.engine.grammar import Grammar
from pronk.train.data.examples import Prompt


class Text(NamedTuple):
    """One completion."""

    prompt: Prompt
    text: str
    tokens: Sequence[int]  # without the one that ended it
    ended: bool


class Scorer(Protocol):
    def of(self, texts: Sequence[Text]) -> list[float]:
        """Finite numbers. Raises PronkError, which names what went wrong and with which record."""


class Exact:
    """1 for the text under that key of the record, but for white space around it; else 0."""

    def __init__(self, key: str) -> None:
        self._key = key

    def of(self, texts: Sequence[Text]) -> list[float]:
        return [float(one.text.strip() == str(one.prompt.record[self._key]).strip()) for one in texts]


class Length:
    """1 for so many tokens, and for fewer or more in proportion less, to 0 of none and of twice as many."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def of(self, texts: Sequence[Text]) -> list[float]:
        return [max(0.0, 1 - abs(len(one.tokens) / self._tokens - 1)) for one in texts]


class Schema:
    """1 for a text that came to its end and is JSON of that schema; else 0."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def of(self, texts: Sequence[Text]) -> list[float]:
        return [float(one.ended and self._fits(one)) for one in texts]

    def _fits(self, one: Text) -> bool:
        matcher, tokens = self._grammar.matcher(one.prompt.ids.tolist()), list(one.tokens)
        if matcher.accepts(tokens) < len(tokens):
            return False
        for token in tokens:
            matcher.advance(token)
        return matcher.may_end
