"""Whole transcripts of `pronk chat`, scripted and on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from fake_llm import FakeLLM

Run = Callable[..., Result]
ANSWER = {"role": "assistant", "content": "word0 word1 "}
DRAWN = "temperature 0.7, top-p 0.95, seed 1234"
REPORT = f"2 tokens at 40.0 tok/s; {DRAWN}; stopped after 2 tokens; -n allows more\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_scripted_turns(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", "--system", "Be brief.", input="hello\n\nand now?\n")
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \nword0 word1 \n"
    assert result.stderr == REPORT * 2
    system = {"role": "system", "content": "Be brief."}
    assert [call["messages"] for call in loaded[0].calls] == [
        [system, user("hello")],
        [system, user("hello"), ANSWER, user("and now?")],
    ]


def test_commands(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = (
        f"one\n/reset\n/system Be kind.\ntwo\n/save {saved}\n/system\n//usr is a folder\n/help\n/exit\nnever said\n"
    )
    result = run("chat", "-n", "2", input=script)
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \n" * 3
    kind = {"role": "system", "content": "Be kind."}
    assert [call["messages"] for call in loaded[0].calls] == [
        [user("one")],
        [kind, user("two")],
        [user("two"), ANSWER, user("/usr is a folder")],
    ]
    assert json.loads(saved.read_text()) == [kind, user("two"), ANSWER]
    notes = result.stderr.replace(REPORT, "")
    assert notes.startswith(f"conversation forgotten\nsystem prompt set\nsaved to {saved}\nsystem prompt removed\n")
    assert "/reset          forget" in notes


def test_a_saved_conversation_goes_on(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    run("chat", "-n", "2", "--system", "Be kind.", input=f"one\n/save {saved}\n")
    result = run("chat", "-n", "2", "-f", str(saved), input=f"two\n/save {saved}\n")
    assert result.exit_code == 0
    before = [{"role": "system", "content": "Be kind."}, user("one"), ANSWER]
    assert loaded[1].calls[0]["messages"] == [*before, user("two")]
    assert json.loads(saved.read_text()) == [*before, user("two"), ANSWER]


def test_save_replaces_no_stranger(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    result = run("chat", "-n", "2", input=f"/save {precious}\n/save\n/save {tmp_path / 'no' / 'such' / 'folder'}\nhi\n")
    assert precious.read_text() == "mine"
    assert (result.exit_code, result.stdout) == (1, "word0 word1 \n")  # the script went on, and the exit code tells
    problems = result.stderr.splitlines()
    assert problems[0] == f"pronk: {precious} exists; name another file, or delete it first"
    assert problems[1] == "pronk: /save needs a file name"
    assert problems[2] == f"pronk: {tmp_path / 'no' / 'such' / 'folder'}: No such file or directory"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        '{"role": "user"}',
        "[1]",
        '[{"role": "user"}]',
        '[{"role": "user", "content": 3}]',
        "caf\xe9",
    ],
    ids=range(8),
)
def test_files_that_are_no_conversation(run: Run, loaded: list[FakeLLM], tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(content.encode("latin-1"))
    result = run("chat", "-f", str(path), input="")
    assert (result.exit_code, result.stdout, loaded) == (1, "", [])
    assert result.stderr.startswith(f"pronk: {path}: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_command_is_not_said_to_the_model(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="/quit now\n")
    assert (result.exit_code, result.stdout, loaded[0].calls) == (1, "", [])
    assert result.stderr == "pronk: no command /quit; /help lists them, and // says a line that begins with /\n"


def test_a_conversation_that_no_longer_fits(run: Run, loaded: list[FakeLLM]) -> None:
    """The question that does not fit is forgotten, so that the next may fit; /reset makes room."""
    result = run("chat", "-n", "2", input="short\n" + "long " * 70 + "\nshort again\n/reset\nanew\n")
    assert result.exit_code == 1
    assert result.stdout == "word0 word1 \n" * 3
    assert "pronk: the conversation has 73 tokens and at most 63 fit; /reset starts anew" in result.stderr
    assert loaded[0].calls[2]["messages"] == [user("short"), ANSWER, user("short again")]
    assert loaded[0].calls[3]["messages"] == [user("anew")]


def test_an_answer_that_fills_the_context(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "60", input="one two three four\n")
    assert result.stderr == "60 tokens at 40.0 tok/s; greedy; stopped, for the context of 64 tokens is full\n"


def test_a_byte_order_mark_is_not_said(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    run("chat", "-n", "2", input=b"\xef\xbb\xbfhello\n\xef\xbb\xbfhello\n")
    first, second = loaded[0].calls
    assert first["messages"] == [user("hello")]
    assert second["messages"][-1] == user("\ufeffhello")  # no mark there, but what was written
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([user("hi")]), encoding="utf-8-sig")
    assert run("chat", "-n", "2", "-f", str(path), input="so?\n").exit_code == 0


def test_where_there_is_no_home(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="/save ~no-such-user/talk.json\n")
    assert result.stderr == "pronk: ~no-such-user/talk.json: No such file or directory\n"


def test_an_error_in_an_answer_ends_no_conversation(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="fail\nhello\n")
    assert result.exit_code == 1
    assert result.stdout == "word0 \nword0 word1 \n"
    assert "pronk: model.bin at byte 3: broken" in result.stderr


def test_what_is_no_text_is_refused(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input=b"caf\xe9\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "pronk: standard input: not UTF-8 text (byte 3); convert it first\n"


def test_ctrl_c_ends_a_script(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("chat", "-n", "2", input="interrupt\nhello\n").exit_code == 130


def test_the_chat_template_is_passed_on(run: Run, loaded: list[FakeLLM]) -> None:
    run("chat", "-n", "2", "--chat-template", "llama3", input="hi\n")
    assert loaded[0].calls[0]["chat_template"] == "llama3"


def test_a_template_that_is_none_is_told_before_the_model_is_loaded(
    run: Run, loaded: list[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "broken.jinja").write_text("{% if")
    for template, problem in (("absent", "no chat template at absent"), ("broken.jinja", "broken.jinja: line 1")):
        result = run(
            "chat", "--chat-template", template if template == "absent" else str(tmp_path / template), input=""
        )
        assert (result.exit_code, result.stdout, loaded) == (1, "", [])
        assert problem in result.stderr


def test_a_template_that_refuses_the_system_prompt_is_told_before_the_first_turn(
    run: Run, loaded: list[FakeLLM]
) -> None:
    result = run("chat", "--system", "refused", input="")
    assert (result.exit_code, result.stdout, loaded[0].calls) == (1, "", [])
    assert result.stderr == "pronk: the model's chat template refuses these messages: no system prompt\n"


class Terminal:
    """pronk on a pseudo-terminal: type, and wait for what it shows."""

    def __init__(self, command: list[str], home: Path, **environment: str) -> None:
        import pty

        self.master, slave = pty.openpty()
        env = {**os.environ, "PRONK_HOME": str(home), "TERM": "xterm", "INPUTRC": os.devnull, **environment}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What was shown up to and with `text`, since the last wait."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; there was {self.shown!r}"
            try:
                self.shown += os.read(self.master, 4096).decode()
            except OSError:  # the other side has closed
                assert text in self.shown, f"{text!r} did not come; there was {self.shown!r}"
        until = self.shown.index(text) + len(text)
        seen, self.shown = self.shown[:until], self.shown[until:]
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that ^C typed into it becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(fake_pronk: list[str], tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    pytest.importorskip("pty")
    opened: list[Terminal] = []

    def start(*arguments: str, **environment: str) -> Terminal:
        opened.append(Terminal([*fake_pronk, *arguments], tmp_path / "home", **environment))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    screen = terminal("chat", "-n", "1000")
    screen.wait_for("> ")
    for _ in range(2):  # as often as it is pressed
        screen.type("slow\r")
        screen.wait_for("word3 ")
        screen.type("\x03")
        screen.wait_for("stopped")
        screen.wait_for("> ")
    screen.type("half a line")
    screen.wait_for("line")
    time.sleep(0.2)  # Python forgets a signal that comes while readline draws, until the next key
    screen.type("\x03")
    screen.wait_for("> ")
    screen.type(f"/save {tmp_path / 'talk.json'}\r")
    screen.wait_for("saved to")
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.process.wait(timeout=60) == 0
    first, answer, second, _ = json.loads((tmp_path / "talk.json").read_text())
    assert (first, second) == (user("slow"), user("slow"))
    assert answer["content"].startswith("word0 word1 word2 word3 ")
    assert "word100" not in answer["content"]


def test_lines_can_be_edited_and_recalled_next_time(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    pytest.importorskip("readline")
    screen = terminal("chat", "-n", "2")
    screen.wait_for("> ")
    screen.type("hezlo\x1b[D\x1b[D\x7fl\r")  # left, left, backspace, l
    screen.wait_for("word1 ")
    screen.wait_for("> ")
    screen.type("/exit\r")
    assert screen.process.wait(timeout=60) == 0
    history = tmp_path / "home" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["hello", "/exit"]
    assert history.stat().st_mode & 0o077 == 0

    screen = terminal("chat", "-n", "2")
    screen.wait_for("> ")
    screen.type("\x1b[A\x1b[A\r")  # up, up
    screen.wait_for("hello")
    screen.wait_for("word1 ")


@pytest.mark.skipif(sys.platform != "linux", reason="the directory of XDG's standard")
def test_history_is_the_users_state_and_no_cache(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    pytest.importorskip("readline")
    screen = terminal(
        "chat", "-n", "2", PRONK_HOME="", XDG_STATE_HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "c")
    )
    screen.wait_for("> ")
    screen.type("/exit\r")
    assert screen.process.wait(timeout=60) == 0
    assert (tmp_path / "pronk" / "chat_history").read_text().splitlines() == ["/exit"]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_reading_a_long_prompt_is_shown(terminal: Callable[..., Terminal], kind: str) -> None:
    screen = terminal("generate", "long", "-n", "2", TERM=kind)
    before = screen.wait_for("64 of 128 tokens, ") + screen.wait_for(" s left")
    assert "reading the prompt" in before
    assert "word" not in before
    after = screen.wait_for("stopped after 2 tokens")
    assert "word0 word1" in after
    assert ("\x1b[" in before + after) == (kind == "xterm")


def test_ctrl_c_while_loading_ends_a_chat_too(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("chat", "-m", "hang")
    screen.wait_for("loading")
    screen.type("\x03")
    assert screen.process.wait(timeout=60) == 130


def test_interrupted_by_a_signal_rather_than_a_key(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("chat", "-n", "1000")
    screen.wait_for("> ")
    screen.type("slow\r")
    screen.wait_for("word3 ")
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for("stopped")
