"""`pronk perplexity`: how well a model predicts a text, or several models the same text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, progress

if TYPE_CHECKING:
    from pronk.llm import LLM

WINDOW = 512  # tokens, as llama.cpp's
ONE_BATCH = "each window is one, whose tokens share scales; of another size it would have another result"


def text_options(windows: int) -> Callable[[options.F], options.F]:
    """What perplexity and divergence read. `windows`: how many of them by default, 0 for all."""
    return options.together(
        options.text_option,
        click.option("--ctx", type=click.IntRange(min=4), default=WINDOW, show_default=True, metavar="N",
                     help="Tokens of a window."),
        click.option("--windows", type=click.IntRange(min=0), default=windows, show_default=True, metavar="N",
                     help="Read N windows, spread over the text; 0: all of it."),
    )  # fmt: skip


per_window_option = click.option(
    "--per-window", type=options.NAME, metavar="FILE.csv", help="Write the figures of each window there, too."
)


def read_text(file: str | None) -> tuple[str, str]:
    """The text, and what to call it."""
    from pronk.measure.windows import evaluation_text

    if file is None:
        return evaluation_text(), "pronk's own text"
    return options.read_file(file), "standard input" if file == "-" else file


@options.verb(
    epilog="""\b
Examples:
  pronk perplexity smollm2:135m
  pronk perplexity model.gguf --text wiki.test.raw            llama.cpp's windows: its number
  pronk perplexity ./my-model --text chapter.txt --ctx 1024 --stride 512
  pronk perplexity smollm2:135m --quantize int8 --json
  pronk perplexity ./before ./after                           and how they differ, window by window

Without --stride, windows stand side by side and the second half of each counts, as in llama.cpp; with it,
each is N tokens further on and what is new in it counts, as in Hugging Face's guide. The two give
different numbers; compare within one. Several models read the text one after the other, and each is
compared with the first on the same windows, whose error is far smaller than that of either figure."""
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=options.NAME)
@text_options(windows=0)
@per_window_option
@click.option("--stride", type=click.IntRange(min=1), metavar="N", help="Tokens from one window to the next.")
@options.loading_options
@options.json_option
def command(
    models: tuple[str, ...],
    file: str | None,
    ctx: int,
    windows: int,
    stride: int | None,
    per_window: str | None,
    as_json: bool,
    **loading: Any,
) -> None:
    """Measure how well models predict a text."""
    from pronk.measure.machine import provenance
    from pronk.measure.perplexity import beside, perplexity

    check_folder(per_window)
    text, name = read_text(file)
    results: list[dict[str, Any]] = []
    read: list[int] = []
    for model in models:
        llm = options.load_model(model, dict(loading))
        ids = llm.tokenizer.encode(text)
        check_same_tokens(results[0]["model"] if results else llm.name, llm.name, read or ids, ids)
        read = ids
        with progress.shown(unit=progress.of_tokens) as advance:
            found = perplexity(llm, ids, ctx=ctx, stride=stride, count=windows or None, progress=advance)
        origin = {"provenance": provenance(llm.checkpoint, text, console.command(), llm)} if as_json else {}
        results.append({**described(llm), "text": name, "tokens": len(ids), **found, **origin})
        del llm  # before the next is loaded
    for result in results[1:]:
        result["beside_first"] = beside(results[0], result)
    if per_window:
        write_windows(per_window, [(one["model"], one["per_window"]) for one in results])
    if as_json:
        console.write_json({"models": results} if len(results) > 1 else results[0])
    else:
        console.write("\n\n".join(map(_as_text, results)) + "\n")


def check_folder(file: str | None) -> None:
    """Raises BadRequest where no table can be written there: nobody is to measure for minutes and learn that then."""
    from pronk.errors import BadRequest
    from pronk.system import expanded

    if file is not None and not file.endswith(".csv"):
        raise BadRequest(f"--per-window writes a table: name a file that ends in .csv, not {file}")
    if file is not None and not (folder := expanded(file).parent).is_dir():
        raise BadRequest(f"{folder}: there is no such folder to write {expanded(file).name} to")


def write_windows(file: str, tables: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """A line a window: whose figures they are, which window it is, and what `per_window` of a result has of it."""
    import csv
    import io

    from pronk.measure.report import write
    from pronk.system import expanded

    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(("of", "window", *tables[0][1]))
    for name, columns in tables:
        table.writerows((name, n, *values) for n, values in enumerate(zip(*columns.values(), strict=True), 1))
    write(expanded(file), lines.getvalue())


def described(llm: LLM) -> dict[str, Any]:
    backend = llm.backend
    return {"model": llm.name, "engine": backend.engine, "device": backend.device, "dtype": backend.dtype}


def check_same_tokens(one: str, other: str, ids: list[int], others: list[int]) -> None:
    """Raises BadRequest where two models do not cut a text alike."""
    from pronk.errors import BadRequest

    if ids != others:
        raise BadRequest(
            f"{one} and {other} cut the text into different tokens, so their predictions cannot be compared; "
            "where it is only the tokenizer's file that differs, name one for both with --tokenizer"
        )


def in_words(found: Mapping[str, Any]) -> str:
    """A change of perplexity, and whether it is more than chance."""
    from math import expm1

    error = found["standard_error"]
    by = f"{expm1(found['log_ratio']):+.2%}" + (f" ± {(1 + expm1(found['log_ratio'])) * error:.2%}" if error else "")
    said = {None: "of a single window, without an error", True: "more than chance",
            False: "less than this text can show"}  # fmt: skip
    return f"{by}, paired by windows: {said[found['clear']]}"


def _as_text(result: Mapping[str, Any]) -> str:
    error = result["standard_error"]
    value = f"{result['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")
    where = f"{result['engine']} engine in {result['dtype']} on {result['device']}"
    return "\n".join(
        [
            f"perplexity {value}",
            "",
            console.table(
                [
                    ("model", f"{result['model']}: {where}"),
                    ("text", f"{result['text']}, {result['tokens']} tokens"),
                    ("protocol", result["protocol"]),
                    *([("batch", ONE_BATCH)] if result["one_batch"] else []),
                    ("read", f"{result['windows']} windows, {result['rows']} predictions"),
                    ("error", "of a mean over windows" if error is not None else "unknown, of a single window"),
                    *([("beside the first", in_words(found))] if (found := result.get("beside_first")) else []),
                ]
            ),
        ]
    )
