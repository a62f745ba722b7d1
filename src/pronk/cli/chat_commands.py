"""The commands of a chat: what a line that begins with / does."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pronk.cli import console
from pronk.cli.chat_editor import unquoted
from pronk.cli.conversation import Conversation
from pronk.errors import BadRequest
from pronk.system import expanded
from pronk.terminal import shown_in_line

if TYPE_CHECKING:
    from pronk.cli.chat import Chat

KEYS = """\
Enter sends. A pasted text is one message; Alt-Enter begins a new line, and so does Enter between \"\"\" and \"\"\".
Up and Ctrl-R find what was typed before; Tab completes commands. //TEXT sends /TEXT to the model.
Ctrl-C stops an answer; the part already written stays in the conversation. Ctrl-D ends the chat."""


class Over(Exception):
    """The conversation is."""


@dataclass(frozen=True)
class Command:
    argument: str  # as the help has it: "" for none, [IN BRACKETS] where it may be left out
    help: str
    run: Callable[[Chat, str], None]


COMMANDS: dict[str, Command] = {}
SAME = {"/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/?": "/help"}  # as other chats call them


def _command(argument: str, help: str) -> Callable[[Callable[[Chat, str], None]], Callable[[Chat, str], None]]:
    def register(run: Callable[[Chat, str], None]) -> Callable[[Chat, str], None]:
        COMMANDS["/" + run.__name__.strip("_")] = Command(argument, help, run)
        return run

    return register


@_command("", "take back the last question and its answer")
def undo(chat: Chat, argument: str) -> None:
    turns = chat.conversation.turns
    at = chat.conversation.last_question()
    question = turns[at]["content"]
    del turns[at:]
    console.note(f"taken back: {_short(question)}")


@_command("", "answer the last question anew, with another seed")
def retry(chat: Chat, argument: str) -> None:
    at = chat.conversation.last_question()
    chat.answer(chat.conversation.turns[at]["content"], chat.conversation.turns[:at], again=True)


@_command("[TEXT]", "change the last question, and answer it anew")
def edit(chat: Chat, argument: str) -> None:
    at = chat.conversation.last_question()
    text = argument or chat.edited(chat.conversation.turns[at]["content"])
    if not text.strip():
        console.note("question left as it was")
        return
    chat.answer(text, chat.conversation.turns[:at])


@_command("[TEXT]", "set the system prompt; without TEXT, remove it")
def system(chat: Chat, argument: str) -> None:
    before, chat.conversation.system = chat.conversation.system, argument or None
    if not before and not argument:
        console.note("there is no system prompt; /system TEXT sets one")
        return
    was = f"; it was: {_short(before)}" if before else ""
    console.note(("system prompt set" if argument else "system prompt removed") + was)


@_command("[NAME VALUE]", "show how answers are drawn, or set an option: /set temperature 0.7")
def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        console.note(console.table(chat.sampling.table()))
    elif not value.strip():
        console.note(f"{name} is {chat.sampling.shown(chat.sampling.field(name))}")
    else:
        console.note(chat.sampling.set(name, value.strip()))


@_command("", "count the conversation's tokens, and those there is room for")
def tokens(chat: Chat, argument: str) -> None:
    console.note(chat.account())


@_command("", "forget the conversation, keep the system prompt")
def reset(chat: Chat, argument: str) -> None:
    chat.go_on_from(Conversation(chat.conversation.system))
    console.note("conversation forgotten")


@_command("[FILE]", "save the conversation as JSON; without FILE, where it was saved before")
def save(chat: Chat, argument: str) -> None:
    path = expanded(argument) if argument else chat.conversation.path
    if path is None:
        raise BadRequest("/save needs a file name")
    chat.conversation.save(path)
    console.note(f"saved to {argument or path}")


@_command("FILE", "go on from the conversation saved in FILE, as pronk chat -f FILE does")
def load(chat: Chat, argument: str) -> None:
    if not argument:
        raise BadRequest("/load needs a file name")
    conversation = Conversation.read(expanded(argument))
    chat.go_on_from(conversation)
    count = len(conversation.turns)
    said = f"{count} message{'s' * (count != 1)}" + (" and a system prompt" if conversation.system else "")
    console.note(f"loaded {said} from {argument}")


@_command("", "list these commands")
def help(chat: Chat, argument: str) -> None:
    console.note(HELP)


@_command("", "end the chat, as Ctrl-D does")
def exit(chat: Chat, argument: str) -> None:
    raise Over


HELP = "\n".join(
    [*(f"{f'{name} {command.argument}':20} {command.help}" for name, command in COMMANDS.items()), *KEYS.splitlines()]
)


def obey(chat: Chat, line: str) -> None:
    """Carry out a command. Raises BadRequest where there is none such, and Over."""
    name, argument = [*line.split(maxsplit=1), ""][:2]
    found = COMMANDS.get(SAME.get(name, name))
    if found is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        near = f"did you mean {close[0]}? " if close else ""
        raise BadRequest(f"no command {name}; {near}/help lists them, and // says a line that begins with /")
    argument = unquoted(argument) or argument.strip()
    if argument and not found.argument:
        raise BadRequest(f"{name} takes no argument; {_short(argument)!r} was given, so nothing was done")
    found.run(chat, argument)


def completions(line: str, settings: list[str]) -> list[tuple[str, str]]:
    """What the last word of `line` may become, and what each of these is. `settings`: names that /set takes."""
    name, space, argument = line.partition(" ")
    if not line.startswith("/") or "\n" in line:
        return []
    if not space:
        return [(each, command.help) for each, command in COMMANDS.items() if each.startswith(name)]
    if name == "/set" and " " not in argument:
        return [(each, "") for each in settings if each.startswith(argument.replace("_", "-"))]
    return _files(argument) if name in ("/save", "/load") else []


def _files(begun: str) -> list[tuple[str, str]]:
    folder, slash, start = begun.rpartition("/")
    try:
        there = sorted(expanded(folder + slash or ".").iterdir())
    except OSError:
        return []
    hidden = start.startswith(".")
    return [
        (folder + slash + path.name + "/" * path.is_dir(), "")
        for path in there
        if path.name.startswith(start) and (hidden or not path.name.startswith(".")) and _is_plain(path)
    ]


def _is_plain(path: Path) -> bool:
    """Whether a terminal can show its name, and one word is all of it."""
    return shown_in_line(path.name) == path.name and not any(c.isspace() for c in path.name)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
