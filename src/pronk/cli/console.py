"""What the command line says: generated text on stdout, notes on stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys

import click

from pronk.strict_json import finite
from pronk.terminal import shown, shown_in_line
from pronk.terminal import table as table

_CLEAR = "\x1b[K"  # from here to the end of the line


def write(text: str) -> None:
    """Text to stdout at once: as it is to a file or a pipe, to a terminal without what it would obey."""
    write_styled(shown(text) if sys.stdout.isatty() else text)


def write_styled(text: str) -> None:
    """The same of text that gives a terminal orders of ours, and has been through `shown` where it is not ours."""
    sys.stdout.write(text)
    sys.stdout.flush()


def command() -> str:
    """As it was typed."""
    return shlex.join(["pronk", *sys.argv[1:]])


def write_json(value: object) -> None:
    """One line of JSON to stdout. What is no number there (NaN, infinity) becomes null, for JSON has no word for it."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    if sys.stdout.isatty():  # the same JSON, with escapes for what a terminal would obey
        signs = zip(text, shown(text), strict=True)
        text = "".join(c if c == sign else json.dumps(c)[1:-1] for c, sign in signs)
    write_styled(text + "\n")


def note(text: str) -> None:
    """A line to stderr, dimmed on a terminal that can."""
    said = shown(text)
    click.echo(said if is_plain() else click.style(said, dim=True), err=True)


def say(text: str = "", end: str = "\n") -> None:
    """A plain line to stderr, whoever wrote it."""
    click.echo(shown(text) + end, nl=False, err=True)


def draw(line: str) -> None:
    """A line to stderr in the place of the one that stands there; "" takes it away."""
    click.echo(f"\r{shown_in_line(line)}{_CLEAR}", nl=False, err=True)


def is_dumb() -> bool:
    """Whether the terminal, if it is one, takes text alone."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def is_plain() -> bool:
    """Whether nothing is to be dimmed or coloured: the terminal cannot, or its user does not want it (no-color.org)."""
    return is_dumb() or bool(os.environ.get("NO_COLOR"))
