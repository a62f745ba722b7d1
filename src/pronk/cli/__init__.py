"""The `pronk` program. Text goes to stdout, everything else to stderr.

Exit codes: 0; 1, an error of the input's, said in one line; 2, wrong usage, in two; 3, too much of what was
learned would be lost; 130, interrupted. Each verb is a
module of its own, imported when it is called, and imports what is heavy inside its function: `pronk --help` loads click
alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import click

from pronk import __version__
from pronk.cli import console, llama2c, typed
from pronk.cli.failures import Failure, Misuse
from pronk.errors import BadRequest, ContextOverflow, PronkError, os_problem, out_of_memory, short

# Heading of --help -> its verbs, in order.
GROUPS = {
    "Run": ("generate", "chat", "serve"),
    "Inspect and measure": (
        "inspect", "look", "score", "verify", "perplexity", "divergence", "outliers", "compare", "compare-training",
        "report",
    ),
    "Train": ("pretrain", "finetune", "dpo", "kto", "reward", "grpo"),
    "Files": ("merge", "convert", "quantize", "pull", "push", "list"),
}  # fmt: skip
# Verb -> its module in this package.
VERBS = {verb: {"list": "list_models"}.get(verb, verb.replace("-", "_")) for verbs in GROUPS.values() for verb in verbs}
DEFAULT_VERB = "generate"
# What people may type -> what it is here.
_MEANT = {"orpo": "dpo --loss orpo", "simpo": "dpo --loss simpo", "ipo": "dpo --loss ipo", "sft": "finetune"}


class Verbs(click.Group):
    """The verbs, loaded when called; and the one place where an exception becomes a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"pronk.cli.{VERBS[cmd_name]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        for heading, verbs in GROUPS.items():
            commands = {verb: self.get_command(ctx, verb) for verb in verbs}
            rows = [(verb.ljust(width), one.get_short_help_str(100)) for verb, one in commands.items() if one]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        called_for_help = not args  # which some versions of click raise
        try:
            if args and args[0] not in VERBS and llama2c.is_model(args[0]):
                args[:] = llama2c.translated(args)
            elif args and _is_prompt(args[0]):
                args.insert(0, DEFAULT_VERB)
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if called_for_help:
                raise
            raise Misuse(error) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            if name in _MEANT:
                raise click.UsageError(f"no verb {short(name)}; it is pronk {_MEANT[name]}", ctx)
            from difflib import get_close_matches

            close = get_close_matches(name, VERBS, n=1)
            raise click.UsageError(
                f"no verb {short(name)}; "
                + (f"did you mean {close[0]}?" if close else f"there are {', '.join(VERBS)}")
                + f" (a prompt goes in quotes; one of a single word: pronk {DEFAULT_VERB} PROMPT)",
                ctx,
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _interruptible():
                return super().invoke(ctx)
        except click.UsageError as error:
            raise Misuse(error) from None
        except BadRequest as error:
            said, verb = typed.in_words(ctx, str(error))
            raise (Misuse(click.UsageError(said, verb)) if verb else Failure(said)) from error
        except ContextOverflow as error:
            raise Failure(typed.overflow(ctx, error)) from error
        except PronkError as error:
            raise Failure(error) from error
        except BrokenPipeError:  # the reader of stdout has had enough, as in `| head`
            _abandon_stdout()
            raise click.exceptions.Exit(0) from None
        except OSError as error:  # a full disk, a directory without permission
            _abandon_stdout()
            raise Failure(PronkError(os_problem(error))) from error
        except (KeyboardInterrupt, MemoryError, RuntimeError, ImportError) as error:
            if _is_interrupt(error):
                console.say()
                raise click.exceptions.Exit(130) from None
            if not out_of_memory(error):
                raise
            raise Failure("out of memory; fewer bits (--quantize) or a smaller --ctx-size take less") from None


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C, or what was made of it: Python 3.11 makes a RuntimeError of what ends a field's __set_name__, and
    libraries in C an ImportError of what ends an import of theirs."""
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return True
    return isinstance(error, ImportError) and signal.getsignal(signal.SIGINT) is _end


def _is_prompt(argument: str) -> bool:
    """`pronk "Once upon a time"` generates: no verb has a space in it. A single word stays a (mistyped) verb."""
    return any(c.isspace() for c in argument)


def _abandon_stdout() -> None:
    """Let what is still buffered go nowhere, or Python complains once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="""\b
Examples:
  pronk "The capital of France is"
  pronk generate -n 50 --temperature 0.8 "Once upon a time"
  pronk chat
  pronk inspect model.gguf
  pronk convert model.gguf model-hf --to safetensors --dtype bf16

MODEL is a name (smollm2:135m; `pronk list` has the others), a Hugging Face repository (owner/name), a file or
a folder.""",
)
@click.version_option(__version__, package_name="pronk", message="%(prog)s %(version)s")
def group() -> None:
    """Run, measure and train LLaMA models from any checkpoint format.

    `pronk "A PROMPT OF SEVERAL WORDS"` is short for `pronk generate`. `pronk model.bin 0.8 256 "Once"`, in llama2.c's
    order or with its options, generates as llama2.c does. `pronk VERB --help` lists the options of a verb.
    """


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _terminate)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # which nohup has ignored
        signal.signal(signal.SIGHUP, _terminate)  # the terminal was closed
    if not sys.warnoptions:  # python -W and PYTHONWARNINGS still decide
        warnings.simplefilter("ignore")
    if sys.stdin is None:  # closed, as for daemons
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - as long as the program
    for name in ("stdout", "stderr"):  # closed ones too, as by `>&-`
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(encoding="utf-8", errors="backslashreplace")
    group(prog_name="pronk")


@contextmanager
def _interruptible() -> Iterator[None]:
    """In here Ctrl-C raises. Before and after, there is nothing to be cleared away, and it ends the program as a signal
    does: in silence, and not with the traceback of an import."""
    before = sys.unraisablehook
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as main left it; in a test it is the test's
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
    try:
        yield
    finally:
        sys.unraisablehook = before
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C raises, as always; the second one ends the program, for a library may have swallowed the first."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _unraisable(told: sys.UnraisableHookArgs) -> None:
    """Ctrl-C in the midst of what cannot fail, as a callback of importlib's, is lost there: it comes again."""
    if told.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(told)
        return
    signal.signal(signal.SIGINT, _interrupt)
    again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Whoever was writing a file takes away what is half written, as after Ctrl-C."""
    raise SystemExit(128 + number)
