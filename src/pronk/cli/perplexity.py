"""`pronk perplexity`: how well a model predicts a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from pronk.cli import console, options, progress

WINDOW = 512  # tokens, as llama.cpp's


def text_options(windows: int) -> Callable[[options.F], options.F]:
    """What perplexity and divergence read. `windows`: how many of them by default, 0 for all."""
    return options.together(
        options.text_option,
        click.option("--ctx", type=click.IntRange(min=4), default=WINDOW, show_default=True, metavar="N",
                     help="Tokens of a window."),
        click.option("--windows", type=click.IntRange(min=0), default=windows, show_default=True, metavar="N",
                     help="Read N windows, spread over the text; 0: all of it."),
    )  # fmt: skip


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

Without --stride, windows stand side by side and the second half of each counts, as in llama.cpp; with it,
each is N tokens further on and what is new in it counts, as in Hugging Face's guide. The two give
different numbers; compare within one."""
)
@options.model_argument
@text_options(windows=0)
@click.option("--stride", type=click.IntRange(min=1), metavar="N", help="Tokens from one window to the next.")
@options.loading_options
@options.json_option
def command(
    model: str, file: str | None, ctx: int, windows: int, stride: int | None, as_json: bool, **loading: Any
) -> None:
    """Measure how well a model predicts a text."""
    from pronk.measure.perplexity import perplexity

    text, name = read_text(file)
    llm = options.load_model(model, loading)
    ids = llm.tokenizer.encode(text)
    with progress.shown(unit=progress.of_tokens) as advance:
        found = perplexity(llm, ids, ctx=ctx, stride=stride, count=windows or None, progress=advance)
    backend = llm.backend
    result = {
        "model": llm.name,
        "engine": backend.engine,
        "device": backend.device,
        "dtype": backend.dtype,
        "text": name,
        "tokens": len(ids),
        **found,
    }
    if as_json:
        console.write_json(result)
    else:
        console.write(_as_text(result) + "\n")


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
                    ("read", f"{result['windows']} windows, {result['rows']} predictions"),
                    ("error", "of a mean over windows" if error is not None else "unknown, of a single window"),
                ]
            ),
        ]
    )
