"""`pronk chat` on a pseudo-terminal, with each of its editors: pastes, keys, history, completion, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scripts import script
from terminal import Terminal

Start = Callable[..., Terminal]

ABSENT = {"toolkit": "", "readline": "prompt_toolkit", "bare": "prompt_toolkit readline"}
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:[39][0-7]|[34]8|4[0-7]|10[0-7]|2)[\d;]*m")  # or dimmed


def start(editor: str, command: list[str], home: Path, *arguments: str, **environment: str) -> Terminal:
    if editor == "toolkit":
        pytest.importorskip("prompt_toolkit")
    if editor == "readline" and "libedit" in (import_module("readline").__doc__ or ""):
        pytest.skip("libedit, which knows no pastes")
    return Terminal([*command, *arguments], home, FAKE_ABSENT=ABSENT[editor], **environment)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    pytest.importorskip("pty")
    screens: list[Terminal] = []
    yield screens
    for screen in screens:
        screen.close()


@pytest.fixture
def chat(opened: list[Terminal], fake_pronk: list[str], tmp_path: Path, editor: str) -> Start:
    """A chat of two words an answer, when it waits for the first message."""

    def begin(*arguments: str, **environment: str) -> Terminal:
        how = arguments or ("chat", "-n", "2")
        opened.append(start(editor, fake_pronk, tmp_path / "home", *how, **environment))
        opened[-1].wait_for("Ctrl-D ends")
        wait_for_prompt(opened[-1])
        return opened[-1]

    return begin


def wait_for_prompt(screen: Terminal) -> None:
    screen.wait_for_any(r"> |>\x08\x1b\[2C")  # prompt_toolkit moves the cursor where there is nothing to see
    screen.rest()  # prompt_toolkit draws before it listens; readline forgets a signal that comes while it draws


def escape(screen: Terminal) -> None:
    """The key alone, which is one when nothing has followed it for half a second since the program has read it."""
    screen.type("\x1b")
    screen.rest()
    time.sleep(1)
    screen.rest()


def say(screen: Terminal, keys: str, answered: str = "allows more") -> None:
    screen.type(keys)
    screen.wait_for(answered)
    wait_for_prompt(screen)


def saved(screen: Terminal, tmp_path: Path) -> list[str]:
    """What the user said."""
    path = tmp_path / f"talk{time.monotonic_ns()}.json"
    screen.type(f"/save {path}\r")
    screen.wait_for("saved to")
    wait_for_prompt(screen)
    return [message["content"] for message in json.loads(path.read_text()) if message["role"] == "user"]


both = pytest.mark.parametrize("editor", ["toolkit", "readline"])
every = pytest.mark.parametrize("editor", list(ABSENT))


@both
def test_three_pasted_lines_are_one_turn(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    assert "\x1b[?2004h" in screen.everything  # the terminal was asked to say what is pasted
    say(screen, "\x1b[200~def f(x):\n    return x\n/help\x1b[201~\r")
    assert saved(screen, tmp_path) == ["def f(x):\n    return x\n/help"]
    say(screen, "before \x1b[200~one\r\ntwo\x1b[201~ after\r")  # as some terminals end lines
    assert saved(screen, tmp_path)[-1].split() == ["before", "one", "two", "after"]
    screen.type("\x04")
    assert screen.ends_with() == 0
    assert screen.everything.count("\x1b[?2004h") <= screen.everything.count("\x1b[?2004l")  # and it is told to stop


@both
def test_alt_enter_begins_a_line(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    say(screen, "one\x1b\rtwo\x1b\rthree\r")
    assert saved(screen, tmp_path) == ["one\ntwo\nthree"]


@every
def test_three_quotes(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    screen.type('"""\r')
    for line in ("one", "", "/help", '  two "quoted"'):
        screen.type(f"{line}\r")
    say(screen, '"""\r')
    say(screen, '"""four"""\r')
    say(screen, 'say """\r')  # in the middle they are what they are
    screen.type('/system """Be kind.\r')
    screen.type('And brief."""\r')
    screen.wait_for("system prompt set")
    wait_for_prompt(screen)
    assert saved(screen, tmp_path) == ['one\n\n/help\n  two "quoted"', "four", 'say """']
    assert any("Be kind.\\nAnd brief." in file.read_text() for file in tmp_path.glob("talk*"))


