"""`pronk verify`: do all paths through the model give the same logits?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from pronk.cli import console, options, progress


@options.verb(
    epilog="""\b
Examples:
  pronk verify smollm2:135m
  pronk verify model.gguf --dtype bf16 --attn math
  pronk verify ./my-model -f chapter.txt --json

One text goes through the model cache-free, through the KV cache token by token, in chunks and in a
batch. "rounding" means that the logits differ by no more than the type's own noise; "bug" means more,
and exits with 1."""
)
@options.model_argument
@click.option(
    "-f",
    "--file",
    type=options.NAME,
    metavar="FILE",
    help="Text to verify with; - is standard input.  [default: a built-in one]",
)
@click.option("-n", "--max-tokens", type=click.IntRange(min=2), default=256, show_default=True, metavar="N",
              help="Take the first N tokens of the text.")  # fmt: skip
@options.loading_options
@options.json_option
def command(model: str, file: str | None, max_tokens: int, as_json: bool, **loading: Any) -> None:
    """Compare cached, cache-free, chunked and batched logits."""
    from pronk.measure.verify import verify

    text = None if file is None else options.read_file(file)
    llm = options.load_model(model, loading)
    with progress.shown(unit=progress.of_tokens) as advance:
        result = verify(llm, text, max_tokens, progress=advance)
    if as_json:
        console.write_json(result)
    else:
        console.write(_as_text(result) + "\n")
    if result["verdict"] == "bug":
        raise click.exceptions.Exit(1)


def _as_text(result: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [("path", "largest difference", "worst RMS", "greedy tokens differ", "verdict")]
    for path in result["paths"]:
        at = path["first_greedy_divergence"]
        rows.append(
            (
                path["path"],
                f"{path['max_abs_difference']:.3g}",
                f"{path['worst_rms_difference']:.3g}",
                "nowhere" if at is None else f"at token {at}",
                path["verdict"],
            )
        )
    promise = f"an RMS up to {result['allowed']:.3g} is this type's rounding"
    if result["exact"]:
        promise = "this engine promises equal bits"
    wrong, tokens, whole = result["last_token_only"], result["tokens"], result["text_tokens"]
    text = f"{tokens} tokens" if tokens == whole else f"the first {tokens} of {whole} tokens (see -n)"
    return "\n".join(
        [
            f"{result['model']}: {result['engine']} engine in {result['dtype']} on {result['device']}; "
            f"the logits of {text} against those of one cache-free pass",
            "",
            console.table(rows, right=(1, 2)),
            "",
            f"verdict: {result['verdict']} ({promise})",
            f"for comparison, without a cache and fed the last token only: {wrong['max_abs_difference']:.3g} off, "
            f"{wrong['same_greedy_token']:.0%} of the greedy tokens the same",
        ]
    )
