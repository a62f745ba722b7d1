"""What a request reaches nothing of: keys, other hosts, files, models that were not given, the log, other processes."""

from __future__ import annotations

import ast
import hmac
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import PATIENCE_S, Running, Script, soon

import pronk
from pronk.serve.models import Models

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}, max_sequences=4), keys=KEYS)
    yield running
    running.stop()


def told(server: Running, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(server.url + path, body, sent)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_all_keys_are_compared_and_each_in_constant_time(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that ends at the first letter that differs tells how many were right (CVE-2025-59425)."""
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def watched(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return really(given, key)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    for given, status in (("first-key", 200), ("second-key", 200), ("first-kex", 401), ("é", 401)):
        compared.clear()
        assert told(locked, "/v1/models", Authorization=f"Bearer {given}")[0] == status
        assert [key for _, key in compared] == [key.encode() for key in KEYS]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"x" * (1 << 20)])
def test_without_a_key_nothing_is_read(locked: Running, body: bytes) -> None:
    """A server that parses first can be kept busy by anybody, and tells what it would have taken."""
    try:
        assert told(locked, "/v1/chat/completions", body)[0] == 401
    except urllib.error.URLError as error:  # it closed while the body was still being sent
        if len(body) < 1 << 16 or not isinstance(error.reason, (BrokenPipeError, ConnectionResetError)):
            raise
    assert told(locked, "/v1/chat/completions", b"{}", Content_Length=str(40 << 20))[0] == 401


def test_the_log_holds_neither_prompts_nor_answers_nor_keys(
    locked: Running, caplog: pytest.LogCaptureFixture, script: Script
) -> None:
    def lines() -> list[str]:
        """But of the test before, who had no key: a line is written when its answer has gone, and may come now."""
        return [line for line in caplog.messages if " 401 " not in line]

    script.says("an answer", " in words")  # a small model's own may be a letter, which a line of the log has too
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "temperature": 0}
    with caplog.at_level("DEBUG", "pronk"):
        bearer = {"Authorization": "Bearer first-key"}
        status, answer, _ = told(locked, "/v1/chat/completions", json.dumps(body).encode(), **bearer)
        wrong = {**body, "messages": [{"role": "a secret", "content": "a secret"}]}
        assert told(locked, "/v1/chat/completions", json.dumps(wrong).encode(), **bearer)[0] == 400
        assert soon(lambda: len(lines()) >= 2)
    assert status == 200
    text = json.loads(answer)["choices"][0]["message"]["content"]
    assert text == "an answer in words"
    assert [line.split()[3] for line in lines()] == ["200", "400"]
    for line in caplog.messages:
        assert "secret" not in line
        assert "key" not in line
        assert text not in line


def picture(url: str) -> dict[str, tuple[dict[str, Any], str]]:
    image = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    return {
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": [image]}]}, "image_url"),
        "/v1/responses": (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            "input_image",
        ),
        "/v1/messages": ({"messages": [{"role": "user", "content": [source]}], "max_tokens": 1}, "image"),
        "/v1/look": ({"messages": [{"role": "user", "content": [image]}]}, "image_url"),
        "/tokenize": ({"messages": [{"role": "user", "content": [image]}]}, "image_url"),
    }


@pytest.mark.parametrize("path", picture(""))
def test_an_address_in_a_message_is_not_opened(server: Running, path: str) -> None:
    """Two readers of addresses that disagree lead a server to where it should not look (CVE-2026-24779)."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        body, named = picture(f"http://127.0.0.1:{trap.getsockname()[1]}/cat.png")[path]
        status, answer, _ = told(server, path, json.dumps(body).encode())
        with pytest.raises(TimeoutError):
            trap.accept()
    assert status == 400
    assert named in answer.decode()


def test_no_request_loads_what_was_not_given(server: Running, folder: Path, adapter: Path) -> None:
    """Who may load a model may read memory by a broken one (Ollama's CVE-2026-7482)."""
    before = (server.models.names, len(server.models.loaded))
    for name in (str(folder), str(adapter), "../tiny", "smollm2:135m", "owner/name", "", "\0"):
        status, answer, _ = told(server, "/v1/completions", json.dumps({"model": name, "prompt": "x"}).encode())
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
    assert (server.models.names, len(server.models.loaded)) == before


def test_ranges_are_not_heeded(server: Running) -> None:
    """A hundred ranges of one file cost a server a hundred times its bytes (CVE-2025-62727)."""
    whole = told(server, "/page/main.js")[1]
    ranges = "bytes=" + ",".join(f"0-{n}" for n in range(100))
    status, answer, headers = told(server, "/page/main.js", Range=ranges)
    assert (status, answer, headers["content-range"]) == (200, whole, None)


def carries_code(tree: ast.AST) -> set[str]:
    """Modules that it imports of those that run what they read."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found & {"pickle", "marshal", "shelve", "multiprocessing", "dill", "cloudpickle"}


def test_no_process_is_sent_a_pickle() -> None:
    """Pickles between processes were the way into several engines (ShadowMQ). multiprocessing sends nothing else; one
    that measures has it, over a pipe to its own parent."""
    source = Path(pronk.__file__).parent
    found = {path.relative_to(source): carries_code(ast.parse(path.read_text())) for path in source.rglob("*.py")}
    assert [str(path) for path, modules in found.items() if modules] == ["measure/worker.py"]
    assert carries_code(ast.parse("def f():\n    import pickle")) == {"pickle"}
    assert carries_code(ast.parse("from multiprocessing.connection import Client")) == {"multiprocessing"}
