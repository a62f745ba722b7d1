"""The process that renders chat templates: kept, replaced, shared, interrupted, forked, and gone with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pronk.errors import BadRequest, PronkError
from pronk.tokenizer import renderer
from pronk.tokenizer.chat import ChatTemplate, builtin
from pronk.tokenizer.renderer import Renderer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


@pytest.fixture
def alone() -> Iterator[Renderer]:
    made = Renderer(seconds=0.3)
    yield made
    made.close()


def test_a_process_is_kept_and_a_dead_one_replaced(alone: Renderer) -> None:
    pids = []
    for _ in range(3):
        assert alone.ask("{{ a }}", {"a": 1}) == {"text": "1"}
        assert alone.process
        pids.append(alone.process.pid)
    assert len(set(pids)) == 1
    alone.process.kill()  # as the system does where memory runs out
    alone.process.wait()
    assert alone.ask("{{ a }}", {"a": 1}) == {"text": "1"}


@POSIX
def test_what_was_too_much_leaves_no_process_behind(alone: Renderer) -> None:
    alone.ask("x")
    assert alone.process
    gone = alone.process.pid
    assert alone.ask(ENDLESS, {}) == {"broken": "the template takes more than 0.3 s"}
    assert alone.process is None
    assert alone.ask("{{ 'a' * 10 ** 10 }}", {}) == {"broken": "the template takes more than 400 MB"}
    assert alone.process is None
    with pytest.raises(ChildProcessError):  # no zombie waits for anybody
        os.waitpid(gone, os.WNOHANG)


def test_a_start_ahead_is_the_one_that_is_used(alone: Renderer) -> None:
    alone.start()
    assert alone.process
    pid = alone.process.pid
    alone.start()
    assert alone.ask("{{ 1 }}", {}) == {"text": "1"}
    assert alone.process.pid == pid


def test_threads_take_turns(alone: Renderer) -> None:
    wrong = []

    def work(number: int) -> None:
        for turn in range(20):
            text = f"{number} {turn} " * 5000
            if alone.ask("{{ a }}", {"a": text}) != {"text": text}:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@POSIX
def test_an_interrupt_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Renderer(seconds=60)
    alone.ask("x")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted() -> None:
        timer.start()  # here, for on a busy machine it may ring at once
        alone.ask(ENDLESS, {})

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    timer.join()
    assert alone.process is None
    assert alone.ask("{{ 1 }}", {}) == {"text": "1"}
    alone.close()


@POSIX
def test_a_fork_has_a_process_of_its_own() -> None:
    """Two that read one pipe would get each other's answers."""
    code = """
import os, sys
from pronk.tokenizer import renderer
shared = renderer.shared
assert shared.ask("{{ 1 }}", {}) == {"text": "1"}
before = shared.process.pid
child = os.fork()
if not child:
    ok = shared.process is None and shared.ask("{{ 2 }}", {}) == {"text": "2"} and shared.process.pid != before
    shared.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert shared.ask("{{ 3 }}", {}) == {"text": "3"} and shared.process.pid == before
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=240)


@POSIX
@pytest.mark.parametrize("end", ["of itself", "by Ctrl-C", "by force", "in the middle"])
def test_it_ends_with_its_parent(end: str) -> None:
    then = {"of itself": "", "in the middle": f"shared.ask({ENDLESS!r}, {{}})"}.get(end, "time.sleep(60)")
    code = f"""
import time
from pronk.tokenizer.renderer import shared
shared.seconds = 0.5
shared.ask("x")
print(shared.process.pid, flush=True)
{then}
"""
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert parent.stdout
    child = int(parent.stdout.readline())
    if end == "by Ctrl-C":  # which reaches all processes of the terminal's group
        os.killpg(parent.pid, signal.SIGINT)
    elif end in ("by force", "in the middle"):
        parent.kill()
    _, said = parent.communicate(timeout=240)
    assert said.count("Traceback") == (end == "by Ctrl-C")
    assert "sandbox" not in said
    for _ in range(1200):
        if not _runs(child):
            return
        time.sleep(0.05)
    pytest.fail("the process outlived its parent")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between being opened and being read
        return False


def test_where_no_process_starts(alone: Renderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(renderer, "shared", alone)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(
        PronkError, match=r"run in a process of their own, and none can be started: .*No such file"
    ) as no:
        builtin("llama3")
    assert "\n" not in str(no.value)
    monkeypatch.setattr(sys, "executable", sys.orig_argv[0] if "python" in sys.orig_argv[0] else "python3")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(PronkError, match=r"none can be started: it made .* No module named 'jinja2'"):
        builtin("llama3")


@POSIX
def test_memory_is_watched_where_the_system_keeps_no_limit(alone: Renderer) -> None:
    """As on macOS: asked of ps, while an answer is waited for."""
    alone.seconds, alone.memory = 20, 4 << 30
    alone.ask("x")
    alone.memory, alone.watched = 150 << 20, True
    swell = "{% set x = 'a' * 300000000 %}"
    assert alone.ask("{{ 1 }}", {}) == {"text": "1"}
    assert alone.ask(swell + ENDLESS, {})["broken"] == "the template takes more than 150 MB"
    assert alone.process is None


def test_what_may_be_given() -> None:
    template = ChatTemplate("{{ messages[0].role }} {{ x|tojson }} {{ x }}")
    message = MappingProxyType({"role": "user", "content": "a\ud800\u2028"})
    assert template.render([message], x=(1, {"k": "é\n"})) == "user [1, {\"k\": \"é\\n\"}] [1, {'k': 'é\\n'}]"
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == "a\ud800\u2028"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (len, deep, b"a", 10**5000):
        with pytest.raises(BadRequest, match="what JSON can hold"):
            template.render([message], x=value)


def test_nothing_of_one_render_is_seen_by_the_next() -> None:
    template = ChatTemplate("{{ y is defined }}{% set y = 1 %}{% set ns = namespace(a=1) %}{{ ns.b is defined }}")
    assert template.render([]) == template.render([]) == "FalseFalse"


def test_the_caller_does_not_import_jinja() -> None:
    code = "import sys; from pronk.tokenizer import chat; chat.builtin('llama3'); print('jinja2' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert made.stdout == "False\n"
