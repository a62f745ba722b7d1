"""`pronk chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, progress
from pronk.cli.conversation import Conversation
from pronk.errors import BadRequest, ContextOverflow, PronkError, os_problem
from pronk.system import expanded

if TYPE_CHECKING:
    from pronk.engine.generation import Chunk
    from pronk.llm import LLM

HELP = """\
/system [TEXT]  set the system prompt; without TEXT, remove it
/reset          forget the conversation, keep the system prompt
/save FILE      save the conversation as JSON; pronk chat -f FILE continues it
/help           list these commands
/exit           end the chat, as Ctrl-D does
//TEXT          send /TEXT to the model
Ctrl-C stops an answer; the part already written stays in the conversation."""


@options.verb(
    epilog="""\b
Examples:
  pronk chat
  pronk chat -m owner/name --system "You answer in one sentence." --temp 0.7
  pronk chat -f conversation.json
  printf 'What is 2+2?\\nAnd times 3?\\n' | pronk chat

\b
In the conversation:
"""
    + "\n".join(f"  {line}" for line in HELP.splitlines())
)
@options.model_option
@options.together(
    click.option("--system", metavar="TEXT", help="Set the system prompt."),
    click.option("--chat-template", metavar="FILE|NAME",
                 help="Use this chat template, not the model's: a Jinja file, llama2 or llama3."),
    click.option("-f", "--file", type=options.NAME, metavar="FILE", help="Continue the conversation saved in FILE."),
    heading="Conversation",
)  # fmt: skip
@options.adapter_option
@options.loading_options
@options.sampling_options
@options.generation_options
def command(
    model: str,
    system: str | None,
    chat_template: str | None,
    file: str | None,
    no_cache: bool,
    truncate: str | None,
    **rest: Any,
) -> None:
    """Chat with a model in the terminal.

    On a terminal it offers line editing and history; from a pipe, each line of standard input is one turn.
    """
    from pronk.tokenizer import chat, renderer

    conversation = Conversation.read(Path(file)) if file else Conversation()
    if system is not None:
        conversation.system = system
    if chat_template is not None:
        chat.named(chat_template)  # before loading, which may take a while
    renderer.shared.start()  # beside loading
    llm, params = options.prepare(model, rest)
    # What would fail at the first turn fails now: no template, or one that refuses so plain a conversation.
    opening = Conversation(conversation.system, [{"role": "user", "content": "Hello"}])
    llm.chat_prompt(opening.messages, chat_template)
    how = {"params": params, "truncate": truncate, "cache": not no_cache, "chat_template": chat_template}
    Repl(llm, conversation, how).run()


class Repl:
    def __init__(self, llm: LLM, conversation: Conversation, how: dict[str, Any]) -> None:
        self.llm, self.conversation, self.how = llm, conversation, how
        self.interactive = sys.stdin.isatty()
        self.failed = False
        self.begun = False

    def run(self) -> None:
        """Until the end of input. Scripted turns go on after an error, and exit with 1 for it in the end."""
        if self.interactive:
            # From here on Ctrl-C stops an answer, however often it is pressed.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            console.note("/help lists the commands; Ctrl-D ends.")
        with _line_history() if self.interactive else nullcontext():
            while (line := self.read()) is not None:
                try:
                    if not self.obey(line):
                        break
                except BrokenPipeError:
                    raise
                except KeyboardInterrupt:
                    if not self.interactive:
                        raise
                    console.note("stopped")
                except ContextOverflow as error:
                    self.complain(
                        f"the conversation has {error.prompt_tokens} tokens and at most {error.limit} fit; "
                        "/reset starts anew, --ctx-size may make room, --truncate left forgets its beginning"
                    )
                except PronkError as error:
                    self.complain(" ".join(str(error).split()))
                except OSError as error:
                    self.complain(str(PronkError(os_problem(error))))
        if self.failed and not self.interactive:
            raise click.exceptions.Exit(1)

    def complain(self, problem: str) -> None:
        self.failed = True
        console.say(f"pronk: {problem}")

    def read(self) -> str | None:
        """The next line; None at the end. Ctrl-C at the prompt drops the line."""
        while self.interactive:
            try:
                return input("> ") if sys.stdout.isatty() else _ask("> ")
            except EOFError:
                console.say()
                return None
            except KeyboardInterrupt:
                console.say()
        raw = sys.stdin.buffer.readline()
        line = options.decode(raw, "standard input")
        if not self.begun:
            self.begun, line = True, line.removeprefix(options.BOM)
        return line if raw else None

    def obey(self, line: str) -> bool:
        """Carry out one line; False ends the conversation."""
        if line.startswith("//"):
            self.answer(line[1:])
        elif line.startswith("/"):
            name, _, argument = line.partition(" ")
            return self.carry_out(name.rstrip(), argument.strip())
        elif line.strip():
            self.answer(line)
        return True

    def carry_out(self, name: str, argument: str) -> bool:
        conversation = self.conversation
        if name == "/exit":
            return False
        if name == "/help":
            console.note(HELP)
        elif name == "/reset":
            conversation.turns.clear()
            console.note("conversation forgotten")
        elif name == "/system":
            conversation.system = argument or None
            console.note("system prompt set" if argument else "system prompt removed")
        elif name == "/save":
            if not argument:
                raise BadRequest("/save needs a file name")
            conversation.save(expanded(argument))
            console.note(f"saved to {argument}")
        else:
            raise BadRequest(f"no command {name}; /help lists them, and // says a line that begins with /")
        return True

    def answer(self, text: str) -> None:
        """Stream the answer. An interrupted one stays in the conversation; a question without any does not."""
        turns = self.conversation.turns
        turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        chunk: Chunk | None = None
        try:
            with progress.shown(unit=progress.of_tokens) as advance:
                for chunk in self.llm.stream_chat(self.conversation.messages, progress=advance, **self.how):
                    pieces.append(chunk.text)
                    console.write(chunk.text)
        finally:
            if chunk is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": "".join(pieces)})
                console.write("\n")
        if chunk and chunk.stats:
            rate = chunk.stats.decode_tok_s
            why = options.why_stopped(self.llm, [chunk])
            console.note(
                f"{chunk.stats.new_tokens} tokens"
                + ("" if rate is None else f" at {rate:.1f} tok/s")
                + (f"; {chunk.stats.cached_tokens} prompt tokens from the cache" if chunk.stats.cached_tokens else "")
                + f"; {options.describe(self.how['params'], chunk.seed)}"
                + (f"; {why}" if why else "")
            )


def _ask(prompt: str) -> str:
    """As input(), but with the prompt on stderr, for stdout is a file."""
    console.say(prompt, end="")
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def _line_history() -> Iterator[None]:
    """Line editing, and the lines of earlier conversations under the up arrow."""
    try:
        import readline
    except ImportError:  # Windows; its console edits lines by itself
        yield
        return
    path = _history()
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def _history() -> Path:
    """What people typed is no cache, to be thrown away: it is in the user's directory for state, or in PRONK_HOME."""
    if os.environ.get("PRONK_HOME"):
        from pronk.checkpoint.hub.local import home

        return home() / "chat_history"
    import platformdirs

    return platformdirs.user_state_path("pronk", appauthor=False) / "chat_history"
