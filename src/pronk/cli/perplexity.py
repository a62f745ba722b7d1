"""`pronk perplexity`: how well a model predicts a text, or several models the same text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pronk.cli import console, measuring, options, progress
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb


@verb(
    epilog="""\b
Examples:
  pronk perplexity smollm2:135m
  pronk perplexity model.gguf --text wiki.test.raw            by llama.cpp's protocol
  pronk perplexity ./my-model --text chapter.txt --ctx 1024 --stride 512
  pronk perplexity smollm2:135m --quantize int8 --json
  pronk perplexity ./before ./after                           and how they differ, window by window

Without --stride, the windows are disjoint and the second half of each is scored, as llama.cpp does. With
it, the windows overlap and the new tokens of each are scored, as in Hugging Face's guide. The two give
different numbers: compare only figures of the same kind. Several models are measured one after the
other, and each is compared with the first window by window: this paired difference has a much smaller
standard error than either perplexity."""
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=NAME)
@measuring.text_options(windows=0)
@measuring.per_window_option
@click.option("--stride", type=click.IntRange(min=1), metavar="N",
              help="Advance the window by N tokens each time (sliding windows).  "
              "[default: disjoint windows]")  # fmt: skip
@measuring.special_option
@options.window_loading_options
@options.json_option
def command(
    models: tuple[str, ...],
    file: str | None,
    ctx: int,
    windows: int,
    stride: int | None,
    per_window: Path | None,
    parse_special: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Measure the perplexity of models on a text.

    Perplexity says how surprised a model is by a text: lower is better.
    """
    from pronk.measure.machine import described, provenance
    from pronk.measure.perplexity import beside, perplexity

    text, name = measuring.read_text(file)
    results: list[dict[str, Any]] = []
    first: tuple[str, list[int]] | None = None
    for model in models:
        llm = options.load_model(model, dict(loading))
        ids = llm.tokenizer.encode(text, special=parse_special)
        first = first or (llm.name, ids)
        measuring.check_same_tokens(*first, llm.name, ids)
        with progress.shown(unit=progress.of_tokens) as advance:
            found = perplexity(llm, ids, ctx=ctx, stride=stride, count=windows or None, progress=advance)
        measuring.note_fewer(found["windows"])
        ran = llm.backend.conditions()
        origin = {"provenance": provenance(llm.checkpoint, text, console.command(), ran)} if as_json else {}
        results.append({**described(llm), "text": name, "tokens": len(ids), **found, **origin})
        del llm  # before the next is loaded
    for result in results[1:]:
        result["beside_first"] = beside(results[0], result)
    if per_window:
        measuring.write_windows(per_window, [(one["model"], one["per_window"]) for one in results])
    if as_json:
        console.write_json({"models": results} if len(results) > 1 else results[0])
    else:
        console.write("\n\n".join(map(_as_text, results)) + "\n")


def _as_text(result: Mapping[str, Any]) -> str:
    error = result["standard_error"]
    rows = [
        ("model", f"{result['model']}: {measuring.ran(result)}"),
        ("text", f"{result['text']}, {result['tokens']} tokens"),
        ("protocol", result["protocol"]),
        *([("batch", measuring.ONE_BATCH)] if result["one_batch"] else []),
        ("measured", f"{result['windows']} window{'s' * (result['windows'] != 1)}, {result['rows']} predictions"),
        ("error", "standard error over windows" if error is not None else "unknown: there is one window only"),
        *([("against the first", measuring.in_words(found))] if (found := result.get("beside_first")) else []),
    ]
    spread = "" if error is None else f" ± {error:.4f}"
    return f"perplexity {result['value']:.4f}{spread}\n\n{console.table(rows)}"
