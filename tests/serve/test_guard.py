"""What is refused before it is read, and connections that dawdle: each row of a list of what has befallen others."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served import PATIENCE_S, Running, soon

from pronk.errors import BadRequest
from pronk.serve import http
from pronk.serve import run as serving
from pronk.serve.models import Models

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()


def spoken(port: int, *lines: str, body: bytes = b"", wait: float = PATIENCE_S) -> bytes:
    """What a connection answers to these very bytes, until it closes or says no more for a moment."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        found = b""
        try:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            while part := connection.recv(65536):
                found += part
                if whole(found):
                    connection.settimeout(0.5)
        except TimeoutError:
            pass
        except ConnectionError:
            pass
        return found


def whole(answer: bytes) -> bool:
    """Whether it is one at least: its headers and its body may come one after the other."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end) and (length is None or len(body) >= int(length[1]))


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


def asked(server: Running, *headers: str, body: bytes = BODY, path: str = "/v1/chat/completions") -> bytes:
    given = [f"POST {path} HTTP/1.1", *headers]
    if not any(header.lower().startswith("host") for header in headers):
        given.append(f"Host: 127.0.0.1:{server.port}")
    if not any(header.lower().startswith("content-type") for header in headers):
        given.append("Content-Type: application/json")
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        given.append(f"Content-Length: {len(body)}")
    return spoken(server.port, *given, body=body)


def test_as_it_is_it_answers(server: Running) -> None:
    answer = asked(server)
    assert status(answer) == 200
    assert b"x-content-type-options: nosniff" in answer
    assert b"access-control" not in answer


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "127.0.0.1:80@evil.example", "", "0.0.0.0"]
)
def test_another_host_is_refused(server: Running, host: str) -> None:
    """A page whose name comes to mean loopback (DNS rebinding) sends its own name."""
    assert status(asked(server, f"Host: {host}")) in (400, 403)
    assert status(asked(server, "Host: 192.0.2.7")) == 403  # it listens at loopback alone


def test_at_all_addresses_each_is_its_own(folder: Path) -> None:
    """Who listens at 0.0.0.0 was asked by its address in the network, and refused it. Digits are no name that could
    come to mean another machine; names stay refused."""
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}), host="0.0.0.0", keys=("secret",))
    try:

        def told(host: str) -> int:
            return status(spoken(running.port, "GET /health HTTP/1.1", f"Host: {host}"))

        assert [told(host) for host in ("192.0.2.7:8000", "[2001:db8::1]:8000", "localhost")] == [200, 200, 200]
        assert [told(host) for host in ("evil.example", "192.0.2.7.evil.example", "1")] == [403] * 3
    finally:
        running.stop()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost:", "127.0.0.1", "[::1]:8000"])
def test_names_of_loopback_are_its_own(server: Running, host: str) -> None:
    assert status(asked(server, f"Host: {host}")) == 200


def test_no_host_and_two(server: Running) -> None:
    assert status(spoken(server.port, "GET /health HTTP/1.1")) == 400
    assert status(spoken(server.port, "GET /health HTTP/1.1", "Host: localhost", "Host: evil")) in (400, 403)


def test_pages_of_others_may_not_ask(server: Running) -> None:
    assert status(asked(server, "Origin: https://evil.example")) == 403
    assert status(asked(server, "Origin: null")) == 403
    assert status(asked(server, "Origin: http://[")) == 403
    assert status(asked(server, f"Origin: http://127.0.0.1:{server.port}")) == 200
    preflight = spoken(
        server.port, "OPTIONS /v1/chat/completions HTTP/1.1", "Host: localhost", "Origin: https://evil.example"
    )
    assert status(preflight) == 403


def test_a_form_of_a_page_is_not_json(server: Running) -> None:
    assert status(asked(server, "Content-Type: text/plain")) == 415
    assert status(asked(server, "Content-Type: Application/JSON; charset=utf-8")) == 200


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 6", "Transfer-Encoding: chunked"),
        ("Content-Length: 6", "Content-Length: 7"),
        ("Transfer-Encoding: xchunked",),
        ("Content-Length : 6",),
        ("Content-Length: -6",),
    ],
)
def test_a_request_with_two_meanings_is_refused_and_its_connection_closed(
    server: Running, headers: tuple[str, ...]
) -> None:
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = asked(server, *headers, body=hidden)
    assert answer.count(b"HTTP/1.1") == 1
    assert status(answer) in (400, 501)
    assert b"connection: close" in answer.lower()


def test_headers_of_any_size(server: Running) -> None:
    answer = spoken(server.port, "GET /health HTTP/1.1", "Host: localhost", "X: " + "a" * (4 << 20))
    assert status(answer) in (0, 400, 431)
    many = [f"X-{n}: 1" for n in range(20_000)]
    assert status(spoken(server.port, "GET /health HTTP/1.1", "Host: localhost", *many)) in (0, 400, 431)
    assert status(spoken(server.port, "GET /health HTTP/1.1", "Host: localhost")) == 200


def test_a_body_of_any_size(server: Running) -> None:
    assert status(asked(server, f"Content-Length: {40 << 20}", body=b"{")) == 413
    assert status(asked(server, f"Content-Length: {'9' * 30}", body=b"{")) in (400, 413)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100, b'{"messages":' + b"[" * 70])
def test_deep_json(server: Running, body: bytes) -> None:
    assert status(asked(server, body=body)) == 400


def is_cut_off(server: Running, begun: bytes, patience: float = PATIENCE_S) -> bool:
    """Whether who begins so, and goes on without an end and never silent for long, loses the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(begun)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                connection.sendall(b"a")
                time.sleep(0.02)
            except ConnectionError:
                return True
    return False


