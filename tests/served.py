"""A server in a thread of the tests' own process, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from pronk.engine.generation import Chunk, Stats
from pronk.serve import run as serving
from pronk.serve.engine import Answer, Engine, Wanted
from pronk.serve.models import Models
from pronk.session import Session

SEQUENCES, WAITING = 8, 24
PATIENCE_S = 120.0  # for what comes at once, but on a machine that is busy with something else


def soon(true: Callable[[], Any]) -> bool:
    """Whether it becomes so."""
    until = time.monotonic() + PATIENCE_S
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(found)


def slowed(patch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let each pass of every session take so much longer: a thousand tokens of a tiny model are there in 0.2 s, and
    whoever is to leave amid them may come too late."""
    step = Session.step

    def slow(session: Session) -> Any:
        time.sleep(seconds)
        return step(session)

    patch.setattr(Session, "step", slow)


class Running:
    """`engine`, `models`, `port`; `stop` lets it end."""

    def __init__(self, models: Models, host: str = "127.0.0.1", **options: Any) -> None:
        self.models, self._ready = models, threading.Event()
        bound = serving.listen(host, 0)
        self.port = bound.getsockname()[1]
        self.server: serving.Uvicorn | None = None
        self._clients: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(bound,), kwargs=options)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        assert self.server

    def _run(self, bound: Any, **options: Any) -> None:
        def made(server: serving.Uvicorn) -> None:
            self.server = server

        defaults = {"max_sequences": SEQUENCES, "max_waiting": WAITING}
        try:
            serving.run(self.models, bound, ready=lambda _: self._ready.set(), made=made, **{**defaults, **options})
        finally:
            self._ready.set()

    @property
    def engine(self) -> Engine:
        assert self.server
        return self.server.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return self.kept(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S))

    def kept(self, client: Any) -> Any:
        """`client`, whose connections are closed at the end."""
        self._clients.append(client)
        return client

    def stop(self) -> None:
        assert self.server
        for client in self._clients:
            client.close()
        self.server.should_exit = True
        self._thread.join(90)
        assert not self._thread.is_alive()


class Script:
    """What a model would have said, in these pieces, instead of what it says; `prompts` are those that it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pieces: list[str | Exception] = []
        self.finish, self.prompts = "stop", list[str]()
        patch.setattr(Engine, "submit", self._submit())

    def says(self, *pieces: str | Exception, finish: str = "stop") -> None:
        self.pieces, self.finish = list(pieces), finish

    def _submit(self) -> Any:
        def submit(engine: Engine, wanted: Wanted) -> Answer:
            answer = Answer(wanted)
            tokenizer = wanted.session._tokenizer
            (ids,) = wanted.prompts
            self.prompts.append(tokenizer.decode(ids, skip_special=False))
            stats = Stats(0.0, 0.1, 10.0, 10.0, None, len(ids), len(self.pieces))
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    later = engine._loop.call_later  # than what was said before it is read
                    engine._loop.call_soon_threadsafe(later, 0.2, answer.fail, piece)
                    return answer
                engine._loop.call_soon_threadsafe(answer.deliver, [Chunk(piece, 5, -1.0)], 0)
            end = Chunk("", None, finish_reason=self.finish, stats=stats, seed=7)  # type: ignore[arg-type]
            engine._loop.call_soon_threadsafe(answer.deliver, [end], 1)
            return answer

        return submit
