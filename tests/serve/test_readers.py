"""Clients that read slowly, or nothing: who takes nothing for a minute is ended alone, whatever it was to be sent; and
streams that have nothing to say for a while."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from typing import Any

import pytest
from served import Running, Script

from pronk.engine.generation import Chunk
from pronk.engine.params import SamplingParams
from pronk.serve import http, tokens
from pronk.serve.engine import UNREAD, Answer, Engine, Wanted

pytestmark = pytest.mark.usefixtures("idle")
SIZE, PIECES = 1 << 20, 16  # more than what a kernel holds of a connection
PING = b": ping\n\n"


def asking(server: Running, path: str, body: dict[str, Any], room: int = 4096) -> socket.socket:
    """A connection that has asked, and has room for so many bytes of what is answered."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + raw)
    return connection


def taken(connection: socket.socket, at_once: int = 1 << 20, pause: float = 0.0) -> int:
    """Bytes that come until it ends, whole or not."""
    found = 0
    try:
        while part := connection.recv(at_once):
            found += len(part)
            time.sleep(pause)
    except ConnectionError:
        pass
    return found


@pytest.fixture(params=["streamed", "whole"])
def long(request: pytest.FixtureRequest, script: Script, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """A path and a body that are answered with PIECES MiB."""
    if request.param == "streamed":
        script.says(*["x" * SIZE] * PIECES)
        return "/v1/completions", {"prompt": "x", "stream": True}
    monkeypatch.setattr(tokens, "tokenize", lambda leased, request: {"tokens": "x" * SIZE * PIECES})
    return "/tokenize", {"prompt": "x"}


def test_who_reads_nothing_is_ended(
    server: Running, long: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was not streamed stayed in memory for as long as its client liked."""
    monkeypatch.setattr(http, "SEND_S", 0.3)
    with asking(server, *long) as connection:
        assert server.server
        until = time.monotonic() + 20
        while not server.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.01)
        while server.server.server_state.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.server.server_state.connections
        assert taken(connection) < SIZE * PIECES


def test_who_reads_slowly_gets_all(
    server: Running, long: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system takes megabytes for a client before it is seen to read, which at a telephone's pace takes minutes."""
    monkeypatch.setattr(http, "SEND_S", 0.3)
    with asking(server, *long, room=1 << 16) as connection:
        begun = time.monotonic()
        assert taken(connection, 1 << 17, 0.015) > SIZE * PIECES
        assert time.monotonic() - begun > 1


def test_what_nobody_reads_is_kept_up_to_a_bound() -> None:
    """The engine goes on whether or not a client reads: beyond the bound the answer ends, and nothing more is kept."""
    answer = Answer(Wanted(None, [[1]], SamplingParams()))  # type: ignore[arg-type]
    for _ in range(UNREAD + 1):
        answer.deliver([Chunk("x", 5)], 0)
    assert answer.failed is None
    for _ in range(9):
        answer.deliver([Chunk("x", 5)], 0)
    assert "unread" in str(answer.failed)
    assert len(answer._chunks) == UNREAD + 2


def test_a_silent_stream_says_that_it_lives(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies cut what is silent for a minute. A client skips such lines."""
    monkeypatch.setattr(http, "PING_S", 0.1)
    monkeypatch.setattr(http, "_FIRST_S", 0.1)
    submit = Engine.submit

    def late(engine: Engine, wanted: Any) -> Answer:
        time.sleep(1)
        return submit(engine, wanted)

    monkeypatch.setattr(Engine, "submit", late)
    raw = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        found = answer.read()
    assert found.count(PING) > 1
    assert found.rindex(PING) < found.index(b"data: ")
    assert found.endswith(b"data: [DONE]\n\n")
    stream = server.client().completions.create(model="tiny", prompt="x", max_tokens=2, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1]


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
        await asyncio.sleep(0.2)

    asyncio.run(watched())
    assert (counts, ended) == ([], [True])