def test_slow_headers_and_slow_bodies_are_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(http, "HEADERS_S", 0.3)
        assert is_cut_off(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    monkeypatch.setattr(http, "BODY_S", 0.3)
    assert status(asked(server, "Content-Length: 100", body=b"{")) == 408


@pytest.mark.parametrize("head", ["GET /health", "POST /v1/completions", "GET /no"])
def test_a_body_that_goes_on_behind_its_answer_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Bug: who was answered before its body was whole, if only that it must not ask, could send the rest for ever, a
    byte at a time, and kept its connection: nobody watched for the end."""
    monkeypatch.setattr(http, "BODY_S", 0.3)
    begun = f"{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    assert is_cut_off(server, begun.encode(), 10)


def test_a_connection_whose_body_came_late_may_ask_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"bGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        time.sleep(1.0)  # longer than the rest of that body might have taken
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)


def test_nothing_under_v1_opens_a_file(server: Running) -> None:
    for path in ("/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd"):
        answer = spoken(server.port, f"GET {path} HTTP/1.1", "Host: localhost")
        assert status(answer) == 404
        assert b"root:" not in answer


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:
    models = Models({"tiny": str(folder)}, {}, {"threads": 1}, max_sequences=4)
    running = Running(
        models, keys=("first-key", "second-key", "clé"), origins=("https://chat.example",), hosts=("llm.example",)
    )
    yield running
    running.stop()


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/metrics", "/openapi.json", "/no"]
)
@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "Basic first-key", "Bearer first-ke"])
def test_no_path_but_health_answers_without_the_key(locked: Running, path: str, key: str | None) -> None:
    headers = ["Host: localhost", *([f"Authorization: {key}"] if key else [])]
    answer = spoken(locked.port, f"GET {path} HTTP/1.1", *headers)
    assert status(answer) == 401
    assert b"first-key" not in answer
    assert status(spoken(locked.port, "GET /health HTTP/1.1", "Host: localhost")) == 200


def test_who_is_refused_is_counted_and_logged(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pronk.serve"):
        caplog.clear()
        spoken(locked.port, "GET /v1/models%0aforged HTTP/1.1", "Host: localhost", "Authorization: Bearer guess")
        assert soon(lambda: any("forged" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "forged" in line]
    assert "401" in line
    assert not [line for line in caplog.messages if "guess" in line or "\n" in line]
    answer = spoken(locked.port, "GET /metrics HTTP/1.1", "Host: localhost", "x-api-key: first-key")
    assert b'pronk_requests_total{path="refused",status="401"}' in answer


def test_each_key_opens(locked: Running) -> None:
    for key in ("first-key", "second-key"):
        assert [model.id for model in locked.client(key).models.list()] == ["tiny"]
    answer = spoken(locked.port, "GET /v1/models HTTP/1.1", "Host: localhost", "x-api-key: first-key")
    assert status(answer) == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client("third-key").models.list()


@pytest.mark.parametrize("header", ["Authorization: Bearer clé", "x-api-key: clé"])
def test_a_key_beyond_ascii_opens(locked: Running, header: str) -> None:
    """Bug: a key's bytes were compared with those of what they spell in Latin-1, and so it never opened anything."""
    assert status(spoken(locked.port, "GET /v1/models HTTP/1.1", "Host: localhost", header)) == 200
    assert status(spoken(locked.port, "GET /v1/models HTTP/1.1", "Host: localhost", header + "é")) == 401


def test_what_one_key_has_sent_is_not_found_by_another(locked: Running) -> None:
    """How soon a prompt is read tells whether it was there before (CVE-2025-46570)."""
    secret: list[Any] = [{"role": "user", "content": "the merger of A with B " * 30}]

    def cached(key: str, api: str) -> int:
        client, options = locked.client(key), {"model": "tiny", "temperature": 0}
        if api == "completions":
            found = client.completions.create(prompt=secret[0]["content"], max_tokens=1, **options)
            return found.usage.prompt_tokens_details.cached_tokens
        if api == "responses":
            answer = client.responses.create(input=secret, max_output_tokens=1, **options)
            return answer.usage.input_tokens_details.cached_tokens
        chat = client.chat.completions.create(messages=secret, max_tokens=1, **options)
        return chat.usage.prompt_tokens_details.cached_tokens

    assert cached("first-key", "chat") == 0
    assert cached("first-key", "chat") > 300
    assert cached("first-key", "responses") > 300
    assert cached("second-key", "chat") == cached("second-key", "completions") == 0
    assert cached("first-key", "completions") == 0
    assert cached("second-key", "responses") > 300


def test_an_origin_that_is_allowed(locked: Running) -> None:
    ask = ("OPTIONS /v1/models HTTP/1.1", "Host: llm.example", "Origin: https://chat.example")
    answer = spoken(locked.port, *ask)
    assert status(answer) == 200
    assert b"access-control-allow-origin: https://chat.example" in answer
    assert b"access-control-allow-credentials" not in answer


def test_another_address_without_a_key_is_refused(folder: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("0.0.0.0", 0))
        with pytest.raises(BadRequest, match="others can reach"):
            serving.run(Models({"tiny": str(folder)}, {}, {}), bound, ready=print)
