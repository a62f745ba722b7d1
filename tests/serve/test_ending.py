"""The program: how it starts, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import openai
import pytest
from served import PATIENCE_S, Running, slowed, soon

import pronk
from pronk.cli import serve
from pronk.serve import run as serving
from pronk.serve.failures import ApiError
from pronk.serve.http import EventStream
from pronk.serve.models import Models, names_of

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")


# pronk, each of whose passes takes half a second longer: a thousand tokens take longer than any test waits.
SLOW = """
import time
from pronk.serve import run
from pronk.session import Session
step, run.DRAIN_S = Session.step, 900

def slow(session):
    time.sleep(0.5)
    return step(session)

Session.step = slow
from pronk.cli import main
main()
"""


@contextmanager
def started(folder: Path, *python: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and the lines that it says from then on."""
    command = [sys.executable, *python, "serve", "-m", str(folder), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if at := re.search(r"at (http://\S+)", line):
                break
        else:
            raise AssertionError("it ended before it served")
        said: list[str] = []
        reading = threading.Thread(target=said.extend, args=(process.stderr,))
        reading.start()
        try:
            yield process, at[1], said
        finally:
            process.kill()
            reading.join()  # before what it reads is closed


# pronk on a system that has no uvloop, as Windows.
NO_UVLOOP = "import sys; sys.modules['uvloop'] = None; from pronk.cli import main; main()"


@POSIX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("python", [("-m", "pronk"), ("-c", NO_UVLOOP)], ids=["as it is", "no uvloop"])
def test_a_signal_lets_texts_end(folder: Path, number: int, python: tuple[str, str]) -> None:
    with started(folder, *python) as (process, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        process.send_signal(number)
        finishes = [chunk.choices[0].finish_reason for chunk in stream]
        assert finishes[-1] == "length"
        assert process.wait(PATIENCE_S) == 0


@POSIX
def test_a_second_signal_ends_at_once(folder: Path) -> None:
    with started(folder, "-c", SLOW) as (process, url, said):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        stream = client.completions.create(
            model="tiny", prompt="x", n=8, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert soon(lambda: any("ending: 8 texts" in line for line in said))  # two at once are one to a system
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@POSIX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_goes_away_changes_nothing(folder: Path, number: int) -> None:
    """Bug: an idle server that was told twice ended with -15 or -2, by when the second came."""
    for wait in (0.05, 0.15, 0.25, 0.35):
        with started(folder, "-m", "pronk") as (process, _, _):
            process.send_signal(number)
            time.sleep(wait)
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0


@POSIX
def test_a_stream_that_is_ended_at_once_says_so(folder: Path) -> None:
    """Bug: it stopped, without a word."""
    with started(folder, "-c", SLOW) as (process, url, said):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert soon(lambda: any("ending: 1 text" in line for line in said))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server has ended amid this answer"):
            list(stream)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_nobody_reads_does_not_keep_a_server_from_its_end(waits: bool) -> None:
    """To tell who reads nothing that it has ended took as long as it read nothing."""

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: x"

    async def unread(message: Any) -> None:
        await asyncio.Event().wait()

    async def cut() -> None:
        stream = EventStream(events(), lambda error: b"event: error", AsyncExitStack())
        await stream._first
        stream._chunk = lambda body: not waits
        await asyncio.wait_for(stream.cut(unread, ApiError(503, "over")), PATIENCE_S)

    asyncio.run(cut())


@POSIX
def test_a_whole_answer_that_is_ended_at_once_says_so(folder: Path) -> None:
    """Bug: it was uvicorn's own, 500 and no JSON, and the log did not have it."""
    with started(folder, "-c", SLOW) as (process, url, said):
        body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        found: list[tuple[int, dict[str, Any]]] = []

        def ask() -> None:
            try:
                urllib.request.urlopen(request, timeout=PATIENCE_S)
            except urllib.error.HTTPError as error:
                found.append((error.code, json.load(error)))

        asking = threading.Thread(target=ask)
        asking.start()
        running = b'pronk_texts_running{model="tiny"} 1'
        assert soon(lambda: running in urllib.request.urlopen(f"{url}/metrics").read())
        process.send_signal(signal.SIGTERM)
        assert soon(lambda: any("ending: 1 text" in line for line in said))
        process.send_signal(signal.SIGTERM)
        asking.join(PATIENCE_S)
        assert process.wait(PATIENCE_S) == 0
    status, told = found[0]
    assert status == 503
    assert told["error"]["message"] == "the server has ended amid this answer"
    assert any("/v1/completions 503" in line for line in said)


def test_who_waits_for_its_end_is_told_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After Ctrl-C nothing was said for as long as texts went on, up to a minute."""
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}))
    assert running.server
    slowed(monkeypatch, 0.2)  # 900 tokens take 3 minutes
    stream = running.client().completions.create(
        model="tiny", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    with caplog.at_level("INFO", logger="pronk.serve"):
        running.server.should_exit = True
        assert soon(lambda: "ending" in caplog.text)
        running.stop()  # whose client leaves
    assert "ending: 1 text under way" in caplog.text


def test_while_it_loads_its_health_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked before the model was loaded heard nothing at all until it was."""
    may_load, really = threading.Event(), pronk.load

    def slow(*arguments: Any, **options: Any) -> pronk.LLM:
        may_load.wait(PATIENCE_S)
        return really(*arguments, **options)

    monkeypatch.setattr(pronk, "load", slow)
    bound, made = serving.listen("127.0.0.1", 0), list[serving.Uvicorn]()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/health"
    options: dict[str, Any] = {"ready": lambda address: None, "made": made.append}
    thread = threading.Thread(
        target=serving.run, args=(Models({"tiny": str(folder)}, {}, {"threads": 1}), bound), kwargs=options
    )
    thread.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(url, timeout=PATIENCE_S)
        assert (found.value.code, json.loads(found.value.read())) == (503, {"status": "loading"})
        may_load.set()
        base = url.replace("/health", "/v1")
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=PATIENCE_S)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage  # it waited
        client.close()
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
    finally:
        may_load.set()
        made[0].should_exit = True
        thread.join(PATIENCE_S)


def test_health_tells_of_an_engine_that_has_died(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 from /health while every request hangs is what no supervisor can mend (sglang#33858)."""
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}))
    try:
        with urllib.request.urlopen(f"{running.url}/health", timeout=PATIENCE_S) as answer:
            assert json.loads(answer.read())["status"] == "ok"
        running.engine.stop()
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(f"{running.url}/health", timeout=PATIENCE_S)
        assert (found.value.code, json.loads(found.value.read())) == (503, {"status": "failed"})
    finally:
        running.stop()


def test_what_cannot_be_served_is_said_in_a_line(folder: Path, tmp_path: Path) -> None:
    def said(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pronk", "serve", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stderr

    (tmp_path / "empty").write_text("\n")
    for options, code, words in [
        (("-m", str(tmp_path / "nowhere"), "--port", "0"), 1, "nowhere"),
        (("-m", str(folder), "--host", "0.0.0.0"), 2, "others can reach"),
        (("-m", str(folder), "--host", "http://127.0.0.1"), 2, "such as 127.0.0.1; not 'http://127.0.0.1'"),
        (("-m", str(folder), "--port", "0", "--max-memory", "1000"), 1, "--max-memory"),
        (("-m", str(folder), "--max-memory", "12 GBs"), 2, "12GB"),
        (("-m", str(folder), "--port", "0", "--max-memory", "0.1kB"), 1, "--max-memory"),
        (("-m", str(tmp_path / "nowhere"), "--port", "0", "--chat-template", "llama9"), 1, "llama9"),
        (("-m", str(tmp_path / "nowhere"), "--port", "0", "--adapter", "a=./x"), 1, "./x: no such folder"),
        (("-m", str(folder), "--api-key-file", str(tmp_path / "empty")), 1, "holds no key"),
        (("-m", str(folder), "--adapter", "a=x", "--adapter", "a=y"), 2, "two adapters"),
        (("-m", str(folder), "-m", str(folder)), 1, "is given twice"),
        (("-m", str(folder), "--host", "no.such.invalid", "--api-key", "x"), 1, "give a --host"),
        (("-m", str(folder), "--host", "a..b", "--api-key", "x"), 1, "give a --host"),
        (("-m", str(folder), "--host", "192.0.2.1", "--api-key", "x"), 1, "give a --host"),
    ]:
        status, error = said(*options)
        assert status == code, error
        assert words in error
        assert "Traceback" not in error


def test_a_link_has_a_name_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Bug: it was called what it led to, so that two models of one name could not be told apart by a link."""
    (tmp_path / "mine").symlink_to(folder)
    (tmp_path / "mine.gguf").symlink_to("elsewhere.gguf")
    (tmp_path / "elsewhere.gguf").touch()
    for source, name in [("mine", "mine"), ("mine.gguf", "mine"), ("mine/..", folder.parent.name)]:
        assert list(names_of([str(tmp_path / source)])) == [name]


def test_keys_of_the_environment_are_one_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each word of PRONK_API_KEY was a key by itself, and the whole of it was none."""
    kept: list[str] = []
    monkeypatch.setattr(serving, "run", lambda models, bound, *, keys, **_: (bound.close(), kept.extend(keys)))
    monkeypatch.setattr(serve, "_log_to_stderr", lambda: None)  # which other tests read
    monkeypatch.setattr(serve, "_told_to_end", nullcontext)  # so are these
    monkeypatch.setenv("PRONK_API_KEY", "correct horse battery\r\n\nanother\n")
    serve.command.main(["-m", str(folder), "--port", "0"], standalone_mode=False)
    assert kept == ["correct horse battery", "another"]


def test_a_key_that_is_none_is_not_no_key(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Bug: a blank PRONK_API_KEY served everybody."""
    for blank in ("", "  ", "\n"):
        monkeypatch.setenv("PRONK_API_KEY", blank)
        with pytest.raises(click.UsageError, match="PRONK_API_KEY holds no key"):
            serve.command.main(["-m", str(folder), "--port", "0"], standalone_mode=False)


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_threads_allocate_from_two_places() -> None:
    """Of one for each of the threads that requests run in, each kept the most that it ever took."""
    script = """
import ctypes, re, sys, threading
from pronk import system
if sys.argv[1] == "shared":
    system.share_memory()
libc, together = ctypes.CDLL(None), threading.Barrier(6)
def take():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
spans = re.findall(r"^(\\w+)-(\\w+) ---p", open("/proc/self/maps").read(), re.MULTILINE)
print(sum(60 << 20 < int(end, 16) - int(start, 16) < 1 << 26 for start, end in spans))  # what is left of 64 MB each
"""

    def places(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", script, how], capture_output=True, check=True).stdout)

    assert places("as it is") >= 5
    assert places("shared") == 1  # beside the process's own