@every
def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Start, tmp_path: Path) -> None:
    screen = chat("chat", "-n", "1000")
    for _ in range(2):  # as often as it is pressed
        screen.type("slow\r")
        screen.wait_for("word3 ")
        screen.type("\x03")
        screen.wait_for("stopped")
        wait_for_prompt(screen)
    screen.type("half a line")
    screen.rest()
    screen.type("\x03")
    wait_for_prompt(screen)
    screen.type(f"/save {tmp_path / 'talk.json'}\r")
    screen.wait_for("saved to")
    wait_for_prompt(screen)
    screen.type("\x04")
    assert screen.ends_with() == 0
    first, answer, second, _ = json.loads((tmp_path / "talk.json").read_text())
    assert first == second == {"role": "user", "content": "slow"}
    assert answer["content"].startswith("word0 word1 word2 word3 ")
    assert "word900" not in answer["content"]  # 45 s later


@every
def test_interrupted_by_a_signal_rather_than_a_key(chat: Start) -> None:
    screen = chat("chat", "-n", "1000")
    screen.type("slow\r")
    screen.wait_for("word3 ")
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for("stopped")


@both
def test_history_is_found_by_arrows_and_by_searching_also_next_time(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    say(screen, "hezlo\x1b[D\x1b[D\x7fl\r")  # left, left, backspace, l
    say(screen, "\x1b[200~some\nlines\x1b[201~\r")
    say(screen, "something else\r")
    screen.type("/exit\r")
    assert screen.ends_with() == 0
    history = tmp_path / "home" / "chat_history"
    assert history.read_text().split("\n") == ["hello", "some\u2028lines", "something else", "/exit", ""]
    assert history.stat().st_mode & 0o077 == 0

    screen = chat()
    say(screen, "\x1b[A\x1b[A\r")  # up, up
    screen.type("\x12ell")  # Ctrl-R
    screen.rest()
    escape(screen)  # what was found goes into the line, which may be edited still
    say(screen, "\x05!\r")
    screen.type("\x12lin")
    screen.rest()
    escape(screen)
    say(screen, "\x05\r")
    assert saved(screen, tmp_path) == ["something else", "hello!", "some\nlines"]


@both
def test_tab_completes_commands_settings_and_files(chat: Start, tmp_path: Path) -> None:
    (tmp_path / "a_conversation.json").write_text(json.dumps([{"role": "user", "content": "loaded"}]))
    screen = chat()
    screen.type("/re\t")
    screen.wait_for_any("(?s)/re(set|try).*/re(set|try)")
    screen.rest()
    say(screen, "set\r", "conversation forgotten")

    def tabbed(before: str, after: str, answered: str) -> None:
        screen.type(f"{before}\t")
        screen.rest()  # prompt_toolkit completes aside of what is typed
        say(screen, f"{after}\r", answered)

    tabbed("/tok", "", "more fit beside")
    tabbed("/set freq", " 0.5", "frequency-penalty 0.5")
    tabbed(f"/load {tmp_path}/a_conv", "", "loaded 1 message")
    tabbed("no /re", "sult", "allows more")  # in a message there are no commands
    assert saved(screen, tmp_path)[0] == "loaded"


@both
def test_edit_puts_the_last_question_into_the_line(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    say(screen, "one\x1b\rtwo\r")
    screen.type("/edit\r")
    wait_for_prompt(screen)
    say(screen, " three\r")
    assert saved(screen, tmp_path) == ["one\ntwo three"]
    screen.type("/edit\r")
    wait_for_prompt(screen)
    screen.type("\x03")
    screen.wait_for("question left as it was")
    wait_for_prompt(screen)
    assert saved(screen, tmp_path) == ["one\ntwo three"]


@both
def test_what_a_terminal_would_obey_is_put_into_no_line(chat: Start, tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps([{"role": "user", "content": "x\x1b]0;y\x07\u202e"}]))
    screen = chat()
    say(screen, f"/load {path}\r", "loaded 1 message from")
    say(screen, "/edit\r", "characters that a terminal would obey; /edit TEXT replaces it")
    say(screen, "/undo\r", "taken back: x␛]0;y␇")


@every
@pytest.mark.parametrize("no_colour", ["1", ""])
def test_no_color_is_obeyed(chat: Start, no_colour: str) -> None:
    screen = chat("chat", "-n", "2", NO_COLOR=no_colour)
    say(screen, "hello\r")
    screen.type("/re\t")
    screen.rest()
    screen.type("\x03")
    wait_for_prompt(screen)
    screen.type("\x04")
    assert screen.ends_with() == 0
    assert bool(COLOUR.search(screen.everything)) == (not no_colour)


@every
def test_ctrl_d_ends_the_chat(chat: Start) -> None:
    screen = chat()
    screen.type("\x04")
    assert screen.ends_with() == 0


@pytest.mark.parametrize("editor", ["bare"])
def test_without_an_editor_it_says_so_and_goes_on(chat: Start, tmp_path: Path) -> None:
    screen = chat()
    assert 'pip install "pronk[chat]"' in screen.everything
    say(screen, "one\r")
    screen.type("/edit\r")
    screen.wait_for("instead of: one")
    say(screen, "two\r")
    assert saved(screen, tmp_path) == ["two"]


@both
def test_a_dumb_terminal_gets_no_orders(chat: Start, tmp_path: Path) -> None:
    screen = chat(TERM="dumb")
    say(screen, "one\r")
    assert saved(screen, tmp_path) == ["one"]
    assert "\x1b[" not in screen.everything


@every
def test_the_sampling_and_the_seed_are_shown(chat: Start) -> None:
    screen = chat()
    assert "sampling: temperature 0.7, top-p 0.95 (the chat's default); /set changes it" in screen.everything
    say(screen, "hi\r", "temperature 0.7, top-p 0.95, seed 1234; stopped after 2 tokens; /set max-new-tokens allows")
    say(screen, "/set temperature 0\r", "answers are greedy now")
    say(screen, "hi\r", "tok/s; greedy")


@pytest.mark.skipif(sys.platform != "linux", reason="the directory of XDG's standard")
@both
def test_history_is_the_users_state_and_no_cache(chat: Start, tmp_path: Path) -> None:
    screen = chat("chat", PRONK_HOME="", XDG_STATE_HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "c"))
    screen.type("/exit\r")
    assert screen.ends_with() == 0
    assert (tmp_path / "pronk" / "chat_history").read_text().splitlines() == ["/exit"]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_reading_a_long_prompt_is_shown(
    opened: list[Terminal], fake_pronk: list[str], tmp_path: Path, kind: str
) -> None:
    opened.append(Terminal([*fake_pronk, "generate", "long", "-n", "2"], tmp_path, TERM=kind))
    screen = opened[-1]
    before = screen.wait_for("64 of 128 tokens, ") + screen.wait_for(" s left")
    assert "reading the prompt" in before
    assert "word" not in before
    after = screen.wait_for("stopped after 2 tokens")
    assert "word0 word1" in after
    assert ("\x1b[" in before + after) == (kind == "xterm")


def test_ctrl_c_while_loading_ends_a_chat_too(opened: list[Terminal], fake_pronk: list[str], tmp_path: Path) -> None:
    opened.append(Terminal([*fake_pronk, "chat", "-m", "hang"], tmp_path))
    opened[-1].wait_for("loading")
    opened[-1].type("\x03")
    assert opened[-1].ends_with() == 130


def test_a_history_that_cannot_be_kept_is_this_chats_alone(tmp_path: Path) -> None:
    from pronk.cli.chat_history import History

    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "chat_history")
    for entry in ("one", "one", "  ", "two\nlines", "\udcff"):
        history.add(entry)
    assert history.entries == ["one", "two\nlines", "\udcff"]


