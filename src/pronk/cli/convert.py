"""`pronk convert`: a checkpoint in another format, and a receipt for what that did to its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options

if TYPE_CHECKING:
    from pronk.llm import LLM

# What both models read for the receipt: prose, numbers, code, accents and an emoji.
TEXT = """In 1843 the mail coach from Bristol took 14 hours; by rail it took 4. "Progress," said Zoë, "is arriving
before one is ready." def area(r): return 3.14159 * r ** 2  # πr² 🚂
"""


@click.command(
    epilog="""\b
Examples:
  pronk convert smollm2:135m smollm2-hf --to safetensors --dtype bf16
  pronk convert ./Llama-2-7b llama2-7b.gguf --to gguf --dtype q8_0
  pronk convert stories.bin stories-q.bin --to llama2c --version 2 --group-size 32

The receipt: both models, in f32, read one text; the largest difference of their logits is printed."""
)
@click.argument("src")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["safetensors", "llama2c", "gguf"]), help="Format of DST.")
@click.option("--dtype", type=click.Choice(["f32", "bf16", "f16", "q8_0"]), help="Type to store.  [default: as in SRC]")
@click.option("--version", type=click.IntRange(0, 2), help="llama2c: version of the format.")
@click.option(
    "--group-size", type=click.IntRange(min=1), default=64, show_default=True, help="llama2c 2: weights a scale."
)
@options.tokenizer_option
@options.revision_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@options.json_option
def command(
    src: str,
    dst: Path,
    to: Any,
    dtype: str | None,
    version: int | None,
    group_size: int,
    tokenizer: Path | None,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write SRC to DST in another format; end with a receipt."""
    import pronk
    from pronk.checkpoint import write
    from pronk.measure.verify import compare

    with console.progress("loading") as advance:
        before = pronk.load(src, tokenizer=tokenizer, revision=revision, dtype="f32", progress=advance)
    vocabulary = before.tokenizer.vocabulary() if before.has_tokenizer else None
    with console.progress("writing") as advance:
        write.save(
            before.checkpoint,
            dst,
            to=to,
            dtype=dtype,
            version=version,
            group_size=group_size,
            vocabulary=vocabulary,
            overwrite=overwrite,
            progress=advance,
        )
    with console.progress("reading back") as advance:
        after = pronk.load(dst, dtype="f32", progress=advance)
    receipt = {
        "src": src,
        "dst": str(dst),
        "format": after.checkpoint.format,
        "quantization": after.checkpoint.quantization,
        "bytes": sum(file.stat().st_size for file in after.checkpoint.files),
        **compare(before, after, _token_ids(before)),
    }
    console.write((json.dumps(receipt, ensure_ascii=False) if as_json else _as_text(receipt)) + "\n")


def _token_ids(llm: LLM) -> list[int]:
    """TEXT, as far as it fits; for a model without a tokenizer, ids spread over its vocabulary."""
    if llm.has_tokenizer:
        return llm.tokenizer.encode(TEXT)[: llm.ctx_size]
    return [(7919 * n + 1) % llm.config.vocab_size for n in range(min(64, llm.ctx_size))]


def _as_text(receipt: dict[str, Any]) -> str:
    at = receipt["first_greedy_divergence"]
    return (
        f"{receipt['dst']}: {receipt['format']}, {console.size(receipt['bytes'])}\n"
        f"largest logit difference {receipt['max_abs_difference']:.3g}, mean {receipt['mean_abs_difference']:.3g}, "
        f"over {receipt['tokens']} tokens; greedy tokens part {'never' if at is None else f'at token {at}'}"
    )
