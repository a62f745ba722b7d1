"""`pronk chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pronk.cli import chat_editor, chat_history, console, options, progress, text_files, typed
from pronk.cli.chat_commands import HELP, Over, completions, obey
from pronk.cli.chat_sampling import ADVISED, OWN, Sampling, settable
from pronk.cli.conversation import Conversation, Message
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb
from pronk.errors import BadRequest, ContextOverflow, PronkError, os_problem
from pronk.terminal import shown

if TYPE_CHECKING:
    from pronk.engine.generation import Chunk
    from pronk.engine.params import SamplingParams
    from pronk.llm import LLM


@verb(
    epilog="""\b
Examples:
  pronk chat
  pronk chat -m owner/name --system "You answer in one sentence." --temp 0.2
  pronk chat -f conversation.json
  printf 'What is 2+2?\\nAnd times 3?\\n' | pronk chat --temp 0

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
    click.option("-f", "--file", type=NAME, metavar="FILE", help="Continue the conversation saved in FILE."),
    click.option("--overflow", type=click.Choice(["drop-oldest", "error"]), default="drop-oldest", show_default=True,
                 help="When the context is full, leave the oldest turns out (the system prompt stays), or refuse the "
                 "question."),
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
    overflow: str,
    no_cache: bool,
    truncate: str | None,
    **rest: Any,
) -> None:
    """Chat with a model in the terminal.

    On a terminal it offers line editing and history; from a pipe, each line of standard input is one turn. Answers are
    sampled with the settings of the model's generation_config.json.
    """
    from pronk.tokenizer import chat, renderer

    conversation = Conversation.read(Path(file)) if file else Conversation()
    if system is not None:
        conversation.system = system
    if chat_template is not None:
        chat.named(chat_template)  # before loading, which may take a while
    ctx, fields = click.get_current_context(), settable(command)
    named = {name: rest[name] for name in fields if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    try:
        sampling = Sampling(named, fields)
    except BadRequest as error:
        raise click.UsageError(typed.in_words(ctx, str(error))[0]) from None
    renderer.shared.start()  # beside loading
    llm = options.load_model(model, options.loading_of(rest))
    whose = sampling.advise(llm.checkpoint.generation)
    # What would fail at the first turn fails now: no template, or one that refuses so plain a conversation.
    opening = Conversation(conversation.system, [{"role": "user", "content": "Hello"}])
    llm.chat_prompt(opening.messages, chat_template)
    how = {"truncate": truncate, "cache": not no_cache, "chat_template": chat_template, "overflow": overflow}
    Chat(llm, conversation, sampling, how).run(whose)


def _show_whose_defaults(parameters: Iterable[click.Parameter]) -> None:
    """In --help, of what generation_config.json may say."""
    for option in parameters:
        if isinstance(option, click.Option) and option.name in ADVISED:
            own = f"{OWN.get(option.name, option.default):g}"
            option.help, option.show_default = f"{option.help}  [default: the model's, else {own}]", False


_show_whose_defaults(command.params)


class Chat:
    """Reads messages, carries out commands, streams answers. `how`: options of LLM.stream_chat."""

    def __init__(self, llm: LLM, conversation: Conversation, sampling: Sampling, how: dict[str, Any]) -> None:
        self.llm, self.conversation, self.sampling, self.how = llm, conversation, sampling, how
        self.editor: chat_editor.Editor | None = None
        self.failed = False
        self.begun = False
        self.told_full = False
        self.tries = 0  # of the last question, over again

    def run(self, whose: str) -> None:
        """Until the end of input. Scripted turns go on after an error, and exit with 1 for it in the end."""
        for asked in self.llm.checkpoint.generation.absent:
            console.note(f"generation_config.json asks for {asked}, which pronk does not have; answers are without it")
        if sys.stdin.isatty():
            # From here on Ctrl-C stops an answer, however often it is pressed.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._open_editor(whose)
        while (text := self.read()) is not None:
            try:
                self.take(text)
            except Over:
                break
            except BrokenPipeError:
                raise
            except KeyboardInterrupt:
                if not self.editor:
                    raise
                console.note("stopped")
            except ContextOverflow as error:
                self.complain(self._does_not_fit(error))
            except PronkError as error:
                self.complain(" ".join(str(error).split()))
            except OSError as error:
                self.complain(str(PronkError(os_problem(error))))
        if self.failed and not self.editor:
            raise click.exceptions.Exit(1)

    def _open_editor(self, whose: str) -> None:
        names = self.sampling.names()
        self.editor = chat_editor.best(chat_history.of_the_user(), lambda line: completions(line, names))
        console.note(f"sampling: {options.describe(self.sampling.params, None)} ({whose}); /set changes it")
        if not self.editor.pastes:
            console.note('lines pasted here are sent one by one; pip install "pronk[chat]" mends that, and so does """')
        if count := len(self.conversation.turns):
            console.note(f"going on from {self.conversation.path}: {count} message{'s' * (count > 1)}")
        console.note("/help lists the commands; Ctrl-D ends.")

    def complain(self, problem: str) -> None:
        self.failed = True
        console.say(f"pronk: {problem}")

    def _does_not_fit(self, error: ContextOverflow) -> str:
        if self.how["overflow"] == "error":
            return (
                f"the conversation has {error.prompt_tokens} tokens and at most {error.limit} fit; /reset starts anew, "
                "--ctx-size may make room, --overflow drop-oldest forgets its beginning"
            )
        with_system = " with the system prompt" if self.conversation.system else ""
        return (
            f"this question{with_system} has {error.prompt_tokens} tokens and at most {error.limit} fit; shorten it; "
            "--ctx-size may make room, --truncate left keeps its end"
        )

    def read(self) -> str | None:
        """The next message; None at the end. Ctrl-C at the prompt drops what was typed."""
        while self.editor:
            try:
                return self.editor.read()
            except EOFError:
                return None
            except KeyboardInterrupt:
                pass
        raw = sys.stdin.buffer.readline()
        line = text_files.decode(raw, "standard input")
        if not self.begun:
            self.begun, line = True, line.removeprefix(text_files.BOM)
        return line if raw else None

    def take(self, text: str) -> None:
        """Answer a message, or carry out a command. Raises Over."""
        quoted = chat_editor.unquoted(text) if self.editor else None
        if quoted is not None:
            text = quoted
        elif text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            obey(self, text)
            return
        if text.strip():
            self.answer(text, self.conversation.turns)

    def edited(self, text: str) -> str:
        """`text` as the user changes it; "" for not at all. Raises BadRequest where nobody can."""
        if not self.editor:
            raise BadRequest("/edit needs the new text: /edit TEXT")
        if shown(text) != text:
            raise BadRequest("the question holds characters that a terminal would obey; /edit TEXT replaces it")
        try:
            changed = self.editor.read(text)
        except (EOFError, KeyboardInterrupt):
            return ""
        return quoted if (quoted := chat_editor.unquoted(changed)) is not None else changed

    def go_on_from(self, conversation: Conversation) -> None:
        self.conversation, self.told_full = conversation, False

    def answer(self, text: str, before: list[Message], *, again: bool = False) -> None:
        """Stream the answer to `text`, asked after the messages `before`. An interrupted one stays in the conversation;
        where there is none, the conversation stays as it was. `again`: with another seed than it was drawn with.
        """
        self.tries = self.tries + 1 if again else 0
        params = self.sampling.params
        if again and not params.temperature:
            console.note(
                "answers are greedy: of the same question the same one comes; /set temperature 0.7 draws another"
            )
        elif again and params.seed is not None:
            params = replace(params, seed=params.seed + self.tries)
        turns = [*before, {"role": "user", "content": text}]
        messages = Conversation(self.conversation.system, turns).messages
        pieces: list[str] = []
        chunk: Chunk | None = None
        try:
            with progress.shown(unit=progress.of_tokens) as advance:
                for chunk in self.llm.stream_chat(messages, params=params, progress=advance, **self.how):
                    if not pieces and chunk.truncated_tokens:
                        self._tell_cut(chunk.truncated_tokens, bool(before))
                    pieces.append(chunk.text)
                    console.write(chunk.text)
        finally:
            if chunk is not None:
                self.conversation.turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
                console.write("\n")
        if chunk and chunk.stats:
            console.note(self._statistics(chunk, params))

    def _tell_cut(self, tokens: int, earlier: bool) -> None:
        """That turns are left out is said once: from then on it is so until the conversation is another."""
        if not earlier:
            console.note(f"{tokens} tokens of the question were cut")
        elif not self.told_full:
            self.told_full = True
            console.note(
                f"the context of {self.llm.ctx_size} tokens is full: from now on the oldest turns are left out, and "
                "the system prompt stays; /reset starts anew, --overflow error would refuse"
            )

    def _statistics(self, chunk: Chunk, params: SamplingParams) -> str:
        assert chunk.stats
        rate, cached = chunk.stats.decode_tok_s, chunk.stats.cached_tokens
        more = "/set max-new-tokens" if self.editor else "-n"
        why = options.why_stopped(self.llm, [chunk], more)
        return (
            f"{chunk.stats.new_tokens} tokens"
            + ("" if rate is None else f" at {rate:.1f} tok/s")
            + (f"; {cached} prompt tokens from the cache" if cached else "")
            + f"; {options.describe(params, chunk.seed)}"
            + (f"; {why}" if why else "")
        )

    def account(self) -> str:
        """What the conversation takes of the context."""
        from pronk.tokenizer.messages import longest_prompt

        system, ctx_size = self.conversation.system, self.llm.ctx_size
        if self.conversation.turns:
            used = len(self.llm.chat_prompt(self.conversation.messages, self.how["chat_template"]))
        else:
            used = len(self.llm.tokenizer.encode(system, bos=False)) if system else 0
        if self.how["overflow"] == "error":
            return f"{used} tokens; {max(0, ctx_size - 1 - used)} more fit in the context of {ctx_size}"
        limit = longest_prompt(ctx_size, self.sampling.params.max_new_tokens)
        beside = f"fit beside an answer of {ctx_size - limit} in the context of {ctx_size}"
        if used <= limit:
            return f"{used} tokens; {limit - used} more {beside}"
        return f"{used} tokens; {limit} {beside}, so the oldest turns are left out"
