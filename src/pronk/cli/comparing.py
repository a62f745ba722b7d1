"""What both comparisons have on the command line: their options, a bar that names the step, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pronk.cli import console, options, progress
from pronk.cli.parameter_types import NAME
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.measure.journal import Journal

out_option = click.option(
    "-o", "--out", type=NAME, default="report", show_default=True, metavar="FOLDER",
    help="Write the report to FOLDER.",
)  # fmt: skip
again_options = options.together(
    click.option("--resume", is_flag=True, help="Continue the report in FOLDER; nothing is measured twice."),
    click.option("--overwrite", is_flag=True, help="Replace the report in FOLDER."),
)


def folder(out: str, *, resume: bool, overwrite: bool) -> Path:
    from pronk.system import expanded

    if resume and overwrite:
        raise click.UsageError("--resume goes on with a report and --overwrite replaces it; choose one")
    return expanded(out)


@contextmanager
def shown(journal: Journal, about: Sequence[str], verb: str, out: str) -> Iterator[Callable[[str, int, int], None]]:
    """Say what is `about` to be measured, and hear of progress; where it ends early, say what goes on with it."""
    from pronk.measure.compare import warnings

    for line in [*about, *warnings()]:
        console.note(line)
    now = ""

    def amount(done: int, total: int) -> str:
        return f"{100 * done // total}%, {now}"

    with progress.shown("measuring", amount) as show:

        def advance(what: str, done: int, total: int) -> None:
            nonlocal now
            now = what
            show("", done, total)

        try:
            yield advance
        except (KeyboardInterrupt, PronkError) as error:
            show("", 1, 1)
            if journal.steps:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped by an error"
                again = shlex.join(["pronk", verb, "--resume", "--out", out])
                console.note(f"\n{why}; what is finished is in {journal.path}; go on with: {again}")
            raise


def tell(out: str, files: Sequence[str], found: object) -> None:
    """What was written, and `found`: tables, or the whole report."""
    console.note(f"written to {out}: {', '.join(files)}")
    console.write(f"{found}\n") if isinstance(found, str) else console.write_json(found)
