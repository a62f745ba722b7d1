"""Continuous batching: which tokens of which sequences make the next forward pass.

Every sequence is a list of tokens, of which the KV cache holds the first so many. What is missing is computed, in
chunks, and once nothing is missing the logits give the next token. A fresh prompt, a decode step and a preempted
sequence that must be computed again differ only in how much is missing. Without the cache all of it is, at every step.

Not safe to share between threads. Times nothing and knows no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from pronk.engine.backend import Backend
from pronk.engine.batch import Batch, Run, Wants
from pronk.engine.kv_blocks import BlockPool, BlockTable, make_room
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.rng import check_seed, stream
from pronk.engine.sampling import Float32, Sampled, sample
from pronk.engine.sequence import Request, Sequence
from pronk.errors import BadRequest


@dataclass(frozen=True)
class Event:
    """One token of one sample."""

    request: int
    sample: int  # 0..n-1
    step: int  # 0 is the first generated token
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None = None  # of the last token alone

    @property
    def is_stop_token(self) -> bool:
        """Whether the token is the EOS or stop id that ended the sample, and so no part of the text."""
        return self.finish_reason == "stop"


@dataclass
class Counters:
    """What the forward passes did, in tokens."""

    steps: int = 0
    prefill_tokens: int = 0  # of prompts
    decode_tokens: int = 0  # the newest token of a sequence
    recomputed_tokens: int = 0  # computed before and not kept: after preemption, or for want of a cache
    cached_tokens: int = 0  # prompt tokens that further samples of a request took from the first
    preemptions: int = 0


class Scheduler:
    """Runs requests over a backend, many at a time; each gets the tokens it would get alone.

    max_batch_tokens bounds one forward pass, max_sequences the samples under way at once, and max_kv_tokens the cache
    (None: enough for max_sequences of the full context), which grows on demand. A sequence holds at most
    min(ctx_size, max_kv_tokens) tokens and then ends with "length". Without the cache a forward pass holds at least one
    whole sequence, however long.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        cached: bool = True,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        block_size: int = 64,
        max_kv_tokens: int | None = None,
    ) -> None:
        blocks_of_context = -(-backend.ctx_size // block_size) if block_size > 0 else 0
        if max_kv_tokens is None:
            max_kv_tokens = max_sequences * blocks_of_context * block_size
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
            ("block_size", block_size),
        ):
            if value < 1:
                raise BadRequest(f"{name} must be at least 1, not {value}")
        if max_kv_tokens < block_size:
            raise BadRequest(f"max_kv_tokens must be at least the block size, {block_size}, not {max_kv_tokens}")
        self.counters = Counters()
        self._backend = backend
        self._budget = max_batch_tokens
        # One token for each sequence always fits, so that decoding never waits and prefill never starves.
        self._max_sequences = min(max_sequences, max_batch_tokens)
        self._max_blocks = max_kv_tokens // block_size
        self._max_tokens = min(backend.ctx_size, self._max_blocks * block_size) if cached else backend.ctx_size
        first_blocks = min(4, self._max_blocks)
        self._pool = BlockPool(first_blocks, block_size)
        self._storage = backend.new_kv(first_blocks, block_size) if cached else None
        self._cached = cached
        self._waiting: deque[Sequence] = deque()
        # Oldest first. Sequences that still miss more than one token are at the end.
        self._running: list[Sequence] = []
        self._next_id = 0

    def add(self, prompt_ids: Iterable[int], params: SamplingParams, seed: int, eos_ids: Collection[int] = ()) -> int:
        """Queue a request; gives its id. `seed` is the effective one (see rng.effective_seed).

        Raises ContextOverflow for a prompt with no room left to generate a token, and BadRequest.
        """
        tokens = [int(token) for token in prompt_ids]
        self._check(tokens, params, seed)
        request = Request(
            id=self._next_id,
            params=params,
            prompt_tokens=len(tokens),
            max_tokens=min(len(tokens) + params.max_new_tokens, self._max_tokens),
            stop_ids=params.stop_ids(eos_ids),
            streams=tuple(stream(params.rng, seed, i) for i in range(params.samples)),
        )
        self._next_id += 1
        self._waiting.append(Sequence(request, list(range(params.samples)), tokens, BlockTable(self._pool)))
        return request.id

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Drop a request, or one sample of it, at once: no further event comes of it. Unknown ones are ignored."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.id == request:
                sequence.samples = [i for i in sequence.samples if sample is not None and i != sample]
                if not sequence.samples:
                    self._drop(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[Event]:
        """One forward pass: the tokens it gave, which may be none while a long prompt is computed.

        Where it raises (out of memory, Ctrl-C), what was half done is forgotten, and the next step computes it again.
        """
        try:
            runs = self._plan() if self._cached else self._plan_without_cache()
            if not runs:
                return []
            logits = self._backend.forward(Batch.of(run for _, run in runs), self._storage)
            ready = [sequence for sequence, run in runs if run.logits == "last"]
            drawn = [self._draw(sequence, row) for sequence, row in zip(ready, logits, strict=True)]
            self._count(runs)
            advanced = [self._advance(sequence, tokens) for sequence, tokens in zip(ready, drawn, strict=True)]
        except BaseException:
            for sequence in self._running:
                sequence.table.free()
            raise
        return [event for events in advanced for event in events]

    def close(self) -> None:
        """Cancel everything and let go of the cache."""
        for sequence in [*self._running, *self._waiting]:
            self._drop(sequence)
        self._storage = None

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, tokens: list[int], params: SamplingParams, seed: int) -> None:
        if self._cached and self._storage is None:
            raise RuntimeError("the scheduler is closed")
        params.check_prompt(tokens, self._backend.config.vocab_size, self._max_tokens)
        check_seed(params.rng, seed)
        if params.num_beams > 1:
            raise BadRequest(f"num_beams={params.num_beams} is not a matter of sampling; call beam_search")
        if params.samples > self._max_sequences:
            raise BadRequest(f"n={params.samples} samples exceed the {self._max_sequences} sequences run at once")

    # -- which tokens next

    def _plan(self) -> list[tuple[Sequence, Run]]:
        assert self._storage is not None
        runs: list[tuple[Sequence, Run]] = []
        copies: list[tuple[int, int]] = []
        budget = self._budget
        for sequence in self._candidates():
            table, start = sequence.table, sequence.table.length
            end = start + min(sequence.missing, budget)
            if not self._make_room_for(sequence, end - start):
                continue
            copies += table.append(end - start)
            logits: Wants = "none" if sequence.missing else "last"
            runs.append((sequence, Run(sequence.tokens[start:end], start, list(table.blocks), logits)))
            budget -= end - start
            if not budget:
                break
        if copies:
            self._storage.copy(copies)
        return runs

    def _candidates(self) -> Iterator[Sequence]:
        """Those under way, oldest first, then those that can be admitted."""
        for sequence in list(self._running):
            if sequence in self._running:  # not preempted meanwhile
                yield sequence
        while self._waiting and self._has_place(self._waiting[0]) and self._has_blocks(self._waiting[0]):
            self._running.append(self._waiting.popleft())
            yield self._running[-1]

    def _make_room_for(self, sequence: Sequence, count: int) -> bool:
        """Preempt the youngest sequences until the blocks are there; False if that was `sequence` itself."""
        assert self._storage is not None
        while not make_room(self._pool, self._storage, sequence.table.blocks_needed(count), self._max_blocks):
            youngest = self._running.pop()
            youngest.table.free()
            self._waiting.appendleft(youngest)
            self.counters.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _has_place(self, sequence: Sequence) -> bool:
        return sum(len(s.samples) for s in [*self._running, sequence]) <= self._max_sequences

    def _has_blocks(self, sequence: Sequence) -> bool:
        """Whether all of it fits beside the others, with a block to spare for each; alone it always does."""
        spare = sum(len(s.samples) for s in [*self._running, sequence])
        wanted = sequence.table.blocks_needed(sequence.missing) + spare
        return not self._running or wanted <= self._pool.num_free + self._max_blocks - self._pool.num_blocks

    def _plan_without_cache(self) -> list[tuple[Sequence, Run]]:
        while self._waiting and self._has_place(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        runs: list[tuple[Sequence, Run]] = []
        budget = self._budget
        for sequence in sorted(self._running, key=lambda s: s.step):  # so that all advance alike
            if runs and len(sequence.tokens) > budget:
                break
            runs.append((sequence, Run(list(sequence.tokens))))
            budget -= len(sequence.tokens)
        return runs

    # -- what the logits give

    def _draw(self, sequence: Sequence, logits: Float32) -> list[Sampled]:
        """The next token of each sample, from one row of logits [V]. Changes nothing."""
        params, streams = sequence.request.params, sequence.request.streams
        generated = sequence.tokens[sequence.request.prompt_tokens :]
        return [
            sample(logits, params, sequence.tokens, generated, partial(streams[i].uniform, len(generated)))
            for i in sequence.samples
        ]

    def _advance(self, sequence: Sequence, drawn: list[Sampled]) -> list[Event]:
        """Give each sample its token and a sequence of its own, and let go of those that are finished."""
        samples = sequence.samples
        shared = sequence.table.length
        self.counters.cached_tokens += shared * (len(samples) - 1)
        branches = [sequence]
        sequence.samples = samples[:1]
        for i in samples[1:]:
            branches.append(
                Sequence(sequence.request, [i], list(sequence.tokens), sequence.table.fork(), sequence.computed)
            )
        # Beside the first one: they are of its age.
        place = self._running.index(sequence) + 1
        self._running[place:place] = branches[1:]
        return [self._extend(branch, token) for branch, token in zip(branches, drawn, strict=True)]

    def _extend(self, sequence: Sequence, drawn: Sampled) -> Event:
        request, step = sequence.request, sequence.step
        sequence.tokens.append(drawn.token)
        reason: FinishReason | None = None
        if drawn.token in request.stop_ids:
            reason = "stop"
        elif len(sequence.tokens) >= request.max_tokens:
            reason = "length"
        if reason:
            self._drop(sequence)
        return Event(request.id, sequence.samples[0], step, drawn.token, drawn.logprob, drawn.top, reason)

    def _drop(self, sequence: Sequence) -> None:
        sequence.table.free()
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def _count(self, runs: list[tuple[Sequence, Run]]) -> None:
        self.counters.steps += 1
        for sequence, run in runs:
            end = run.start + len(run.token_ids)
            new = max(0, end - max(run.start, sequence.computed))
            decoded = min(new, max(0, end - sequence.request.prompt_tokens))
            self.counters.decode_tokens += decoded
            self.counters.prefill_tokens += new - decoded
            self.counters.recomputed_tokens += len(run.token_ids) - new
            sequence.computed = max(sequence.computed, end)
