"""Editors of what is typed into a chat: prompt_toolkit where it is installed, else readline, else bare lines.

Each gives one message at a time: a paste is one, and so is what stands between three quotes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from pronk.cli import console
from pronk.cli.chat_history import History

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History as ToolkitHistory
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, MORE = "> ", ". "
QUOTES = '"""'

_QUOTED = re.compile(r'\s*(/\w+\s+)?"""')

Complete = Callable[[str], list[tuple[str, str]]]  # a line up to the cursor: what its last word may become, and why


class Editor(Protocol):
    pastes: bool  # whether a text of several lines can be pasted as one message

    def read(self, text: str = "") -> str:
        """The next message, `text` to begin with. Raises EOFError at the end, KeyboardInterrupt where it is dropped."""


def best(history: History, complete: Complete) -> Editor:
    """The best one there is, for what the terminal can do."""
    if not console.is_dumb() and (sys.stdout.isatty() or sys.stderr.isatty()):
        try:
            return Toolkit(history, complete)
        except ImportError:
            pass
    if sys.stdout.isatty():  # readline writes nowhere else
        try:
            return Readline(history, complete)
        except ImportError:  # Windows, whose console edits lines by itself
            pass
    return Bare()


def is_open(text: str) -> bool:
    """Whether `text` begins with three quotes, after a command perhaps, and they have not been closed."""
    begun = _QUOTED.match(text)
    return begun is not None and not text[begun.end() :].rstrip().endswith(QUOTES)


def unquoted(text: str) -> str | None:
    """What stands between the quotes that `text` begins with; None where it begins otherwise."""
    text = text.strip()
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") if text.startswith(QUOTES) else None


class Toolkit:
    pastes = True

    def __init__(self, history: History, complete: Complete) -> None:
        """Raises ImportError."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        output = create_output(always_prefer_tty=True)
        if hasattr(output, "enable_cpr"):  # answers of the terminal would mix with what is typed during an answer
            output.enable_cpr = False
        self.session: PromptSession[str] = PromptSession(
            history=_toolkit_history(history),
            completer=_toolkit_completer(complete),
            complete_while_typing=False,
            key_bindings=_toolkit_keys(),
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else MORE,
            search_ignore_case=True,
            enable_suspend=True,
            enable_open_in_editor=True,
            output=output,
        )

    def read(self, text: str = "") -> str:
        return self.session.prompt(PROMPT, default=text)


def _toolkit_keys() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _toolkit_history(history: History) -> ToolkitHistory:
    from prompt_toolkit.history import History as Base

    class Kept(Base):
        def load_history_strings(self) -> list[str]:
            return history.entries[::-1]  # newest first

        def store_string(self, string: str) -> None:
            history.add(string)

    return Kept()


def _toolkit_completer(complete: Complete) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Any:
            line = document.text_before_cursor
            begun = len(line) - (line.rfind(" ") + 1)
            for word, meaning in complete(line):
                yield Completion(word, start_position=-begun, display_meta=meaning)

    return Words()


class Readline:
    def __init__(self, history: History, complete: Complete) -> None:
        """Raises ImportError."""
        self.library: Any = import_module("readline")
        self.history, self.complete = history, complete
        for entry in history.entries:
            self.library.add_history(entry)
        self.library.set_auto_history(False)  # an entry is a message, not a line
        self.library.set_completer_delims(" \n")
        self.library.set_completer(self._candidate)
        is_gnu = "libedit" not in (self.library.__doc__ or "")
        self.pastes = is_gnu and not console.is_dumb()
        if is_gnu:
            self.library.parse_and_bind("tab: complete")
            self.library.parse_and_bind("set show-all-if-ambiguous on")
            self.library.parse_and_bind(r'"\e\C-m": "\C-q\C-j"')  # Alt-Enter: a newline, and not the end
        else:
            self.library.parse_and_bind("bind ^I rl_complete")
        if self.pastes:  # Python switches it off
            self.library.parse_and_bind("set enable-bracketed-paste on")

    def read(self, text: str = "") -> str:
        self.library.set_startup_hook((lambda: self.library.insert_text(text)) if text else None)
        try:
            message = _asked(input)
        finally:
            self.library.set_startup_hook(None)
        if message.strip():
            self.library.add_history(message)
            self.history.add(message)
        return message

    def _candidate(self, word: str, number: int) -> str | None:
        line = self.library.get_line_buffer()[: self.library.get_endidx()]
        found = self.complete(line)
        return found[number][0] if number < len(found) else None


class Bare:
    pastes = False

    def read(self, text: str = "") -> str:
        if text:
            console.say(f"instead of: {text}")
        return _asked(input if sys.stdout.isatty() else _ask)


def _asked(ask: Callable[[str], str]) -> str:
    """A line, and more of them as long as its quotes are open; the end of input closes them."""
    try:
        text = ask(PROMPT)
        while is_open(text):
            try:
                text += "\n" + ask(MORE)
            except EOFError:
                console.say()
                break
    except (EOFError, KeyboardInterrupt):
        console.say()  # what comes next begins a line
        raise
    return text


def _ask(prompt: str) -> str:
    """As input(), but with the prompt on stderr, for stdout is a file."""
    console.say(prompt, end="")
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.removesuffix("\n")
