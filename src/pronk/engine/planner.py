"""Planner: which tokens of which sequences make the next forward pass; who waits, and who must give way.

Every sequence is a list of tokens, of which the KV cache holds the first so many. What is missing is computed, in
chunks, and once nothing is missing the logits give the next token. A fresh prompt, a decode step and a preempted
sequence that must be computed again differ only in how much is missing. Without the cache all of it is, at every step.

A sequence that decodes may bring a draft of what follows (see ngram.py): the same pass computes it, and as much of it
stays as the logits confirm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pronk.engine.batch import Run, Wants
from pronk.engine.events import Counters
from pronk.engine.kv_blocks import BlockPool, BlockTable
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sequence import Request, Sequence
from pronk.errors import NotEnoughMemory, PronkError

# A pass of so many tokens is still bound by reading the weights. Only up to here are drafts as good as free.
_SPECULATIVE_PASS = 16


class Planner:
    """`kv` None: without a cache."""

    def __init__(
        self, kv: PrefixCache | None, max_batch_tokens: int, max_sequences: int, max_blocks: int, counters: Counters
    ) -> None:
        self._kv, self._budget, self._max_blocks, self._counters = kv, max_batch_tokens, max_blocks, counters
        self._pool = kv.pool if kv else BlockPool(0, 1)
        # One token for each sequence always fits, so that decoding never waits and prefill never starves.
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        # Oldest first. Sequences that still miss more than one token are at the end.
        self.running: list[Sequence] = []
        self.failed: list[tuple[Sequence, PronkError]] = []  # until somebody is told

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, request: Request, tokens: list[int]) -> None:
        self.waiting.append(Sequence(request, list(range(request.params.samples)), tokens, BlockTable(self._pool)))

    def next(self) -> list[tuple[Sequence, Run]]:
        """The runs of the next pass. Their tokens count as cached from now on."""
        return self._next_cached() if self._kv else self._next_uncached()

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Let go of its blocks; the cache may remember them."""
        if self._kv:
            self._kv.storage.ended(sequence.table.blocks)
            if keep:
                self._kv.keep(sequence.tokens, sequence.table)
        sequence.table.free()

    def drop(self, sequence: Sequence) -> None:
        self.release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def fail(self, sequence: Sequence, error: PronkError) -> None:
        """Drop a running sequence that cannot go on. What it computed is not to be reused."""
        self.release(sequence, keep=False)
        self.running.remove(sequence)
        self.failed.append((sequence, error))

    def _next_cached(self) -> list[tuple[Sequence, Run]]:
        assert self._kv is not None
        runs: list[tuple[Sequence, Run]] = []
        copies: list[tuple[int, int]] = []
        budget = self._budget
        for sequence in self._candidates():
            if not sequence.table.length:
                self._reuse(sequence)
            table, start = sequence.table, sequence.table.length
            end = start + min(sequence.missing, budget)
            if not self._make_room_for(sequence, end - start):
                continue
            copies += table.append(end - start)
            logits: Wants = "none" if sequence.missing else "last"
            runs.append((sequence, Run(sequence.tokens[start:end], start, table.blocks, logits)))
            budget -= end - start
            if not budget:
                break
        self._add_drafts(runs, min(budget, _SPECULATIVE_PASS - self._budget + budget))
        if copies:
            self._kv.storage.copy(copies)
        return runs

    def _reuse(self, sequence: Sequence) -> None:
        """Begin with what the cache knows of the sequence."""
        assert self._kv is not None
        sequence.table = self._kv.match(sequence.tokens)
        known = min(sequence.table.length, sequence.request.prompt_tokens)
        if known > sequence.computed:
            self._counters.cached_tokens += known - sequence.computed
            sequence.savings.cached_tokens = known
        sequence.computed = max(sequence.computed, sequence.table.length)

    def _add_drafts(self, runs: list[tuple[Sequence, Run]], spare: int) -> None:
        """Fill a small pass with guesses, the oldest sequence's first. Nobody makes room for a guess."""
        assert self._kv is not None
        for n, (sequence, run) in enumerate(runs):
            if spare < 1:
                break
            draft = sequence.propose(spare) if run.logits == "last" and len(run.token_ids) == 1 else []
            if draft and not self._lacks_room(sequence, len(draft)):
                sequence.table.append(len(draft))
                runs[n] = sequence, Run([*run.token_ids, *draft], run.start, run.blocks, "all")
                spare -= len(draft)

    def _candidates(self) -> Iterator[Sequence]:
        """Those under way, oldest first, then those that can be admitted."""
        for sequence in list(self.running):
            if sequence in self.running:  # not preempted meanwhile
                yield sequence
        while self.waiting and self._has_place(self.waiting[0]) and self._has_blocks(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            yield self.running[-1]

    def _make_room_for(self, sequence: Sequence, count: int) -> bool:
        """Preempt the youngest sequences until the blocks are there; False if that was `sequence` itself.

        One that lacks memory even when it is alone fails.
        """
        while why := self._lacks_room(sequence, count):
            if isinstance(why, NotEnoughMemory) and self.running == [sequence]:
                self.fail(sequence, why)
                return False
            youngest = self.running.pop()
            self.release(youngest)
            self.waiting.appendleft(youngest)
            self._counters.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _lacks_room(self, sequence: Sequence, count: int) -> bool | NotEnoughMemory:
        """False if the blocks are there; else why not, where it is for want of memory."""
        assert self._kv is not None
        try:
            return not self._kv.make_room(sequence.table.blocks_needed(count), self._max_blocks)
        except NotEnoughMemory as error:
            return error

    def _has_place(self, sequence: Sequence) -> bool:
        return sum(len(s.samples) for s in [*self.running, sequence]) <= self.max_sequences

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Whether all of it fits beside the others, with a block to spare for each; alone it always does."""
        assert self._kv is not None
        spare = sum(len(s.samples) for s in [*self.running, sequence])
        wanted = -(-len(sequence.tokens) // self._kv.pool.block_size) + spare
        return not self.running or wanted <= self._kv.available(self._max_blocks)

    def _next_uncached(self) -> list[tuple[Sequence, Run]]:
        while self.waiting and self._has_place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        runs: list[tuple[Sequence, Run]] = []
        budget = self._budget
        for sequence in sorted(self.running, key=lambda s: s.step):  # so that all advance alike
            if runs and len(sequence.tokens) > budget:
                break
            runs.append((sequence, Run(list(sequence.tokens))))
            budget -= len(sequence.tokens)
        return runs
