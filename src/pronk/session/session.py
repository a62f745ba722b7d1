"""Session: requests under way on one backend, from any number of threads, all of them in the same forward passes."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from pronk.engine.batch import PASS_TOKENS
from pronk.engine.events import Counters, Event, Found, Outcome
from pronk.engine.generation import Chunk, Stopwatch
from pronk.engine.grammar import Grammar
from pronk.engine.pace import Pace
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE, PrefixCache
from pronk.engine.rng import effective_seed
from pronk.engine.scheduler import Scheduler
from pronk.engine.streaming import TextStream
from pronk.errors import PronkError
from pronk.session.handle import Handle
from pronk.session.load import Load
from pronk.session.reader import Reader

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Progress
    from pronk.engine.backend import Attached, Backend
    from pronk.tokenizer import Tokenizer

READING, SEARCHING = "reading the prompt", "beam search"
_PATIENCE = 1.0  # seconds after which who waits looks again: whoever was interrupted may have rung no bell
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """Takes requests, and gives chunks of their texts, one forward pass of all of them at a time.

    Any thread may call any method, and one at a time `step`. There are two ways to use one, which go together:

    - `submit` requests and call `step` in a loop: it computes one pass and gives the chunks of it. So a server does,
      whose event loop submits and cancels while another thread steps; neither of the two waits for a pass.
    - `stream` texts: whoever asks for a chunk that is not there computes the next pass, for everybody, unless another
      thread is at it; then it waits for what that brings. So do the threads that call LLM.generate and LLM.stream.

    A request gets the tokens that it gets alone, but for rounding where passes are not the same to the bit however
    tokens are batched. A pass computes at most `max_batch_tokens` tokens: one of each text under way, and of
    prompts what is left, in pieces. So no prompt, of any length, keeps a text waiting for longer than one pass; a
    smaller pass is a shorter wait, and reads prompts more slowly. While texts go on that somebody reads as they come,
    prompts are read in passes of about `max_pass_s` seconds, where that changes no bit. At most `max_sequences` samples
    run at once; the rest wait.

    `cached` False: without a KV cache, where a pass holds whole texts, however long. `prefix_cache`: how many tokens of
    earlier texts stay in the cache, to be reused; None: one context's. `max_kv_tokens` bounds the cache (None: enough
    for max_sequences of the full context). `tokenizer` None: every text is empty. `load_s` stands in the chunks' stats.

    What fails concerns one request: its last chunk has the finish_reason "error", and the error; the last of one that
    was submitted and then cancelled "cancelled". Both have stats where there was a token. An exception of the
    pass itself (Ctrl-C, out of memory) is raised to whoever computed it; all others go on with the next.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Sequence[int] = (),
        cached: bool = True,
        prefix_cache: int | None = None,
        max_batch_tokens: int = PASS_TOKENS,
        max_sequences: int = 64,
        max_kv_tokens: int | None = None,
        max_pass_s: float = 0.2,
        load_s: float = 0.0,
    ) -> None:
        self._backend, self._tokenizer, self._eos_ids, self._cached = backend, tokenizer, eos_ids, cached
        self._keep_tokens = backend.ctx_size if prefix_cache is None else prefix_cache
        self._limits: dict[str, Any] = {
            "max_batch_tokens": max_batch_tokens,
            "max_sequences": max_sequences,
            "max_kv_tokens": max_kv_tokens,
        }
        self._load_s, self._seconds, self._counters, self._closed = load_s, 0.0, Counters(), False
        self._scheduler: Scheduler | None = None  # from the first request on, while there is something to be kept
        self._new_tokens, self._pace = 0, Pace(max_pass_s)
        self._numbers = itertools.count()
        self._handles: dict[int, Handle] = {}  # by the number of the request
        # What other threads ask for in the course of a pass is done before the next one.
        self._arriving: deque[Handle] = deque()
        self._leaving: deque[Handle] = deque()
        # Whose turn it is to compute a pass: a thread, and what it reads. It is set in a `try`, and cleared in its
        # `finally` before any call, where no signal handler of Python can come between.
        self._turn: tuple[int, Reader] | None = None
        self._lock = threading.RLock()  # for moments: never held during a pass
        self._waiting: list[Reader] = []
        self._steps = Reader(whole=False)  # of all that is submitted
        _sessions.add(self)

    # -- requests --

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        number: int = 0,
        adapter: Attached | None = None,
        grammar: Grammar | None = None,
        owner: Hashable = None,
    ) -> Handle:
        """Queue a request; the next pass has part in it. Its chunks come from `step`, and say `number`.

        `adapter`: what it is computed with; None: what the backend answers with by itself. `grammar`: what its texts
        follow; one that lets no token follow ends its text with an error. `owner`: whose texts they are, an API key's
        for example; no earlier text of anybody else is reused for them, which would show in how soon they come.
        Raises ContextOverflow and BadRequest at once. Computes nothing, and waits for no pass.
        """
        params = params or SamplingParams()
        seed = effective_seed(params.seed)
        handle = self._handle(list(prompt_ids), params, seed, number, self._steps, adapter, grammar, owner)
        self._arriving.append(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Drop a request: no later pass computes anything of it. One that has ended is left as it is.

        `step` gives a last chunk of each of its texts that has not, and nothing after it. A deadline is a timer that
        calls this. Waits for no pass.
        """
        if handle.left > 0:
            handle.left, handle.cancelled = 0, handle.reader is self._steps
        self._leaving.append(handle)
        with self._lock:
            if self._turn is None and self._scheduler and self._scheduler.settled:
                self._apply()

    def step(self) -> list[tuple[Handle, Chunk]]:
        """The chunks of requests that were submitted: those that other threads' passes left, or those of one more.

        None where there is nothing to be done (see `has_work`), while a prompt is being read, and where another thread
        was waited for.
        """
        chunks = self._steps.chunks
        if not chunks:
            self._move(self._steps)
        return [chunks.popleft() for _ in range(len(chunks))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        adapter: Attached | None = None,
        grammar: Grammar | None = None,
        whole: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[Chunk]:
        """Chunks of the prompts' texts as they come; each says which prompt it is of.

        Who stops reading holds nobody up: passes that others compute go on with its texts, whose chunks are kept, up to
        max_new_tokens of each. Closing the iterator cancels them. `whole`: chunks come when all are there, which spares
        threads that only want the end from being woken for each. `progress` is called with what is being done, how much
        of it is and how much there is: tokens of the prompts, then steps of a beam search.
        """
        reader, seed = Reader(whole and not progress), effective_seed(params.seed)
        try:
            for number, prompt in enumerate(prompts):
                reader.handles.append(self._handle(list(prompt), params, seed, number, reader, adapter, grammar))
            reader.left = len(reader.handles)
            self._arriving.extend(reader.handles)
            read, total = 0, sum(len(handle.prompt) for handle in reader.handles)
            if progress:
                progress(READING, read, total)
            while reader.left or reader.chunks:
                if reader.chunks and reader.ready:
                    _, chunk = reader.chunks.popleft()
                    if chunk.error:
                        raise chunk.error
                    yield chunk
                else:
                    self._move(reader)
                    if progress and read < total:
                        read = sum(handle.read for handle in reader.handles)
                        progress(READING, read, total)
                    elif progress and params.num_beams > 1:
                        steps = [handle.steps for handle in reader.handles]
                        progress(SEARCHING, sum(done for done, _ in steps), sum(of for _, of in steps))
        finally:
            reader.left = 0
            for handle in reader.handles:
                if handle.left:
                    self.cancel(handle)

    def close(self) -> None:
        """Cancel everything, and let go of the cache. Whoever reads is told so by an error."""
        self._closed = True
        for handle in [*self._arriving, *self._handles.values()]:
            if handle.left and handle.reader.handles:
                self._give(handle, handle.failed(PronkError("the session was closed")))
            self.cancel(handle)
        self._ring()
        with self._lock:
            if self._turn is None:
                self._rest()

    @property
    def has_work(self) -> bool:
        return bool(self._handles or self._arriving or self._steps.chunks)

    @property
    def load(self) -> Load:
        """Counted at this moment; cheap."""
        scheduler = self._scheduler  # which another thread may take away meanwhile
        running, waiting = scheduler.queue if scheduler else (0, 0)
        pool = scheduler.kv.pool if scheduler and scheduler.kv else None
        used = pool.num_blocks - pool.num_free - pool.num_idle if pool else 0
        return Load(
            running=running,
            waiting=waiting + len(self._arriving),
            blocks_used=used,
            blocks_free=pool.num_blocks - used if pool else 0,
            new_tokens=self._new_tokens,
            seconds=self._seconds,
            counters=self._counters,
        )

    # -- passes --

    def _move(self, reader: Reader) -> None:
        """Compute one pass, or for who wants a whole text all that it takes; or wait while another thread does."""
        turn = (get_ident(), reader)
        try:
            with self._lock:
                if self._turn is None:
                    self._turn = turn
            if self._turn is not turn:
                self._wait(reader)
                return
            while not reader.ready:
                self._pass()
                if not reader.whole:
                    break
                self._ring()
        finally:
            if self._turn is turn:
                self._turn = None
                self._ring(leaving=True)

    def _wait(self, reader: Reader) -> None:
        """Until the reader is ready, or the turn is to be taken."""
        reader.bell.clear()
        self._waiting.append(reader)
        try:
            if (turn := self._turn) and not reader.ready:  # both may have changed before anybody saw that it waits
                if turn[0] == get_ident():
                    raise PronkError("a signal handler cannot use the model amid the pass that it interrupts")
                reader.bell.wait(_PATIENCE)
        finally:
            self._waiting.remove(reader)

    def _ring(self, leaving: bool = False) -> None:
        """Wake those who have something to read; and, when the turn is given up, one who may take it."""
        for reader in list(self._waiting):
            if reader.ready or leaving:
                leaving = leaving and reader.ready
                reader.bell.set()

    def _pass(self) -> None:
        scheduler = self._apply()
        if scheduler is None or not scheduler.has_work:
            return
        scheduler.settled = False  # until all is handed out
        begun = time.perf_counter()
        outcomes = scheduler.step(self._pace.tokens if self._is_read_along else None)
        taken = time.perf_counter() - begun
        self._seconds += taken
        self._pace.observe(scheduler.tokens, taken)
        for outcome in outcomes:
            if (handle := self._handles.get(outcome.request)) and handle.left > 0:
                self._tell(handle, outcome)
        scheduler.settled = True
        if not self._handles:
            self._rest()

    @property
    def _is_read_along(self) -> bool:
        """Whether anybody waits for each token, and how long passes are does not matter to what these are."""
        return self._backend.batch_invariant and any(not handle.reader.whole for handle in self._handles.values())

    def _tell(self, handle: Handle, outcome: Outcome) -> None:
        """Make text of what a pass gave to one request, and give it to who reads it."""
        assert self._scheduler
        number = handle.request.id
        try:
            if isinstance(outcome, Event):
                stream = handle.streams.get(outcome.sample) or self._stream(handle, outcome.sample)
                if stream.done:  # a draft went on beyond its stop string
                    return
                chunk = stream.chunk(outcome)
                if chunk.finish_reason and not outcome.finish_reason:  # a stop string
                    self._scheduler.cancel(number, outcome.sample)
                self._give(handle, chunk, stream)
            elif isinstance(outcome, Found):
                every = list(enumerate(outcome.hypotheses))
                streams = [handle.streams.get(index) or self._stream(handle, index) for index, _ in every]
                handle.left = sum(streams[index].given < len(found.tokens) for index, found in every)
                for (_, found), stream in zip(every, streams, strict=True):
                    for chunk in stream.hypothesis(found, outcome.savings):
                        self._give(handle, chunk, stream)
            else:
                if handle.params.num_beams > 1:
                    handle.left = 1
                self._give(handle, handle.failed(outcome.error, outcome.sample))
        except Exception as error:  # of the tokenizer: nobody else's
            handle.left = 1
            self._scheduler.cancel(number)
            self._give(handle, handle.failed(error))

    def _give(self, handle: Handle, chunk: Chunk, stream: TextStream | None = None) -> None:
        if handle.left <= 0 or (stream and stream.watch.drawn <= stream.given):  # cancelled; or told before
            return
        reader, ended = handle.reader, chunk.finish_reason is not None
        left = handle.left - ended
        readers_left = 0 if chunk.error and reader.handles else max(0, reader.left - (not left))
        self._new_tokens += stream is not None
        # From here to the first call neither a signal nor another thread comes between: all of it is done, or nothing.
        handle.left, reader.left = left, readers_left
        if stream:
            stream.given += 1
        reader.chunks.append((handle, chunk))
        if ended:
            handle.ended.add(chunk.index)
        if not left:
            self._forget(handle)

    def _leave(self, handle: Handle) -> None:
        """It was cancelled, and no pass computes anything of it any more: nothing comes after what is told here."""
        told, handle.cancelled = handle.cancelled, False
        if told:
            self._steps.chunks.extend((handle, chunk) for chunk in handle.cut_off())
        self._forget(handle)

    def _forget(self, handle: Handle) -> None:
        """The scheduler has nothing of it any more."""
        self._handles.pop(handle.request.id, None)
        handle.adapter = None

    def _apply(self) -> Scheduler | None:
        """Do what was asked for meanwhile; and where something was left half done, begin all texts anew.

        A text is the same each time, so what was given of it is passed over.
        """
        scheduler = self._scheduler
        if scheduler and not scheduler.settled:
            scheduler = self._scheduler = None
        if scheduler is None:
            if not (self._handles or self._arriving):
                while self._leaving:
                    self._leave(self._leaving.popleft())
                return None
            scheduler = self._new()
            self._handles = {number: handle for number, handle in self._handles.items() if handle.left > 0}
            for handle in self._handles.values():
                handle.entry = scheduler.enqueue(handle.request, handle.prompt)
                for sample, old in handle.streams.items():
                    self._stream(handle, sample).given = old.given
            with self._lock:
                self._scheduler = scheduler
        if self._arriving or self._leaving:
            scheduler.settled = False
            while self._arriving:
                handle = self._arriving[0]
                if handle.left and handle.request.id not in self._handles:
                    self._handles[handle.request.id] = handle
                    handle.entry = scheduler.enqueue(handle.request, handle.prompt)
                self._arriving.popleft()
            while self._leaving:
                scheduler.cancel(self._leaving[0].request.id)
                self._leave(self._leaving[0])
                self._leaving.popleft()
            scheduler.settled = True
            if not self._handles:
                self._rest()
        return scheduler

    def _rest(self) -> None:
        """Nobody is served. A cache that holds more than is to be kept, or was left half changed, is let go."""
        scheduler = self._scheduler
        if scheduler and (self._closed or not scheduler.settled or not scheduler.kv or scheduler.kv.oversized):
            self._scheduler = None

    def _new(self) -> Scheduler:
        kv = PrefixCache(self._backend, BLOCK_SIZE, self._keep_tokens) if self._cached else None
        return Scheduler(self._backend, cached=self._cached, kv=kv, counters=self._counters, **self._limits)

    # -- handles --

    def _handle(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        number: int,
        reader: Reader,
        adapter: Attached | None,
        grammar: Grammar | None,
        owner: Hashable = None,
    ) -> Handle:
        if self._closed:
            raise PronkError("the session is closed")
        begun = time.perf_counter()
        with self._lock:
            scheduler = self._scheduler = self._scheduler or self._new()
        which = adapter.number if adapter else None
        request = scheduler.prepare(next(self._numbers), prompt, params, seed, self._eos_ids, which, grammar, owner)
        return Handle(prompt, params, seed, request, number, begun, params.samples, reader, adapter=adapter)

    def _stream(self, handle: Handle, sample: int) -> TextStream:
        watch = Stopwatch(self._load_s, len(handle.prompt), handle.begun)
        of = {"request": handle.number, "index": sample, "seed": handle.seed}
        stream = TextStream(self._tokenizer, handle.prompt, handle.params.stop, watch, **of)
        handle.streams[sample] = stream
        return stream

    def _after_fork(self) -> None:
        """In a child, where the threads of others are gone: what they read is dropped, and their pass begun anew."""
        gone = list(self._waiting)
        self._lock, self._waiting = threading.RLock(), []
        if self._turn and self._turn[0] != get_ident():
            gone.append(self._turn[1])
            self._turn = None
            if self._scheduler:
                self._scheduler.settled = False
        for reader in gone:
            self._leaving.extend(reader.handles)


def _forked() -> None:
    for session in list(_sessions):
        session._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
