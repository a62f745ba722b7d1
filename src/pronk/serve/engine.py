"""Engine: the thread that computes forward passes for everybody, and the way of chunks from it to the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pronk.engine.generation import Chunk
from pronk.engine.params import SamplingParams
from pronk.engine.rng import effective_seed
from pronk.errors import PronkError
from pronk.serve.failures import ApiError, overloaded

if TYPE_CHECKING:
    from pronk.engine.backend import Attached
    from pronk.engine.grammar import Grammar
    from pronk.session import Handle, Session

T = TypeVar("T")
log = logging.getLogger("pronk.serve")

FEW = 2048  # tokens: so many are submitted sooner than another thread has begun
UNREAD = 4096  # chunks that may wait for a client when more come; who leaves more unread is ended
_A_TEXT = 64  # tokens that take as long as to begin a text
_LOOK_EVERY_S = 0.1  # for requests that have waited too long
# For which the next pass waits when an answer begins: planning it would hold Python's lock, and then it would take the
# processors from the loop, which sends a first token 1.5 ms sooner without.
_HEAD_START_S = 0.0005
# In which tokens of one answer are sent together where passes are shorter: as often as a screen is drawn. To wake the
# loop and the client for each token takes 0.2 ms of a pass of 2.4.
_TOGETHER_S = 1 / 60
_GIVE_UP = 3  # passes of one session that fail one after another, before its texts end


@dataclass(frozen=True)
class Wanted:
    """What is to be generated of one model: for each prompt its samples."""

    session: Session
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    adapter: Attached | None = None
    grammar: Grammar | None = None
    owner: int = 0

    @property
    def texts(self) -> int:
        return len(self.prompts) * max(self.params.samples, self.params.num_beams)


class Answer:
    """The chunks of one HTTP request, from the engine's thread to the event loop that reads them.

    `chunks`: all that are there, at least one; the last of a text has a finish_reason.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.handles = wanted, list[Any]()
        self._chunks, self._there = deque[Chunk](), asyncio.Event()
        self._left = len(wanted.prompts)  # of which more is to come
        self._wanting = True  # chunks are waited for: what piles up then the loop has had no time for
        self.failed: Exception | None = None
        # The engine's thread alone touches these:
        self.held, self.ended = list[Chunk](), 0  # what the loop has not been told, and prompts that are whole with it
        self.told_at: float | None = None  # when it was last told something

    def deliver(self, chunks: list[Chunk], ended: int) -> None:
        """In the event loop. `ended`: prompts whose texts are all whole with these."""
        if self.failed:
            return
        unread = len(self._chunks)  # a beam search brings all of its texts at once, which nobody could have read
        self._chunks.extend(chunks)
        self._left -= ended
        if unread > UNREAD and not self._wanting:
            self._chunks.clear()
            self.fail(ApiError(408, f"the client left {unread} pieces of the text unread"))
        self._there.set()

    def fail(self, error: Exception) -> None:
        self.failed = error
        self._there.set()

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Raises what it failed by, and the error of a text, behind all that came before it and was not too much."""
        while self._left or self._chunks:
            await self._there.wait()
            self._there.clear()
            chunks = [self._chunks.popleft() for _ in range(len(self._chunks))]
            at = next((n for n, chunk in enumerate(chunks) if chunk.error), len(chunks))
            if chunks[:at]:
                self._wanting = False
                yield chunks[:at]
                self._wanting = True
            for failed in chunks[at:]:
                if failed.error:
                    raise failed.error
            if self.failed and not self._chunks:
                raise self.failed


class Engine:
    """Steps the sessions that have work, in turns. All methods but `run` belong to the event loop's thread.

    `max_texts`: how many texts may be under way or waiting; one more is refused.
    `max_wait_s`: how long a request may wait for its first pass; then it is refused.
    """

    def __init__(self, max_texts: int, max_wait_s: float = math.inf) -> None:
        self.max_texts, self.texts = max_texts, 0
        self.max_wait_s = max_wait_s
        self.draining = False
        self.first_token: Callable[[float], None] = lambda seconds: None  # told how long each request waited for it
        self._answers: dict[Handle, Answer] = {}
        self._lock = threading.Lock()  # of _answers: a handle is known before its first chunk is there
        self._holding: dict[Answer, None] = {}  # those with chunks that the loop has not been told
        self._sessions: dict[int, Session] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._awake, self._ended, self._looked = threading.Event(), False, 0.0
        self._thread = threading.Thread(target=self._run, name="pronk-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its pass."""
        self._ended = True
        self._awake.set()
        if self._thread.ident:
            self._thread.join(60)

    @property
    def alive(self) -> bool:
        """Whether anything can still be computed."""
        return self._thread.is_alive()

    # -- requests --

    def reserve(self, texts: int) -> None:
        """Raises ApiError where that many more texts are too many."""
        if self.draining:
            raise ApiError(503, "the server is about to end")
        if texts > self.max_texts:
            raise ApiError(400, f"{texts} texts at once are more than the {self.max_texts} that this server takes")
        if self.texts + texts > self.max_texts:
            raise overloaded(f"{self.texts} of at most {self.max_texts} texts are under way or wait")
        self.texts += texts

    def release(self, texts: int) -> None:
        self.texts -= texts

    def submit(self, wanted: Wanted) -> Answer:
        """In any thread. Raises what Session.submit does; then nothing is under way."""
        answer, params = Answer(wanted), wanted.params
        if len(wanted.prompts) > 1 and params.num_beams == 1:  # one seed of all, as LLM.generate's: it is what is told
            params = replace(params, seed=effective_seed(params.seed))
        try:
            for number, prompt in enumerate(wanted.prompts):
                with self._lock:  # of each anew: the engine and the loop wait for it
                    handle = wanted.session.submit(
                        prompt,
                        params,
                        number=number,
                        adapter=wanted.adapter,
                        grammar=wanted.grammar,
                        owner=wanted.owner,
                    )
                    answer.handles.append(handle)
                    self._answers[handle] = answer
                    self._sessions[id(wanted.session)] = wanted.session
        except BaseException:
            self.cancel(answer)
            raise
        self._awake.set()
        return answer

    async def submitted(self, wanted: Wanted) -> Answer:
        """The same, of many tokens in a thread of its own. Of who leaves meanwhile nothing is under way, either."""
        of_each = len(wanted.params.stop_token_ids) + len(wanted.params.logit_bias)  # which are looked at, too
        if sum(len(prompt) + of_each for prompt in wanted.prompts) + wanted.texts * _A_TEXT < FEW:
            return self.submit(wanted)
        coming = asyncio.ensure_future(asyncio.to_thread(self.submit, wanted))
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(lambda done: None if done.exception() else self.cancel(done.result()))
            raise

    def cancel(self, answer: Answer) -> None:
        """No pass after the one under way computes anything of it."""
        with self._lock:
            gone = [handle for handle in answer.handles if self._answers.pop(handle, None)]
        for handle in gone:
            answer.wanted.session.cancel(handle)
        if gone:
            self._awake.set()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What `function` gives, between two passes: for what uses a model and is no text."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        self._awake.set()
        return asyncio.wrap_future(future)

    # -- the thread --

    def _run(self) -> None:
        failures: dict[int, int] = {}
        while not self._ended:
            self._awake.clear()
            if self._calls:
                self._hand_out([], math.inf)
            while self._calls:
                _fulfil(*self._calls.popleft())
            with self._lock:
                sessions = list(self._sessions.items())
            busy = False
            for key, session in sessions:
                if not session.has_work:
                    with self._lock:
                        if not session.has_work:
                            self._sessions.pop(key, None)
                    continue
                busy = True
                self._refuse_overdue()
                try:
                    if self._holding and (len(sessions) > 1 or session.load.waiting):  # it may be a long pass
                        self._hand_out([], math.inf)
                    begun = time.perf_counter()
                    chunks = session.step()
                    taken = time.perf_counter() - begun
                except Exception as error:  # of the pass itself: it is planned anew
                    self._hand_out([], math.inf)
                    failures[key] = failures.get(key, 0) + 1
                    log.warning("a pass failed: %s", error, exc_info=not isinstance(error, PronkError))
                    if failures[key] >= _GIVE_UP:
                        self._fail(session, error)
                        del failures[key]
                else:
                    failures.pop(key, None)
                    self._hand_out(chunks, taken)
            if not busy:
                self._hand_out([], math.inf)
                if not self._calls:
                    self._awake.wait()

    def _hand_out(self, chunks: list[tuple[Handle, Chunk]], next_s: float) -> None:
        """One call into the event loop, whoever has got something. `next_s`: what the next pass is expected to take.

        A chunk is held where the next one is expected before _TOGETHER_S are over.
        """
        with self._lock:
            ended: set[Handle] = set()
            for handle, chunk in chunks:
                if answer := self._answers.get(handle):
                    answer.held.append(chunk)
                    self._holding[answer] = None
                    if handle.left <= 0:
                        ended.add(handle)
            for handle in ended:
                self._answers.pop(handle).ended += 1
        now, due, first = time.perf_counter(), list[tuple[Answer, list[Chunk], int]](), False
        for answer in self._holding:
            if answer.told_at is None or answer.ended or now + next_s > answer.told_at + _TOGETHER_S:
                due.append((answer, answer.held, answer.ended))
                first = first or answer.told_at is None
                answer.held, answer.ended, answer.told_at = [], 0, now
        if due:
            for answer, _, _ in due:
                del self._holding[answer]
            self._tell(_deliver, due)
        if first:
            time.sleep(_HEAD_START_S)

    def _fail(self, session: Session, error: Exception) -> None:
        with self._lock:
            gone = [(handle, each) for handle, each in self._answers.items() if each.wanted.session is session]
            for handle, _ in gone:
                del self._answers[handle]
        for handle, answer in gone:
            session.cancel(handle)
            self._tell(answer.fail, error)

    def _refuse_overdue(self) -> None:
        now = time.perf_counter()
        if now < self._looked + _LOOK_EVERY_S:
            return
        self._looked = now
        with self._lock:
            overdue = {
                answer
                for handle, answer in self._answers.items()
                if now - handle.begun > self.max_wait_s and all(each.waits for each in answer.handles)
            }
            for answer in overdue:
                for handle in answer.handles:
                    self._answers.pop(handle, None)
        for answer in overdue:
            for handle in answer.handles:
                answer.wanted.session.cancel(handle)
            self._tell(answer.fail, overloaded(f"this one has waited {self.max_wait_s:g} s for its turn"))

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended, and its clients with it
            log.debug("nobody is left to read")


def _deliver(deliveries: list[tuple[Answer, list[Chunk], int]]) -> None:
    for answer, chunks, ended in deliveries:
        answer.deliver(chunks, ended)


def _fulfil(function: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
