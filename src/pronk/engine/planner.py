"""Planner: which tokens of which sequences make the next forward pass; who waits, and who must give way.

Every sequence is a list of tokens, of which the KV cache holds the first so many. What is missing is computed, in
chunks, and once nothing is missing the logits give the next token. A fresh prompt, a decode step and a preempted
sequence that must be computed again differ only in how much is missing. Without the cache all of it is, at every step.

A sequence that decodes may bring a draft of what follows (see ngram.py): the same pass computes it, and as much of it
stays as the logits confirm.

No prompt holds others up. Whoever decodes gets a token in every pass. Of the rest of a pass, half is for the prompts of
which least is left to be read, and the other half, and what those do not take, for the oldest: so it goes on, however
many come after it, and everybody is the oldest once. A prompt whose next block another one is about to read waits for
that, and then finds it in the cache. While texts go on, the rest of a pass may be bounded by time (see pace.py); it
makes no difference to any text.

Those who wait are admitted in the order in which they came. One that does not fit is passed by those behind it that do,
but by no more than as many as may run at once; then nobody is admitted before it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from itertools import islice

from pronk.engine.batch import Run, Wants
from pronk.engine.beam import BeamSearch
from pronk.engine.events import Counters
from pronk.engine.kv_blocks import BlockPool, BlockTable
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sampling import NotNumbers
from pronk.engine.sequence import Request, Sequence
from pronk.errors import NotEnoughMemory, PronkError

# A pass of so many tokens is still bound by reading the weights. Only up to here are drafts as good as free.
_SPECULATIVE_PASS = 16
_LOOKED_AT = 64  # of those who wait, before each pass

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

    def next(self, most: int | None = None) -> list[tuple[Sequence, Run]]:
        """The runs of the next pass, those of one entry side by side. Their tokens count as cached from now on.

        `most`: how many tokens it may have if it reads prompts while texts go on; None: as many as any other.
        """
        self._admit()
        return self._next_cached(most) if self._kv else self._next_uncached()

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
        if self._kv and isinstance(error, NotNumbers):
            for part in entry.parts:
                self._kv.forget(part.table)
        self.release(entry, keep=False)
        self.running.remove(entry)
        self.failed.append((entry, error))

    def _admit(self) -> None:
        """See above. Where no more run, or nothing waits, it costs nothing."""
        places = self.max_sequences - sum(len(entry.samples) for entry in self.running)
        blocks = 0
        if self._kv and self.waiting:
            blocks = self._kv.available(self._max_blocks) - sum(map(self._needs, self.running))
        passed: list[Entry] = []
        for entry in list(islice(self.waiting, _LOOKED_AT)):
            if (places < 1 and self.running) or any(other.passed >= self.max_sequences for other in passed):
                break
            # Alone it always fits, though its beams be more than may run, or its tokens more than there is room for.
            needs = self._needs(entry)
            if not self.running or (len(entry.samples) <= places and needs <= blocks):
                self.waiting.remove(entry)
                self.running.append(entry)
                places, blocks = places - len(entry.samples), blocks - needs
                for other in passed:
                    other.passed += 1
            else:
                passed.append(entry)

    def _needs(self, entry: Entry) -> int:
        """How many more blocks all of it takes, with one to spare for each sample."""
        if not self._kv:
            return 0
        size = self._kv.pool.block_size
        lacking = (-(-len(part.tokens) // size) - len(part.table.blocks) for part in entry.parts)
        return len(entry.samples) + sum(lacking)

    def _next_cached(self, most: int | None) -> list[tuple[Sequence, Run]]:
        assert self._kv is not None
        runs: list[tuple[Sequence, Run]] = []
        copies: list[tuple[int, int]] = []
        used, shares = 0, self._shares(most)
        for entry in list(self.running):
            if entry not in self.running:  # preempted meanwhile: it is to hold no blocks
                continue
            count = shares.get(entry, 1)
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

    def _shares(self, most: int | None) -> dict[Entry, int]:
        """How many tokens each of those that miss more than one may have of the next pass."""
        readers, decoding = [], 0
        for entry in self.running:
            for part in entry.parts if entry.missing > 1 else ():
                self._reuse(part)
            if entry.missing > 1:
                readers.append(entry)
            else:
                decoding += len(entry.parts)
        spare = self._budget - decoding
        if most is not None and decoding:
            spare = min(spare, max(most - decoding, 1))
        shares, coming = dict.fromkeys(readers, 0), dict[Hashable, Entry]()
        rest = {entry: sum(part.missing for part in entry.parts) for entry in readers}

        def give(entries: list[Entry], tokens: int) -> int:
            """What is left of these."""
            for entry in entries:
                count = min(rest[entry] - shares[entry], tokens)
                if count and self._is_first(entry, coming):
                    shares[entry] += count
                    tokens -= count
            return tokens

        later = sorted(readers[1:], key=rest.__getitem__)
        left = give(later, spare // 2)
        left = give(readers[:1], spare - spare // 2 + left)
        give(later, left)
        return shares

    def _is_first(self, entry: Entry, coming: dict[Hashable, Entry]) -> bool:
        """Whether nobody else reads in this pass what the entry is to read next."""
        assert self._kv is not None
        part = entry.parts[0]
        key = self._kv.next_key(part.table, part.tokens, entry.request.whose) if len(entry.parts) == 1 else None
        return key is None or coming.setdefault(key, entry) is entry

    def _reuse(self, sequence: Sequence) -> None:
        """Go on with what the cache knows of the sequence."""
        assert self._kv is not None
        if not self._kv.extend(sequence.table, sequence.tokens, sequence.request.whose):
            return
        known = min(sequence.table.length, sequence.request.prompt_tokens)
        if known > sequence.computed:
            self._counters.cached_tokens += known - sequence.computed
            sequence.savings.cached_tokens += known - sequence.computed
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

    def _next_uncached(self) -> list[tuple[Sequence, Run]]:
        runs: list[tuple[Sequence, Run]] = []
        budget = self._budget
        for entry in sorted(self.running, key=lambda e: e.step):  # so that all advance alike
            count = sum(len(part.tokens) for part in entry.parts)
            if runs and count > budget:
                break
            runs += [(part, Run(list(part.tokens), adapter=part.request.adapter)) for part in entry.parts]
            budget -= count
        return runs
