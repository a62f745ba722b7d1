"""Continuous batching: requests in, tokens out, one forward pass at a time. What a pass computes: planner.py.

Not safe to share between threads. Times nothing and knows no text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pronk.engine.backend import Backend
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.events import Counters, Event, Failure
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.planner import Planner
from pronk.engine.predictions import Predictions
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS, PrefixCache
from pronk.engine.rng import check_seed, stream
from pronk.engine.sampling import NotNumbers, Sampled
from pronk.engine.sequence import Request, Sequence
from pronk.errors import BadRequest


class _Bookkeeping:
    """Marks a cache as unsettled for good where what is done inside is left half done."""

    def __init__(self, kv: PrefixCache | None) -> None:
        self._kv, self._settled = kv, True

    def __enter__(self) -> None:
        if self._kv:
            self._settled, self._kv.settled = self._kv.settled, False

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._kv and error is None:
            self._kv.settled = self._settled


class Scheduler:
    """Runs requests over a backend, many at a time; each gets the tokens it would get alone.

    max_batch_tokens bounds one forward pass, max_sequences the samples under way at once, and max_kv_tokens the cache
    (None: enough for max_sequences of the full context), which grows on demand. A sequence holds at most
    min(ctx_size, max_kv_tokens) tokens and then ends with "length". Without the cache a forward pass holds at least one
    whole sequence, however long.

    `kv`: a cache to use, whose texts are reused and which remembers those that are run; None makes one that remembers
    nothing, in blocks of `block_size`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        cached: bool = True,
        max_batch_tokens: int = PASS_TOKENS,
        max_sequences: int = 64,
        block_size: int = BLOCK_SIZE,
        max_kv_tokens: int | None = None,
        kv: PrefixCache | None = None,
    ) -> None:
        if kv is not None:
            block_size = kv.pool.block_size
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
        max_blocks = max_kv_tokens // block_size
        if kv is None and cached:
            kv = PrefixCache(backend, block_size, first_blocks=min(FIRST_BLOCKS, max_blocks))
        self.counters = Counters()
        self._backend, self._kv, self._cached, self._closed = backend, kv if cached else None, cached, False
        self._max_tokens = min(backend.ctx_size, max_blocks * block_size) if cached else backend.ctx_size
        self._plan = Planner(self._kv, max_batch_tokens, max_sequences, max_blocks, self.counters)
        self._bookkeeping = _Bookkeeping(self._kv)
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
        self._plan.add(request, tokens)
        return request.id

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Drop a request, or one sample of it: no further step gives an event of it. Unknown ones are ignored."""
        for sequence in self._plan.sequences:
            if sequence.request.id == request:
                sequence.samples = [i for i in sequence.samples if sample is not None and i != sample]
                if not sequence.samples:
                    self._plan.drop(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._plan.running or self._plan.waiting or self._plan.failed)

    def step(self) -> list[Event | Failure]:
        """One forward pass: the tokens it gave, which may be none while a long prompt is computed.

        A sequence that cannot go on (its logits are not numbers, or memory lacks even for it alone) ends in a Failure
        for each of its samples, and no other is touched.
        Where the pass raises (out of memory, Ctrl-C), what was half done is forgotten, and the next step computes it
        again. An interrupt in the moment after it, while tokens are handed out, may lose some: then the scheduler is to
        be closed.
        """
        try:
            with self._bookkeeping:
                runs = self._plan.next()
                if not runs:
                    return self._failures()
                batch = Batch.of([run for _, run in runs])
            predictions = self._backend.predict(batch, self._kv.storage if self._kv else None)
            drawn, spoilt = self._draw(runs, predictions)
            with self._bookkeeping:
                self._count(runs, drawn)
                for sequence, error in spoilt.items():
                    self._plan.fail(sequence, error)
                advanced = [self._advance(sequence, tokens) for sequence, tokens in drawn.items()]
        except BaseException:
            with self._bookkeeping:
                for sequence in self._plan.running:
                    sequence.table.free()
            raise
        return [*(event for events in advanced for event in events), *self._failures()]

    def close(self) -> None:
        """Cancel everything. A cache that was handed in is its owner's again."""
        with self._bookkeeping:
            for sequence in self._plan.sequences:
                self._plan.drop(sequence)
        self._closed = True

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, tokens: list[int], params: SamplingParams, seed: int) -> None:
        if self._closed:
            raise RuntimeError("the scheduler is closed")
        params.check_prompt(tokens, self._backend.config.vocab_size, self._max_tokens)
        check_seed(params.rng, seed)
        if params.num_beams > 1:
            raise BadRequest(f"num_beams={params.num_beams} is not a matter of sampling; call beam_search")
        if params.speculative and not self._cached:
            raise BadRequest(f"speculative={params.speculative!r} needs the KV cache, which is off")
        if params.samples > self._plan.max_sequences:
            raise BadRequest(f"n={params.samples} samples exceed the {self._plan.max_sequences} sequences run at once")

    def _draw(
        self, runs: list[tuple[Sequence, Run]], predictions: Predictions
    ) -> tuple[dict[Sequence, list[list[Sampled]]], dict[Sequence, NotNumbers]]:
        """The next tokens of each sample of each sequence whose run gives logits, or why there are none.

        Changes nothing.
        """
        drawn, spoilt, at = {}, {}, 0
        for sequence, run in runs:
            if run.logits != "none":
                draft = run.token_ids[1:] if run.logits == "all" else ()
                try:
                    drawn[sequence] = sequence.draw(predictions, at, draft)
                except NotNumbers as error:
                    spoilt[sequence] = error
                at += 1 + len(draft)
        return drawn, spoilt

    def _failures(self) -> list[Event | Failure]:
        """Those that nobody was told of yet."""
        failed, self._plan.failed = self._plan.failed, []
        return [Failure(sequence.request.id, n, error) for sequence, error in failed for n in sequence.samples]

    def _advance(self, sequence: Sequence, drawn: list[list[Sampled]]) -> list[Event]:
        """Give each sample its tokens and a sequence of its own, and let go of those that are finished."""
        if self._kv and sequence.step == 0:
            self._kv.keep(sequence.tokens, sequence.table)
        samples = sequence.samples
        self.counters.cached_tokens += sequence.table.length * (len(samples) - 1)
        sequence.samples = samples[:1]
        branches = [sequence, *(sequence.branch(i) for i in samples[1:])]
        if len(branches) > 1:  # beside the first one: they are of its age
            place = self._plan.running.index(sequence) + 1
            self._plan.running[place:place] = branches[1:]
        return [event for branch, tokens in zip(branches, drawn, strict=True) for event in self._extend(branch, tokens)]

    def _extend(self, sequence: Sequence, drawn: list[Sampled]) -> list[Event]:
        request, first = sequence.request, sequence.step
        sequence.tokens += [sampled.token for sampled in drawn]
        if self._kv:
            sequence.table.truncate(len(sequence.tokens) - 1)  # to what was confirmed of a draft
        reason: FinishReason | None = None
        if drawn[-1].token in request.stop_ids:
            reason = "stop"
        elif len(sequence.tokens) >= request.max_tokens:
            reason = "length"
        if reason:
            self._plan.drop(sequence)
        events = []
        for n, s in enumerate(drawn):
            why = reason if n == len(drawn) - 1 else None
            index = sequence.samples[0]
            events.append(Event(request.id, index, first + n, s.token, s.logprob, s.top, why, sequence.savings))
        return events

    def _count(self, runs: list[tuple[Sequence, Run]], drawn: dict[Sequence, list[list[Sampled]]]) -> None:
        self.counters.steps += 1
        for sequence, run in runs:
            end = run.start + len(run.token_ids)
            if run.logits == "all":
                drafted = len(run.token_ids) - 1
                accepted = len(drawn[sequence][0]) - 1 if sequence in drawn else 0
                self.counters.drafted_tokens += drafted
                self.counters.accepted_tokens += accepted
                sequence.savings.drafted_tokens += drafted
                sequence.savings.accepted_tokens += accepted
                sequence.drafter.observe(drafted, accepted, len(sequence.tokens) + accepted + 1)
                end -= drafted - accepted
            new = max(0, end - max(run.start, sequence.computed))
            decoded = min(new, max(0, end - sequence.request.prompt_tokens))
            self.counters.decode_tokens += decoded
            self.counters.prefill_tokens += new - decoded
            self.counters.recomputed_tokens += end - run.start - new
            sequence.computed = max(sequence.computed, end)
