"""What the command line says: generated text on stdout, notes on stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence

import click

from pronk.strict_json import finite

# A terminal obeys control characters; a model must not give it orders. Shown as the signs that Unicode has for them.
_SHOWN = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
)


def write(text: str) -> None:
    """Text to stdout at once: as it is to a file or a pipe, without control characters to a terminal."""
    write_styled(shown(text) if sys.stdout.isatty() else text)


def write_styled(text: str) -> None:
    """The same of text that gives a terminal orders of ours, and has been through `shown` where it is not ours."""
    sys.stdout.write(text)
    sys.stdout.flush()


def shown(text: str) -> str:
    """With signs in the place of control characters."""
    return text.translate(_SHOWN)


def command() -> str:
    """As it was typed."""
    return shlex.join(["pronk", *sys.argv[1:]])


def write_json(value: object) -> None:
    """One line of JSON to stdout. What is no number there (NaN, infinity) becomes null, for JSON has no word for it."""
    sys.stdout.write(json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line to stderr, dimmed on a terminal that can."""
    click.echo(text if is_dumb() else click.style(text, dim=True), err=True)


def is_dumb() -> bool:
    """Whether the terminal, if it is one, takes text alone."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def table(rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their content, two spaces apart; those numbered in `right` are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def size(nbytes: float) -> str:
    """1.5 GB, 93.0 MB, 512 B; a kilobyte has 1000 bytes, as on disks."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
