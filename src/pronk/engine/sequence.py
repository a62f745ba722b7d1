"""Requests, and the sequences that the scheduler makes of them."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pronk.engine.events import Savings
from pronk.engine.grammar import Bools, Grammar, Matcher, Ungrammatical, allowed_next
from pronk.engine.kv_blocks import BlockTable
from pronk.engine.ngram import Drafter
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask
from pronk.engine.rng import Stream
from pronk.engine.sampling import NotNumbers, Sampled

if TYPE_CHECKING:
    from pronk.engine.beam import BeamSearch


@dataclass(frozen=True)
class Request:
    id: int
    params: SamplingParams
    prompt_tokens: int
    max_tokens: int  # prompt included
    stop_ids: frozenset[int]
    streams: tuple[Stream, ...]
    adapter: int = 0  # which is attached to the backend; 0: none
    grammar: Grammar | None = None  # that its texts are to follow
    owner: Hashable = None  # whose texts they are

    @property
    def whose(self) -> Hashable:
        """What its keys and values are kept under in the cache: those of another adapter are other numbers, and those
        of another owner not to be found, for a prompt that is read in no time tells that somebody else has sent it."""
        return self.adapter, self.owner


@dataclass(eq=False)
class Sequence:
    """Samples of one request that are still the same tokens: all of them until the prompt is computed, then one."""

    request: Request
    samples: list[int]
    tokens: list[int]
    table: BlockTable
    computed: int = 0  # the most tokens ever computed
    savings: Savings = field(default_factory=Savings)
    drafter: Drafter = field(default_factory=Drafter)
    search: BeamSearch | None = None  # that it is a beam of
    passed: int = 0  # by how many that were admitted before it, though they came later
    _matcher: Matcher | None = None  # at the end of some of its tokens; made anew where it was lost
    _buffer: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    _copied: int = 0  # how many of the tokens the buffer has

    @property
    def parts(self) -> Several[Sequence]:
        """The sequences that go on together: those of a beam search, or itself."""
        return (self,)

    def wants(self, budget: int) -> list[tuple[Sequence, int]]:
        """How many tokens of which parts the next pass is to compute, of at most `budget`."""
        return [(self, min(self.missing, budget))]

    @property
    def step(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.table.length

    def propose(self, limit: int) -> list[int]:
        """A draft of what follows: at most `limit` tokens, and no more than can be accepted."""
        if self.request.params.speculative is None or len(self.samples) > 1:
            return []
        draft = self.drafter.propose(self.tokens, min(limit, self.request.max_tokens - len(self.tokens) - 1))
        if draft and self.request.grammar:
            try:
                return draft[: self.matched(self.request.grammar).accepts(draft)]
            except Ungrammatical:  # which the next draw meets, and raises
                return []
        return draft

    def matched(self, grammar: Grammar) -> Matcher:
        """Where the text is in the grammar. Raises Ungrammatical."""
        start = self.request.prompt_tokens
        if self._matcher is None:
            self._matcher = grammar.matcher(self.tokens[:start])
        for token in self.tokens[start + self._matcher.position :]:
            self._matcher.advance(token)
        return self._matcher

    def forget(self) -> None:
        """What an interrupted pass may have left half done."""
        self.table.free()
        self._matcher = None

    def branch(self, sample: int) -> Sequence:
        """The same tokens and blocks, for one sample that goes its own way."""
        savings = replace(self.savings)
        table = self.table.fork()
        branch = Sequence(self.request, [sample], list(self.tokens), table, self.computed, savings, search=self.search)
        branch._matcher = self._matcher.fork() if self._matcher else None
        return branch

    def asks(self, first: int, draft: Several[int] = ()) -> list[Ask]:
        """What is to be drawn from the rows from `first` on: of each sample 1 + draft tokens, as if guesses were right;
        fewer where the grammar ends before.

        Changes nothing that anybody sees. Raises Ungrammatical where it lets no first token follow.
        """
        params, prompt = self.request.params, self.request.prompt_tokens
        tokens = self._array(draft) if params.penalizes else ()
        masks = self._masks(draft)
        asks = []
        for index in self.samples:
            uniform = self.request.streams[index].uniform
            for n, mask in enumerate(masks):
                coin = partial(uniform, self.step + n)
                asks.append(Ask(first + n, params, coin, tokens[: len(self.tokens) + n], prompt, mask))
        return asks

    def _masks(self, draft: Several[int]) -> Several[Bools | None]:
        """What the grammar lets follow 0, 1, ... tokens of the draft."""
        request = self.request
        if not request.grammar:
            return [None] * (1 + len(draft))
        matcher = self.matched(request.grammar)
        masks = [allowed_next(matcher, request.stop_ids)]
        try:
            for token in draft:
                if token in request.stop_ids or not masks[-1][token]:
                    break
                matcher.advance(token)
                if matcher.has_ended:
                    break
                masks.append(allowed_next(matcher, request.stop_ids))
        except Ungrammatical:  # which the next pass meets again, if the text comes there
            pass
        finally:
            matcher.rollback(matcher.position - self.step)
        return masks

    def settle(self, drawn: Several[Sampled | None], draft: Several[int] = ()) -> list[list[Sampled]]:
        """The next tokens of each sample, of what its `asks` gave.

        The j-th is what follows j tokens of the draft, and counts only if those are the very tokens drawn: so a draft
        changes how many tokens one pass gives, and never which. Where a later one than the first could not be drawn,
        the next pass meets it again. Changes nothing. Raises NotNumbers, Ungrammatical.
        """
        rows = len(drawn) // len(self.samples)
        return [self._settle(drawn[at : at + rows], draft) for at in range(0, len(drawn), rows)]

    def _settle(self, drawn: Several[Sampled | None], draft: Several[int]) -> list[Sampled]:
        request, tokens = self.request, list[Sampled]()
        matcher = self.matched(request.grammar) if request.grammar else None
        try:
            for sampled, guess in zip(drawn, (*draft, None), strict=False):
                if sampled is None:
                    raise NotNumbers
                token = sampled.token
                if matcher and token not in request.stop_ids:
                    matcher.advance(token)
                    sampled.completes = matcher.has_ended
                tokens.append(sampled)
                if token != guess or token in request.stop_ids or sampled.completes:
                    break
        except (NotNumbers, Ungrammatical):
            if not tokens:
                raise
        finally:
            if matcher:
                matcher.rollback(matcher.position - self.step)
        return tokens

    def _array(self, draft: Several[int]) -> NDArray[np.int32]:
        """The tokens and a draft, [S]. What was copied once is not copied again: a text only grows."""
        length, known = len(self.tokens), self._copied
        if length + len(draft) > len(self._buffer):
            larger = np.empty(2 * length + 64 + len(draft), np.int32)
            larger[:known] = self._buffer[:known]
            self._buffer = larger
        self._buffer[known:length] = self.tokens[known:]
        self._buffer[length : length + len(draft)] = draft
        self._copied = length
        return self._buffer[: length + len(draft)]
