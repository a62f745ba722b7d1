"""Grammars without a library: finite automata over token ids, and what sampling gives under one, computed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mock_backend import habitual_logits

from pronk.engine.grammar import Bools, Ungrammatical
from pronk.engine.params import SamplingParams
from pronk.engine.rng import stream
from pronk.engine.sampling import sample


@dataclass(frozen=True)
class Automaton:
    """A pronk.engine.grammar.Grammar. It begins in state 0; `breaks`: in these states its matcher fails."""

    vocab_size: int
    follows: Mapping[int, Mapping[int, int]]  # by state: the next one by token
    ends: frozenset[int]
    breaks: frozenset[int] = frozenset()

    def matcher(self, prompt: Sequence[int]) -> AutomatonMatcher:
        return AutomatonMatcher(self, [0])

    def words(self, longest: int) -> set[tuple[int, ...]]:
        """All texts of up to so many tokens."""
        found, states = set(), {((), 0)}
        for _ in range(longest + 1):
            found |= {word for word, state in states if state in self.ends}
            states = {((*word, t), n) for word, state in states for t, n in self.follows.get(state, {}).items()}
        return found


class AutomatonMatcher:
    def __init__(self, automaton: Automaton, states: list[int]) -> None:
        self._of, self._states = automaton, states

    @property
    def position(self) -> int:
        return len(self._states) - 1

    @property
    def may_end(self) -> bool:
        return self._states[-1] in self._of.ends

    @property
    def has_ended(self) -> bool:
        return self.may_end and not self._next(self._states[-1])

    def allowed(self) -> Bools:
        if self._states[-1] in self._of.breaks:
            raise Ungrammatical("broken on purpose")
        allowed = np.zeros(self._of.vocab_size, np.bool_)
        allowed[list(self._next(self._states[-1]))] = True
        return allowed

    def accepts(self, tokens: Sequence[int]) -> int:
        state, count = self._states[-1], 0
        for token in tokens:
            if token not in self._next(state):
                break
            state, count = self._next(state)[token], count + 1
        return count

    def advance(self, token: int) -> None:
        if token not in self._next(self._states[-1]):
            raise Ungrammatical("that does not follow")
        self._states.append(self._next(self._states[-1])[token])

    def rollback(self, count: int) -> None:
        assert 0 <= count <= self.position
        self._states = self._states[: len(self._states) - count]

    def fork(self) -> AutomatonMatcher:
        return AutomatonMatcher(self._of, list(self._states))

    def _next(self, state: int) -> Mapping[int, int]:
        return self._of.follows.get(state, {})


def alone_under(
    automaton: Automaton,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    index: int,
    eos: Sequence[int],
    ctx: int,
) -> tuple[list[int], str]:
    """The oracle: one sample's tokens and how it ended, from whole prefixes, without a scheduler or a matcher."""
    tokens, draws, state = list(prompt), stream(params.rng, seed, index), 0
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(tokens) - len(prompt) < params.max_new_tokens and len(tokens) < ctx:
        following = automaton.follows.get(state, {})
        allowed = (set(following) - stops) | (stops if state in automaton.ends else set())
        if not allowed or state in automaton.breaks:
            return tokens[len(prompt) :], "error"
        logits = habitual_logits(tuple(tokens), automaton.vocab_size).copy()
        for token in set(range(automaton.vocab_size)) - allowed:
            logits[token] = -np.inf
        generated = tokens[len(prompt) :]
        tokens.append(sample(logits, params, list(tokens), generated, draws.uniform(len(generated))).token)
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        state = following[tokens[-1]]
        if state in automaton.ends and not automaton.follows.get(state):
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"
