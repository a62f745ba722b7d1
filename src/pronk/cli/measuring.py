"""What verbs that measure a text share: how it is read, what is said of models, and tables of its windows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pronk.cli import console, options, text_files
from pronk.cli.parameter_types import NAME
from pronk.errors import BadRequest, PronkError

ONE_BATCH = "each window is one, whose tokens share scales; of another size it would have another result"


def text_options(windows: int) -> Callable[[options.F], options.F]:
    """What perplexity and divergence read. `windows`: how many of them by default, 0 for all."""
    return options.together(
        options.text_option,
        click.option("-c", "--ctx", "--ctx-size", "ctx", type=click.IntRange(min=4), default=512, show_default=True,
                     metavar="N", help="Cut the text into windows of N tokens, each read by itself."),
        click.option("--windows", type=click.IntRange(min=0), default=windows, show_default=True, metavar="N",
                     help="Measure on N windows, spread evenly over the text; 0: all of them."),
    )  # fmt: skip


def written(suffix: str) -> Callable[[click.Context, click.Parameter, str | None], Path | None]:
    """The callback of an option that names a file to write: nobody is to measure for minutes and learn then that it
    cannot be."""

    def check(ctx: click.Context, param: click.Parameter, file: str | None) -> Path | None:
        from pronk.system import expanded

        if file is None:
            return None
        if not file.lower().endswith(suffix):
            raise click.BadParameter(f"name a file that ends in {suffix}, not {file}")
        if not (path := expanded(file)).parent.is_dir():
            raise BadRequest(f"{path.parent}: there is no such folder to write {path.name} to")
        return path

    return check


per_window_option = click.option(
    "--per-window", type=NAME, callback=written(".csv"), metavar="FILE.csv",
    help="Also write the figures of each window to this table.",
)  # fmt: skip


special_option = click.option(
    "--parse-special",
    is_flag=True,
    help="Read <s>, </s> and the like in the text as special tokens; by default they are plain text.",
)


def read_text(file: str | None) -> tuple[str, str]:
    """The text, whole, and what to call it."""
    from pronk.measure.windows import evaluation_text

    if file is None:
        return evaluation_text(), "pronk's own text"
    return text_files.read_file(file, whole=True), "standard input" if file == "-" else file


def write(path: Path, content: str) -> None:
    """Raises PronkError where it cannot be written."""
    from pronk.measure import report

    try:
        report.write(path, content)
    except OSError as error:
        raise PronkError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_windows(file: Path, tables: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """A line a window: whose figures they are, which window it is, and what `per_window` of a result has of it."""
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(("of", "window", *tables[0][1]))
    for name, columns in tables:
        table.writerows((name, n, *values) for n, values in enumerate(zip(*columns.values(), strict=True), 1))
    write(file, lines.getvalue())


def note_fewer(found: int) -> None:
    """Says where a text has fewer windows than somebody asked for."""
    ctx = click.get_current_context()
    asked = ctx.params["windows"]
    if found < asked and ctx.get_parameter_source("windows") is not ParameterSource.DEFAULT:
        console.note(f"--windows {asked}: the text has {found}, all of which are measured")


def check_same_tokens(one: str, ids: list[int], other: str, others: list[int]) -> None:
    """Raises BadRequest where two models do not cut a text alike."""
    if ids != others:
        raise BadRequest(
            f"{one} and {other} cut the text into different tokens, so their predictions cannot be compared; "
            "where it is only the tokenizer's file that differs, name one for both with --tokenizer"
        )


def in_words(found: Mapping[str, Any]) -> str:
    """A change of perplexity, and whether it is more than chance."""
    from pronk.measure.formatting import change

    said = {None: "its error is unknown, there is one window only", True: "more than chance",
            False: "may be chance on this text"}  # fmt: skip
    by = change(exp(found["log_ratio"]), found["standard_error"])
    return f"{by}, paired by windows: {said[found['clear']]}"


def ran(side: Mapping[str, Any]) -> str:
    """What ran, of pronk.measure.machine.described."""
    return f"{side['engine']} engine in {side['dtype']} on {side['device']}"
