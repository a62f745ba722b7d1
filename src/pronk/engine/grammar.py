"""Grammar: which tokens may follow in a text that is to have a form. What makes one: pronk.grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pronk.errors import PronkError

Bools = NDArray[np.bool_]


class Ungrammatical(PronkError):
    """A text that its grammar does not let go on: it ends in a Failure, and no other does."""


class Matcher(Protocol):
    """How far one text has come in its grammar. Ids that end a text are no part of it: see `may_end`."""

    @property
    def position(self) -> int:
        """How many tokens it was given."""

    @property
    def may_end(self) -> bool:
        """Whether the text is whole as it stands. It may go on all the same."""

    @property
    def has_ended(self) -> bool:
        """Whether it is whole, and nothing can follow."""

    def allowed(self) -> Bools:
        """[V], True for each token that may follow; not to be written to. Raises Ungrammatical."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these may follow one after another."""

    def advance(self, token: int) -> None:
        """Raises Ungrammatical where the token may not follow, and is of no use afterwards."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def fork(self) -> Matcher:
        """Another at the same place, which goes its own way."""


class Grammar(Protocol):
    """A form that texts of one model are to have. Any thread may use it."""

    @property
    def vocab_size(self) -> int:
        """V, which is that of the model's logits."""

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        """For a text that follows these tokens."""


def allowed_next(matcher: Matcher, stop_ids: frozenset[int]) -> Bools:
    """[V]: a token that ends the text is allowed where the text is whole, and nowhere else. Raises Ungrammatical."""
    allowed = matcher.allowed()
    if stop_ids:
        allowed = allowed.copy()
        allowed[list(stop_ids)] = matcher.may_end
    if not allowed.any():
        raise Ungrammatical("no token of the vocabulary can go on with this text as its grammar has it")
    return allowed
