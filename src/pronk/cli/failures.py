"""How pronk ends when it cannot do what it was asked: lines that begin with `pronk:`, and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from pronk.cli import console
from pronk.errors import NotEnoughMemory, PronkError

_NUMBERS = {"integer": "whole number", "float": "number"}  # click's types, in words of people


class Failure(click.ClickException):
    """Prints `pronk: …`, one line, and exits with 1."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))

    def show(self, file: Any = None) -> None:
        if not _said_elsewhere():
            console.say(f"pronk: {self.message}")


class Loss(Failure):
    """Nothing is wrong but the result, which is not worth having: the exit code is 3."""

    exit_code = 3


class Misuse(Failure):
    """Wrong usage: a second line names the help, and the exit code is 2."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        message = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            message = f"no such option {error.option_name}; did you mean {error.possibilities[0]}?"
        elif message.startswith("Got unexpected extra argument"):  # as the second word of a prompt is
            message += _instead(error.ctx)
        elif wrong := re.search(r" is not a valid (integer|float)( range)?\.?$", message):
            message = message[: wrong.start()] + f" is not a {_NUMBERS[wrong[1]]}"
        name = message.split(" ", 1)[0][1:]  # of LoRA or JSON, a capital of which is no sentence's beginning
        begins = message[:1].lower() if name.islower() or not name else message[:1]
        super().__init__(begins + message[1:].removesuffix("."))
        self.where = error.ctx.command_path if error.ctx else "pronk"

    def show(self, file: Any = None) -> None:
        super().show(file)
        if not _said_elsewhere():
            console.say(f"Try '{self.where} --help'.")


def _instead(context: click.Context | None) -> str:
    """What may have been meant by an argument too many."""
    params = context.command.params if context else []
    if any("-m" in param.opts for param in params) and not any(isinstance(param, click.Argument) for param in params):
        return "; -m MODEL names the model"
    return "; what has spaces goes in quotes"


def _said_elsewhere() -> bool:
    """Whether torchrun started processes that all fail alike, for they have not met yet, and this is not the first."""
    distributed = sys.modules.get("torch.distributed")
    met = distributed is not None and distributed.is_initialized()
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0" and not met


@contextmanager
def short_of_memory(way_out: str) -> Iterator[None]:
    """A way out that the verb has, where the engine's is an option of others."""
    try:
        yield
    except NotEnoughMemory as error:
        raise PronkError(f"{error.problem}; {way_out}") from error
