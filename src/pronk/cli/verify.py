"""`pronk verify`: do all paths through the model give the same logits?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from pronk.cli import console, options


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
    "-f", "--file", metavar="FILE", help="Text to verify with; - is standard input.  [default: a built-in one]"
)
@options.loading_options
@options.json_option
def command(model: str, file: str | None, as_json: bool, **loading: Any) -> None:
    """Compare cached, cache-free, chunked and batched logits."""
    from pronk.measure.verify import verify

    text = None if file is None else options.read_file(file)
    result = verify(options.load_model(model, loading), text)
    if as_json:
        console.write_json(result)
    else:
        console.write(_as_text(result) + "\n")
    if result["verdict"] == "bug":
        raise click.exceptions.Exit(1)


def _as_text(result: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [("path", "largest difference", "worst RMS", "greedy tokens part", "verdict")]
    for path in result["paths"]:
        at = path["first_greedy_divergence"]
        rows.append(
            (
                path["path"],
                f"{path['max_abs_difference']:.3g}",
                f"{path['worst_rms_difference']:.3g}",
                "never" if at is None else f"at token {at}",
                path["verdict"],
            )
        )
    wrong = result["last_token_only"]
    return "\n".join(
        [
            f"{result['model']}: {result['engine']} in {result['dtype']} on {result['device']}; "
            f"the logits of {result['tokens']} tokens against those of one cache-free pass",
            "",
            console.table(rows, right=(1, 2)),
            "",
            f"verdict: {result['verdict']} (an RMS up to {result['allowed']:.3g} is this type's rounding)",
            f"for comparison, without a cache and fed the last token only: {wrong['max_abs_difference']:.3g} off, "
            f"{wrong['same_greedy_token']:.0%} of the greedy tokens the same",
        ]
    )
