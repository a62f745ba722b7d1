"""Planner: which tokens of which sequences make the next forward pass; who waits, and who must give way.

Every sequence is a list of tokens, of which the KV cache holds the first so many. What is missing is computed, in
chunks, and once nothing is missing the logits give the next token. A fresh prompt, a decode step and a preempted
sequence that must be computed again differ only in how much is missing. Without the cache all of it is, at every step.

A sequence that decodes may bring a draft of what follows (see ngram.py): the same pass computes it, and as much of it
stays as the logits confirm.

No prompt holds others up. Whoever decodes gets a token in every pass. Of the rest of a pass, prompts that are read to
their ends with at most half of it go first; the other half, at least, is the oldest prompt's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from pronk.engine.batch import Run, Wants
from pronk.engine.beam import BeamSearch
from pronk.engine.events import Counters
from pronk.engine.kv_blocks import BlockPool, BlockTable
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sequence import Request, Sequence
from pronk.errors import NotEnoughMemory, PronkError

# A pass of so many tokens is still bound by reading the weights. Only up to here are drafts as good as free.
_SPECULATIVE_PASS = 16

Entry = Sequence | BeamSearch  # what waits, runs and gives way as one


class Planner:
    """`kv` None: without a cache."""

    def __init__(
        self, kv: PrefixCache | None, max_batch_tokens: int, max_sequences: int, max_blocks: int, counters: Counters
    ) -> None:
        self._kv, self._budget, self._max_blocks, self._counters = kv, max_batch_tokens, max_blocks, counters
        self._pool = kv.pool if kv else BlockPool(0, 1)
        # One token for each sequence always fits, so that decoding never waits and prefill never starves.
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.waiting: deque[Entry] = deque()
        self.running: list[Entry] = []  # oldest first
        self.failed: list[tuple[Entry, PronkError]] = []  # until somebody is told

    @property
    def entries(self) -> list[Entry]:
        return [*self.running, *self.waiting]

    def add(self, request: Request, tokens: list[int]) -> Entry:
        """Gives the first of its entries; there are more where it has more samples than run at once."""
        if request.params.num_beams > 1:
            entries: list[Entry] = [BeamSearch.of(request, tokens, BlockTable(self._pool))]
        else:
            groups = self._groups(request.params.samples)
            entries = [Sequence(request, samples, list(tokens), BlockTable(self._pool)) for samples in groups]
        self.waiting += entries
        return entries[0]

    def _groups(self, samples: int) -> list[list[int]]:
        """Samples that read the prompt together: as many as run at once, and of the rest an eighth of that each time,
        so that a group need not wait for the last sample of the one before."""
        most = self.max_sequences
        starts = [0, *range(most, samples, max(1, most // 8))]
        return [list(range(start, stop)) for start, stop in zip(starts, [*starts[1:], samples], strict=True)]

    def next(self) -> list[tuple[Sequence, Run]]:
        """The runs of the next pass, those of one entry side by side. Their tokens count as cached from now on."""
        return self._next_cached() if self._kv else self._next_uncached()

    def release(self, entry: Entry, *, keep: bool = True) -> None:
        """Let go of its blocks; the cache may remember them, but for what beams have tried."""
        if self._kv:
            for part in entry.parts:
                self._kv.storage.ended(part.table.blocks)
            if keep and len(entry.parts) == 1:
                self._kv.keep(entry.parts[0].tokens, entry.parts[0].table, entry.request.whose)
        for part in entry.parts:
            part.table.free()

    def drop(self, entry: Entry) -> None:
        self.release(entry)
        if entry in self.running:
            self.running.remove(entry)
        else:
            self.waiting.remove(entry)

    def fail(self, entry: Entry, error: PronkError) -> None:
        """Drop a running entry that cannot go on. What it computed is not to be reused."""
        self.release(entry, keep=False)
        self.running.remove(entry)
        self.failed.append((entry, error))

    def _next_cached(self) -> list[tuple[Sequence, Run]]:
        assert self._kv is not None
        while self.waiting and self._has_place(self.waiting[0]) and self._has_blocks(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        runs: list[tuple[Sequence, Run]] = []
        copies: list[tuple[int, int]] = []
        used, shares = 0, self._shares()
        for entry in list(self.running):
            if entry not in self.running:  # preempted meanwhile: it is to hold no blocks
                continue
            count = 1
            if entry in shares:
                count = shares[entry]
                for part in entry.parts if count else ():
                    if not part.table.length:
                        self._reuse(part)
            if not count:
                continue
            wanted = entry.wants(count)
            if not self._make_room_for(entry, wanted):
                continue
            for sequence, count in wanted:
                table, start = sequence.table, sequence.table.length
                copies += table.append(count)
                logits: Wants = "none" if sequence.missing else "last"
                tokens = sequence.tokens[start : start + count]
                runs.append((sequence, Run(tokens, start, table.blocks, logits, sequence.request.adapter)))
                used += count
        self._add_drafts(runs, min(self._budget, _SPECULATIVE_PASS) - used)
        if copies:
            self._kv.storage.copy(copies)
        return runs

    def _shares(self) -> dict[Entry, int]:
        """How many tokens each of those that miss more than one may have of the next pass."""
        assert self._kv is not None
        readers, spare = [], self._budget
        for entry in self.running:
            if entry.missing > 1:
                readers.append(entry)
            else:
                spare -= len(entry.parts)
        if len(readers) < 2:
            return {entry: min(entry.missing, spare) for entry in readers}
        rest = {}
        for entry in readers:
            first = entry.parts[0]
            known = 0 if first.table.length else self._kv.known(first.tokens, entry.request.whose)
            rest[entry] = entry.missing - known
        shares, half = {}, spare // 2
        for entry in readers[1:]:
            if rest[entry] <= half:
                shares[entry] = rest[entry]
                half, spare = half - rest[entry], spare - rest[entry]
        for entry in readers:
            if entry not in shares:
                shares[entry] = min(rest[entry], spare)
                spare -= shares[entry]
        return shares

    def _reuse(self, sequence: Sequence) -> None:
        """Begin with what the cache knows of the sequence."""
        assert self._kv is not None
        sequence.table = self._kv.match(sequence.tokens, sequence.request.whose)
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
            if draft and not self._lacks_room([(sequence, len(draft))]):
                sequence.table.append(len(draft))
                runs[n] = sequence, replace(run, token_ids=[*run.token_ids, *draft], logits="all")
                spare -= len(draft)

    def _make_room_for(self, entry: Entry, wanted: list[tuple[Sequence, int]]) -> bool:
        """Preempt the youngest until the blocks are there; False if that was the entry itself.

        One that lacks memory even when it is alone fails.
        """
        while why := self._lacks_room(wanted):
            if self.running == [entry]:
                if not isinstance(why, NotEnoughMemory):  # a sequence alone has room: see max_tokens
                    beams = f"{len(entry.parts)} beams need more than the {self._max_blocks} blocks of the KV cache"
                    why = NotEnoughMemory(beams, "ask for fewer beams or a shorter text")
                self.fail(entry, why)
                return False
            youngest = self.running.pop()
            self.release(youngest)
            self.waiting.appendleft(youngest)
            self._counters.preemptions += 1
            if youngest is entry:
                return False
        return True

    def _lacks_room(self, wanted: list[tuple[Sequence, int]]) -> bool | NotEnoughMemory:
        """False if the blocks are there; else why not, where it is for want of memory."""
        assert self._kv is not None
        needed = 0
        for sequence, count in wanted:
            needed += sequence.table.blocks_needed(count)
        try:
            return not self._kv.make_room(needed, self._max_blocks)
        except NotEnoughMemory as error:
            return error

    def _has_place(self, entry: Entry) -> bool:
        """Alone it always has, though its beams be more."""
        return not self.running or sum(len(e.samples) for e in [*self.running, entry]) <= self.max_sequences

    def _has_blocks(self, entry: Entry) -> bool:
        """Whether all of it fits beside all of the others, with a block to spare for each; alone it always does."""
        assert self._kv is not None
        size, everyone = self._kv.pool.block_size, [*self.running, entry]
        wanted = sum(len(e.samples) for e in everyone)
        for part in (part for e in everyone for part in e.parts):
            wanted += -(-len(part.tokens) // size) - len(part.table.blocks)
        return not self.running or wanted <= self._kv.available(self._max_blocks)

    def _next_uncached(self) -> list[tuple[Sequence, Run]]:
        while self.waiting and self._has_place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        runs: list[tuple[Sequence, Run]] = []
        budget = self._budget
        for entry in sorted(self.running, key=lambda e: e.step):  # so that all advance alike
            count = sum(len(part.tokens) for part in entry.parts)
            if runs and count > budget:
                break
            runs += [(part, Run(list(part.tokens), adapter=part.request.adapter)) for part in entry.parts]
            budget -= count
        return runs