def test_a_long_history_is_cut_and_two_chats_keep_both_theirs(tmp_path: Path) -> None:
    from pronk.cli.chat_history import History

    path = tmp_path / "chat_history"
    first, second = History(path), History(path)
    first.add("a")
    second.add("b")
    assert History(path).entries == ["a", "b"]
    path.write_text("".join(f"{n}\n" for n in range(2500)))
    path.chmod(0o600)
    assert History(path).entries == [str(n) for n in range(1500, 2500)]
    assert len(path.read_text().splitlines()) == 1000
    assert path.stat().st_mode & 0o077 == 0


def test_the_picture_of_a_chat_is_what_its_terminal_shows(
    fake_pronk: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/make_chat.py, with other answers: a paste is one question, notes are grey, menus have a ground."""
    for needed in ("pty", "pyte", "prompt_toolkit"):
        pytest.importorskip(needed)
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    monkeypatch.setenv("PRONK_HOME", str(tmp_path))
    made = script(docs / "make_chat.py")
    session = [(made.PASTE, "return x + 1"), ("\r", "tok/s"), ("/re\t", "/reset")]
    screen = made.record([*fake_pronk, "chat", "-n", "2"], session)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[2:6] == ["> What does this do?", ". def f(x):", ".     return x + 1", "word0 word1"]
    assert lines[-3] == "> /re"
    assert "/reset" in lines[-1]
    drawn = ElementTree.fromstring(made.picture(screen))
    texts = {each.text: each.get("fill") for each in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert texts["word0 word1"] == made.INK
    assert texts["/help lists the commands; Ctrl-D ends."] == made.DIM
    grounds = {each.get("fill") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")}
    assert len(grounds - {made.PAPER}) >= 2
