"""Continuous batching: requests in, tokens out, one forward pass at a time. What a pass computes: planner.py.

Not safe to share between threads. Times nothing and knows no text.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Several

from pronk.engine.backend import Backend
from pronk.engine.batch import PASS_TOKENS, Batch, Run
from pronk.engine.beam import BeamSearch, Step
from pronk.engine.events import Counters, Event, Failure, Outcome
from pronk.engine.grammar import Grammar, Ungrammatical
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.planner import Entry, Planner
from pronk.engine.predictions import Ask, Predictions
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS, PrefixCache
from pronk.engine.rng import check_seed, stream
from pronk.engine.sampling import NotNumbers, Sampled
from pronk.engine.sequence import Request, Sequence
from pronk.errors import BadRequest, PronkError


class Scheduler:
    """Runs requests over a backend, many at a time; each gets the tokens it would get alone.

    max_batch_tokens bounds one forward pass, max_sequences the samples under way at once, and max_kv_tokens the cache
    (None: enough for max_sequences of the full context), which grows on demand; its budget is what there is memory for
    when it is made. A sequence holds at most min(ctx_size, max_kv_tokens) tokens and then ends with "length". Without
    the cache a forward pass holds at least one whole sequence, however long.

    `kv`: a cache to use, whose texts are reused and which remembers those that are run; None makes one that remembers
    nothing, in blocks of `block_size`.

    `settled` is False while something is half done. Where an exception leaves it so, neither this scheduler nor its
    cache is to be used again. After a pass that raised (out of memory, Ctrl-C) it is True: what was planned is
    forgotten, and the next step computes it again.
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
        counters: Counters | None = None,
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
        if kv is not None and cached:
            kv.reserve(max_blocks)
        self.counters, self.settled = counters or Counters(), True
        self.tokens = 0  # of the last pass
        self._backend, self._kv, self._cached, self._closed = backend, kv if cached else None, cached, False
        self._max_batch_tokens = max_batch_tokens
        self._max_tokens = min(backend.ctx_size, max_blocks * block_size) if cached else backend.ctx_size
        self._plan = Planner(self._kv, max_batch_tokens, max_sequences, max_blocks, self.counters)
        self._next_id = 0

    def add(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        seed: int,
        eos_ids: Collection[int] = (),
        grammar: Grammar | None = None,
        owner: Hashable = None,
    ) -> int:
        """Queue a request; gives its id. `seed` is the effective one (see rng.effective_seed).

        Raises ContextOverflow for a prompt with no room left to generate a token, and BadRequest.
        """
        tokens = [int(token) for token in prompt_ids]
        request = self.prepare(self._next_id, tokens, params, seed, eos_ids, grammar=grammar, owner=owner)
        self._next_id += 1
        self.enqueue(request, tokens)
        return request.id

    def prepare(
        self,
        number: int,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        eos_ids: Collection[int],
        adapter: int | None = None,
        grammar: Grammar | None = None,
        owner: Hashable = None,
    ) -> Request:
        """The request of that number, for `enqueue`. Changes nothing. Raises as `add` does.

        `adapter`: one that is attached to the backend, 0 for none, None for what it answers with by itself. `grammar`:
        what its texts are to follow. `owner`: who alone may find in the cache what is computed for it.
        """
        params.check_prompt(prompt_ids, self._backend.config.vocab_size, self._max_tokens)
        check_seed(params.rng, seed)
        hash(owner)  # or TypeError, now and not amid a pass
        if params.speculative and not self._cached:
            raise BadRequest(f"speculative={params.speculative!r} needs the KV cache, which is off")
        if params.num_beams > self._max_batch_tokens:
            raise BadRequest(f"num_beams={params.num_beams} exceed the {self._max_batch_tokens} tokens of one pass")
        if adapter and adapter not in self._backend.attached:
            raise BadRequest(f"there is no adapter of the number {adapter!r}")
        stop_ids = params.stop_ids(eos_ids)
        if grammar:
            if grammar.vocab_size != (known := self._backend.config.vocab_size):
                raise BadRequest(f"the grammar is of {grammar.vocab_size} tokens, and the model knows {known}")
            if params.num_beams > 1 and not stop_ids:
                raise BadRequest("a beam that is to follow a grammar needs a token that ends it; leave ignore_eos out")
        return Request(
            id=number,
            params=params,
            prompt_tokens=len(prompt_ids),
            max_tokens=min(len(prompt_ids) + params.max_new_tokens, self._max_tokens),
            stop_ids=stop_ids,
            streams=tuple(stream(params.rng, seed, i) for i in range(params.samples)),
            adapter=self._backend.adapter if adapter is None else adapter,
            grammar=grammar,
            owner=owner,
        )

    def enqueue(self, request: Request, prompt_ids: list[int]) -> Entry:
        if self._closed:
            raise RuntimeError("the scheduler is closed")
        return self._plan.add(request, list(prompt_ids))

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Drop a request, or one sample of it: no further step gives an event of it. Unknown ones are ignored."""
        for entry in self._plan.entries:
            if entry.request.id == request:
                entry.samples = [i for i in entry.samples if sample is not None and i != sample]
                if not entry.samples:
                    self._plan.drop(entry)

    @property
    def kv(self) -> PrefixCache | None:
        return self._kv

    @property
    def has_work(self) -> bool:
        return bool(self._plan.running or self._plan.waiting or self._plan.failed)

    @property
    def queue(self) -> tuple[int, int]:
        """How many sequences run, and how many requests wait."""
        return sum(len(entry.parts) for entry in self._plan.running), len(self._plan.waiting)

    def step(self, most: int | None = None) -> list[Outcome]:
        """One forward pass: the tokens it gave, which may be none while a long prompt is computed.

        `most`: of how many tokens it is to be at the most, if it reads prompts while texts go on.

        A sequence that cannot go on (its logits are not numbers, its grammar lets no token follow, or memory lacks even
        for it alone) ends in a Failure for each of its samples, and no other is touched.
        """
        settled, self.settled = self.settled, False
        runs = self._plan.next(most)
        self.tokens = sum(len(run.token_ids) for _, run in runs)
        outcomes: list[Outcome] = []
        if runs:
            batch = Batch.of([run for _, run in runs])
            self.settled = True
            try:
                predictions = self._backend.predict(batch, self._kv.storage if self._kv else None)
                drawn, steps, spoilt = self._draw(runs, predictions)
            except BaseException:
                self.settled = False
                for entry in self._plan.running:
                    for part in entry.parts:
                        part.forget()
                self.settled = True
                raise
            self.settled = False
            self._count(runs, drawn)
            self._keep(runs)
            for entry, error in spoilt.items():
                self._plan.fail(entry, error)
            for sequence, tokens in drawn.items():
                outcomes += self._advance(sequence, tokens)
            for search, step in steps.items():
                outcomes += self._search(search, step)
        if self._plan.failed:
            outcomes += self._failures()
        self.settled = settled
        return outcomes

    def close(self) -> None:
        """Cancel everything. A cache that was handed in is its owner's again."""
        settled, self.settled = self.settled, False
        for entry in self._plan.entries:
            self._plan.drop(entry)
        self._closed, self.settled = True, settled

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw(
        self, runs: list[tuple[Sequence, Run]], predictions: Predictions
    ) -> tuple[dict[Sequence, list[list[Sampled]]], dict[BeamSearch, Step], dict[Entry, PronkError]]:
        """The next tokens of each sample of each sequence whose run gives logits, and of beams; or why there are none.

        Changes nothing.
        """
        drawn: dict[Sequence, list[list[Sampled]]] = {}
        steps: dict[BeamSearch, Step] = {}
        spoilt: dict[Entry, PronkError] = {}
        asks: list[Ask] = []
        asked: list[tuple[Sequence, Run, slice]] = []  # and which asks are theirs
        at = 0
        for sequence, run in runs:
            if run.logits == "none" or sequence.search in steps or sequence.search in spoilt:
                continue
            search, rows = sequence.search, len(run.token_ids) if run.logits == "all" else 1
            try:
                if search:
                    rows = len(search.parts)
                    steps[search] = search.choose(predictions.logits(at, rows))
                else:
                    its = sequence.asks(at, _draft(run))
                    asked.append((sequence, run, slice(len(asks), len(asks) + len(its))))
                    asks += its
            except (NotNumbers, Ungrammatical) as error:
                spoilt[search or sequence] = error
            at += rows
        answers = predictions.draw(asks) if asks else []
        for sequence, run, of in asked:
            try:
                drawn[sequence] = sequence.settle(answers[of], _draft(run))
            except (NotNumbers, Ungrammatical) as error:
                spoilt[sequence] = error
        return drawn, steps, spoilt

    def _failures(self) -> list[Outcome]:
        """Those that nobody was told of yet."""
        failed, self._plan.failed = self._plan.failed, []
        return [Failure(entry.request.id, n, error) for entry, error in failed for n in entry.samples]

    def _keep(self, runs: list[tuple[Sequence, Run]]) -> None:
        """What was read of prompts is there for others at once, though more of them is to be read."""
        for sequence, run in runs:
            if self._kv and run.logits == "none" and not (sequence.search and len(sequence.search.parts) > 1):
                self._kv.keep(sequence.tokens, sequence.table, sequence.request.whose)

    def _search(self, search: BeamSearch, step: Step) -> list[Outcome]:
        if self._kv and search.step == 0:
            self._kv.keep(search.parts[0].tokens, search.parts[0].table, search.request.whose)
        if found := search.advance(step):
            self._plan.drop(search)
        return [found] if found else []

    def _advance(self, sequence: Sequence, drawn: list[list[Sampled]]) -> list[Event]:
        """Give each sample its tokens and a sequence of its own, and let go of those that are finished."""
        if self._kv and sequence.step == 0:
            self._kv.keep(sequence.tokens, sequence.table, sequence.request.whose)
        samples = sequence.samples
        if len(samples) == 1:
            return self._extend(sequence, drawn[0])
        self.counters.cached_tokens += sequence.table.length * (len(samples) - 1)
        sequence.samples = samples[:1]
        branches = [sequence, *(sequence.branch(i) for i in samples[1:])]
        place = self._plan.running.index(sequence) + 1  # beside the first one: they are of its age
        self._plan.running[place:place] = branches[1:]
        return [event for branch, tokens in zip(branches, drawn, strict=True) for event in self._extend(branch, tokens)]

    def _extend(self, sequence: Sequence, drawn: list[Sampled]) -> list[Event]:
        request, first = sequence.request, sequence.step
        sequence.tokens += [sampled.token for sampled in drawn]
        if self._kv:
            sequence.table.truncate(len(sequence.tokens) - 1)  # to what was confirmed of a draft
        reason: FinishReason | None = None
        completes = drawn[-1].completes
        if drawn[-1].token in request.stop_ids or completes:
            reason = "stop"
        elif len(sequence.tokens) >= request.max_tokens:
            reason = "length"
        if reason:
            self._plan.drop(sequence)
        index, savings = sequence.samples[0], sequence.savings
        events = [
            Event(request.id, index, n, s.token, s.logprob, s.top, None, savings) for n, s in enumerate(drawn, first)
        ]
        events[-1].finish_reason, events[-1].completes = reason, completes
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


def _draft(run: Run) -> Several[int]:
    """What the run guesses beyond its sequence's tokens."""
    return run.token_ids[1:] if run.logits == "all" else ()
