"""Requests, and the sequences that the scheduler makes of them."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pronk.engine.events import Savings
from pronk.engine.grammar import Grammar, Matcher, Ungrammatical, allowed_next
from pronk.engine.kv_blocks import BlockTable
from pronk.engine.ngram import Drafter
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Predictions
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
    _matcher: Matcher | None = None  # at the end of some of its tokens; made anew where it was lost

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

    def draw(self, predictions: Predictions, first: int, draft: Several[int] = ()) -> list[list[Sampled]]:
        """The next tokens of each sample, from the rows `first` on, 1 + draft of them. Changes nothing.

        The j-th is what follows j tokens of the draft, and counts only if those are the very tokens drawn: so a draft
        changes how many tokens one pass gives, and never which. Raises NotNumbers or Ungrammatical where the first
        cannot be drawn.
        """
        return [self._draw(index, predictions, first, draft) for index in self.samples]

    def _draw(self, index: int, predictions: Predictions, first: int, draft: Several[int]) -> list[Sampled]:
        request, step = self.request, self.step
        penalizes = request.params.penalizes
        history = list(self.tokens) if penalizes else []
        generated = history[request.prompt_tokens :]
        drawn: list[Sampled] = []
        matcher = self.matched(request.grammar) if request.grammar else None
        try:
            for row, guess in enumerate((*draft, None), first):
                uniform = partial(request.streams[index].uniform, step + len(drawn))
                allowed = allowed_next(matcher, request.stop_ids) if matcher else None
                sampled = predictions.sample(row, request.params, history, generated, uniform, allowed)
                token = sampled.token
                if matcher and token not in request.stop_ids:
                    matcher.advance(token)
                    sampled.completes = matcher.has_ended
                drawn.append(sampled)
                if token != guess or token in request.stop_ids or sampled.completes:
                    break
                if penalizes:
                    history.append(token)
                    generated.append(token)
        except (NotNumbers, Ungrammatical):
            if not drawn:  # else these count, and the next pass meets it again
                raise
        finally:
            if matcher:
                matcher.rollback(matcher.position - step)
        return drawn
