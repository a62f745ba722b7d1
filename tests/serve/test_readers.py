"""Clients that read slowly, or nothing: who takes nothing for a minute is ended alone, whatever it was to be sent; and
streams that have nothing to say for a while."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from served import PATIENCE_S, Running, Script, slowed, soon

from pronk.engine.generation import Chunk
from pronk.engine.params import SamplingParams
from pronk.errors import PronkError
from pronk.serve import engine, http, tokens
from pronk.serve.engine import UNREAD, Answer, Engine, Wanted

pytestmark = pytest.mark.usefixtures("idle")
SIZE, PIECES = 1 << 20, 16  # more than what a kernel holds of a connection
PING = b": ping\n\n"


def asking(server: Running, path: str, body: dict[str, Any], room: int = 4096) -> socket.socket:
    """A connection that has asked, and has room for so many bytes of what is answered."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", server.port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + raw)
    return connection


def taken(connection: socket.socket, at_once: int = 1 << 20, took: Callable[[int], Any] = int) -> int:
    """Bytes that come until it ends, whole or not. `took` is told of each piece."""
    found = 0
    try:
        while part := connection.recv(at_once):
            found += len(part)
            took(len(part))
    except ConnectionError:
        pass
    return found


@pytest.fixture(params=["streamed", "whole"])
def long(request: pytest.FixtureRequest, script: Script, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """A path and a body that are answered with PIECES MiB."""
    if request.param == "streamed":
        script.says(*["x" * SIZE] * PIECES)
        return "/v1/completions", {"prompt": "x", "stream": True}
    monkeypatch.setattr(tokens, "tokenize", lambda *_: {"tokens": "x" * SIZE * PIECES})
    return "/tokenize", {"prompt": "x"}


def test_who_reads_nothing_is_ended(
    server: Running, long: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was not streamed stayed in memory for as long as its client liked."""
    ended, lost = list[Any](), http.Connection.connection_lost

    def watched(connection: http.Connection, error: Exception | None) -> None:
        ended.append(connection.client)
        lost(connection, error)

    monkeypatch.setattr(http.Connection, "connection_lost", watched)
    monkeypatch.setattr(http, "SEND_S", 0.3)
    with asking(server, *long) as connection:
        own = connection.getsockname()
        assert soon(lambda: own in ended)
        assert taken(connection) < SIZE * PIECES


def test_who_reads_slowly_gets_all(
    server: Running, long: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system takes megabytes for a client before it is seen to read, which at a telephone's pace takes minutes."""
    a_look, really = 1 << 19, http.Connection._watch_reader  # bytes: more than what is read and not yet acknowledged
    read, attempts, looks, before = 0, 0, 0, 0

    def watched(connection: http.Connection, left: int | None = None) -> None:
        """A look comes when the client has read, for no clock tells how soon a busy machine lets it."""
        nonlocal attempts, looks, before
        attempts += 1
        if left is not None and read - before < a_look:
            connection._unread = connection.loop.call_later(0.01, connection._watch_reader, left)
            return
        looks, before = looks + (left is not None), read
        really(connection, left)

    def took(count: int) -> None:
        nonlocal read
        read, known = read + count, attempts
        assert read > 4 * SIZE or soon(lambda: attempts > known)  # no system holds all of the rest

    monkeypatch.setattr(http.Connection, "_watch_reader", watched)
    monkeypatch.setattr(http, "SEND_S", 0.01)
    with asking(server, *long, room=1 << 16) as connection:
        assert taken(connection, 1 << 17, took) > SIZE * PIECES
    assert looks > 2


async def fed(answer: Answer, times: int) -> None:
    for _ in range(times):
        answer.deliver([Chunk("x", 5)], 0)


def test_what_nobody_reads_is_kept_up_to_a_bound() -> None:
    """The engine goes on whether or not a client reads: beyond the bound the answer ends, and nothing more is kept."""

    async def slow_client() -> None:
        answer = Answer(Wanted(None, [[1]], SamplingParams()))  # type: ignore[arg-type]
        coming = answer.chunks()
        await fed(answer, 1)
        await anext(coming)  # it is being sent, and no more is asked for
        await fed(answer, UNREAD + 1)
        assert answer.failed is None
        await fed(answer, 9)
        assert "unread" in str(answer.failed)
        assert not answer._chunks
        await coming.aclose()

    asyncio.run(slow_client())


def test_a_loop_without_time_is_no_client_that_does_not_read() -> None:
    """After a stall of the loop all that the engine had computed meanwhile was counted against the client."""

    async def stalled() -> None:
        answer = Answer(Wanted(None, [[1]], SamplingParams()))  # type: ignore[arg-type]
        coming = answer.chunks()
        reading = asyncio.ensure_future(anext(coming))
        await asyncio.sleep(0)
        await fed(answer, UNREAD + 10)
        assert len(await reading) == UNREAD + 10
        await coming.aclose()

    asyncio.run(stalled())


def test_a_silent_stream_says_that_it_lives(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies cut what is silent for a minute. A client skips such lines."""
    monkeypatch.setattr(http, "PING_S", 0.1)
    monkeypatch.setattr(http, "_FIRST_S", 0.1)
    submit, put, pings = Engine.submit, http.EventStream._put, list[bytes]()

    async def counted(stream: http.EventStream, send: Any, body: bytes, more: bool = True) -> None:
        await put(stream, send, body, more)
        pings.extend([body] * (body == PING))

    def late(engine: Engine, wanted: Any) -> Answer:
        assert soon(lambda: len(pings) > 1)
        monkeypatch.setattr(http, "PING_S", 600.0)  # a busy machine may be silent between two tokens, too
        return submit(engine, wanted)

    monkeypatch.setattr(http.EventStream, "_put", counted)

    monkeypatch.setattr(Engine, "submit", late)
    monkeypatch.setattr(engine, "FEW", 0)  # else it is not left to another thread, and the loop waits
    raw = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        found = answer.read()
    assert found.count(PING) > 1
    assert found.rindex(PING) < found.index(b"data: ")
    assert found.endswith(b"data: [DONE]\n\n")
    stream = server.client().completions.create(model="tiny", prompt="x", max_tokens=2, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1]


def test_silence_lasts_no_longer_than_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was looked at every 5 s, and so a silent stream said nothing for up to 20 s, where 15 are told."""
    now, pings = [0.0], list[float]()
    stream = http.EventStream.__new__(http.EventStream)
    stream._since, stream._sending = 0.0, False

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if not pings:
            stream._since = 4.0  # an event meanwhile

    async def put(send: Any, body: bytes, more: bool = True) -> None:
        assert body == PING
        pings.append(now[0])
        stream._since = now[0]
        if len(pings) == 3:
            raise EOFError

    monkeypatch.setattr(http, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(http, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
    monkeypatch.setattr(stream, "_put", put)
    with pytest.raises(EOFError):
        asyncio.run(stream._watch(put))
    assert pings == [4 + http.PING_S * n for n in (1, 2, 3)]


def test_who_takes_some_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself, on a transport of which each count of waiting bytes is known."""
    monkeypatch.setattr(http, "SEND_S", 0.01)
    counts, ended = [50, 40, 30, 30], list[bool]()

    class Transport:
        def get_write_buffer_size(self) -> int:
            return counts.pop(0)

        def get_extra_info(self, name: str) -> None:
            return None

        def abort(self) -> None:
            ended.append(True)

    async def watched() -> None:
        connection = http.Connection.__new__(http.Connection)
        connection.transport, connection.loop = Transport(), asyncio.get_running_loop()  # type: ignore[assignment]
        connection._watch_reader()
        while not ended:
            await asyncio.sleep(0.01)

    asyncio.run(watched())
    assert (counts, ended) == ([], [True])


async def told(answer: Answer, meanwhile: Callable[[], None] = lambda: None) -> tuple[list[int], str]:
    """How many chunks come at a time, and the error behind them. `meanwhile`: is called while the first are read."""
    found = list[int]()
    try:
        async for chunks in answer.chunks():
            found.append(len(chunks))
            if len(found) == 1:
                meanwhile()
    except PronkError as error:
        return found, str(error)
    return found, ""


def test_what_came_before_an_error_is_told_before_it() -> None:
    """Tokens that had been held came with the error, and were lost behind it: how many differed from run to run."""
    wanted, wrong, more = Wanted(None, [[1]], SamplingParams()), PronkError("wrong"), [Chunk("x", 5)] * 3  # type: ignore[arg-type]

    async def of_a_text() -> tuple[list[int], str]:
        answer = Answer(wanted)
        answer.deliver([*more, Chunk("", None, finish_reason="error", error=wrong)], 1)
        return await told(answer)

    async def of_all() -> tuple[list[int], str]:
        answer = Answer(wanted)
        answer.deliver(more, 0)
        answer.fail(wrong)
        return await told(answer, lambda: answer.deliver(more, 1))  # of who has failed nothing more comes

    async def amid() -> tuple[list[int], str]:
        answer = Answer(wanted)
        answer.deliver(more, 0)
        return await told(answer, lambda: (answer.deliver(more, 0), answer.fail(wrong))[1])

    assert asyncio.run(of_a_text()) == ([3], "wrong")
    assert asyncio.run(of_all()) == ([3], "wrong")
    assert asyncio.run(amid()) == ([3, 3], "wrong")


@pytest.fixture
def handing(monkeypatch: pytest.MonkeyPatch) -> Handing:
    return Handing(monkeypatch)


def test_a_first_token_is_sent_before_the_next_pass(handing: Handing) -> None:
    """Planning a pass held Python's lock, and the loop sent the first token 1.5 ms later. Later ones wait for none."""
    for _ in range(3):
        handing.passes(0.1)
    assert handing.told == [1, 1, 1]
    assert handing.slept == [engine._HEAD_START_S]


def test_tokens_of_short_passes_are_sent_together(handing: Handing) -> None:
    """Each event cost 0.2 ms of a pass of 2.4. No token is later than _TOGETHER_S behind the event before it."""
    for _ in range(13):
        handing.passes(0.003)
    assert handing.told == [1, 5, 5]
    handing.passes(0.003, ends=True)  # with the two that were held
    assert handing.told == [1, 5, 5, 3]
    assert not handing.runs._holding


def test_no_token_waits_for_a_pass_that_will_be_long(handing: Handing) -> None:
    """A prompt that came, another model's pass, or what is to be done between passes."""
    for _ in range(4):
        handing.passes(0.003, then=math.inf)
    assert handing.told == [1, 1, 1, 1]


def test_a_held_token_comes_though_its_text_gets_none(handing: Handing) -> None:
    """A text that is set aside for others has what it was given."""
    handing.passes(0.001)
    handing.passes(0.001)
    assert handing.told == [1]
    handing.runs._hand_out([], math.inf)
    assert handing.told == [1, 1]


def test_nothing_is_held_while_passes_fail(handing: Handing) -> None:
    """A token waited for passes that failed and were computed anew; and what a pass had given was lost where anything
    failed behind it: a client then waited for the end of its text for ever."""
    passes: list[Any] = [[], [], PronkError("wrong"), PronkError("wrong"), [], PronkError("after it")]

    class Session:
        has_work = True

        def step(self) -> list[tuple[Handles, Chunk]]:
            handing.now += 0.001
            if not passes:
                handing.runs._ended = True
                return []
            if isinstance(found := passes.pop(0), Exception):
                raise found
            return [(handing.handle, Chunk("x", 5))]

        @property
        def load(self) -> SimpleNamespace:
            if passes and str(passes[0]) == "after it":
                raise passes.pop(0)
            return SimpleNamespace(waiting=0)

    handing.runs._sessions[0] = Session()  # type: ignore[assignment]
    handing.runs._run()
    assert handing.told == [1, 1, 1]


def test_what_is_held_is_told_before_the_pass_of_a_prompt_that_came(handing: Handing) -> None:
    """Its pass is long: what is held is told before it, not behind it. Nobody looks between a pass and what it gave."""
    told_before_each_pass = list[int]()

    class Session:
        has_work = True

        def step(self) -> list[tuple[Handles, Chunk]]:
            handing.now += 0.001
            told_before_each_pass.append(sum(handing.told))
            handing.runs._ended = len(told_before_each_pass) == 4
            return [(handing.handle, Chunk("x", 5))]

        @property
        def load(self) -> SimpleNamespace:
            return SimpleNamespace(waiting=int(len(told_before_each_pass) == 3))  # behind the third pass

    handing.runs._sessions[0] = Session()  # type: ignore[assignment]
    handing.runs._run()
    assert told_before_each_pass == [0, 1, 1, 3]


class Handing:
    """An engine that has computed passes of one text, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.handle, self.now = Engine(4), Handles(), 0.0
        self.told, self.slept = list[int](), list[float]()  # tokens of each call into the loop
        clock = SimpleNamespace(sleep=self.slept.append, perf_counter=lambda: self.now)
        monkeypatch.setattr(engine, "time", clock)
        monkeypatch.setattr(self.runs, "_tell", lambda _, due: self.told.extend(len(chunks) for _, chunks, _ in due))
        self.runs._answers[self.handle] = Answer(Wanted(None, [[1]], SamplingParams()))  # type: ignore[arg-type, index]

    def passes(self, seconds: float, then: float | None = None, ends: bool = False) -> None:
        self.now += seconds
        self.handle.left = 0 if ends else 1
        chunks = [(self.handle, Chunk("x", 5))]
        self.runs._hand_out(chunks, seconds if then is None else then)  # type: ignore[arg-type]


class Handles:
    left = 1


def test_events_are_framed_as_the_client_reads_them(server: Running) -> None:
    """Beside h11, which frames the rest of an answer: clients see what they did, and those of HTTP/1.0 no chunks."""
    raw = json.dumps({"prompt": "x", "max_tokens": 4, "stream": True, "ignore_eos": True}).encode()
    answers = {}
    for version in ("1.0", "1.1"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            answers[version] = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answers["1.0"].partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert all(line.startswith(b"data: ") for line in body.split(b"\n\n") if line)
    head, _, body = answers["1.1"].partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    events = list[bytes]()
    while body:
        size, _, body = body.partition(b"\r\n")
        events.append(body[: int(size, 16)])
        assert body[int(size, 16) :][:2] == b"\r\n"
        body = body[int(size, 16) + 2 :]
    assert events[-1] == b""
    assert b"".join(events).endswith(b"data: [DONE]\n\n")
    assert all(event.endswith(b"\n\n") for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_its_sending_side_has_left(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """As docs/operations.md says: it is computed no further, and an answer is not left to look whole."""
    slowed(monkeypatch)
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    with asking(server, "/v1/completions", body) as connection:
        assert soon(lambda: server.engine.texts == 1)
        connection.shutdown(socket.SHUT_WR)
        got = b""
        while part := connection.recv(1 << 20):
            got += part
    assert soon(lambda: server.engine.texts == 0)
    assert b"[DONE]" not in got
    assert not got.endswith(b"0\r\n\r\n")
