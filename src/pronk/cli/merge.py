"""`pronk merge`: an adapter made part of its model's weights, and a receipt for what rounding did to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk import formats
from pronk.cli import console, options, progress, saving
from pronk.errors import PronkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pronk.checkpoint.tensors import Checkpoint
    from pronk.checkpoint.writers.write import Format


_ELSEWHERE = "measuring the result takes BASE in 16 bits at least; merge it on a larger machine"


@options.verb(
    epilog="""\b
Examples:
  pronk merge smollm2:135m mine smollm2-mine                          a folder, in f32
  pronk merge smollm2:135m mine smollm2-mine.gguf --dtype q8          a GGUF file
  pronk merge smollm2:135m mine smollm2-mine.gguf --dtype q4 --max-kld 0.05

DST becomes a GGUF file if its name ends in .gguf, else a Hugging Face folder.

At the end pronk measures, on the text, how far DST's predictions lie from those of BASE with the adapter
applied in f32: the mean KL divergence, in nats, and how often both find the same token likeliest. Where
that is over a third of how far BASE itself lies from them, so much of what the adapter learned is lost:
DST is not written, and the exit code is 3 (--accept-loss)."""
)
@click.argument("base", type=options.NAME)
@click.argument("adapter", type=options.NAME)
@click.argument("dst", type=options.NAME)
@click.option(
    "--dtype",
    type=click.Choice(formats.names(engine="cpu")),
    default="f32",
    show_default=True,
    help="Store the weights in this format; folders cannot hold q8 and q4, GGUF files not int8.",
)
@click.option(
    "--max-kld",
    type=options.Number(min=0),
    metavar="X",
    help="Do not write DST if the mean KL divergence exceeds X nats.  [default: no limit]",
)
@saving.accept_loss_option
@options.text_option
@options.tokenizer_option
@options.revision_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.  [default: refuse to]")
@options.json_option
def command(
    base: str,
    adapter: str,
    dst: str,
    dtype: Any,
    max_kld: float | None,
    accept_loss: bool,
    file: str | None,
    tokenizer: str | None,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Merge a LoRA adapter into its base model.

    It adds the adapter to BASE's weights, saves the result to DST, and measures what rounding changed.
    """
    from pronk.checkpoint import adapter as adapters
    from pronk.checkpoint.writers import write
    from pronk.cli.measuring import read_text
    from pronk.system import expanded, replacing

    destination = expanded(dst)
    to: Format = "gguf" if destination.suffix.lower() == ".gguf" else "safetensors"
    if dtype not in write.DTYPES[to]:
        raise click.UsageError(f"{to} is not written in {dtype}; choose from {', '.join(write.DTYPES[to])}")
    text, text_name = read_text(file)
    source = saving.open_source(base, tokenizer, revision)
    merged = adapters.applied(source, adapters.open(expanded(adapter), source))
    if merged.config.num_labels:
        raise PronkError(
            f"{adapter}: a reward model's adapter; what is lost is measured of models that predict tokens alone: keep "
            "it beside BASE (pronk score BASE --adapter), or merge it with PEFT"
        )
    write.check_destination(source, destination, to, overwrite)
    vocabulary, files = saving.tokenizer_for(source, to)
    try:  # beside DST, which gets its name once the receipt is good
        with replacing(destination) as made:
            with progress.shown("writing") as advance:
                write.save(
                    merged,
                    made,
                    to=to,
                    dtype=dtype,
                    finite=True,
                    vocabulary=vocabulary,
                    tokenizer_files=files,
                    progress=advance,
                    known_as=Path(dst),
                )
            receipt = saving.receipt(merged, "BASE and ADAPTER", made, text, _ELSEWHERE, source)
            receipt["bytes"] = receipt["bytes"]["after"]
            receipt |= {"base": base, "adapter": adapter, "dst": dst, "dtype": dtype, "text": text_name}
            receipt["merged_into"] = _types(source)
            found = receipt["divergence"]["mean"]
            if max_kld is not None and not found <= max_kld:
                raise PronkError(
                    f"{dst} is not written: in {dtype} its predictions lie {found:.3g} nats from those of the adapter "
                    f"applied, and --max-kld allows {max_kld:g}; store more bits, or allow more"
                )
            saving.check_loss(dst, dtype, receipt, text_name, accept_loss, apart="keep the adapter apart (--adapter)")
    except OSError as error:
        raise PronkError(f"{dst}: cannot be written: {error.strerror or error}") from None
    if problem := write.tokenizer_problem(source, to, vocabulary, files):
        console.note(f"the tokenizer is not written: {problem}")
    console.write_json(receipt) if as_json else console.write(_as_text(receipt) + "\n")


def _types(source: Checkpoint) -> str:
    """What the weights are that an adapter is added to: an adapter fits best beside those it was trained beside."""
    if source.quantization:
        return source.quantization
    return Counter(tensor.dtype for tensor in source.tensors.values()).most_common(1)[0][0]


def _as_text(receipt: Mapping[str, Any]) -> str:
    found = receipt["divergence"]
    error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.2g}"
    types = receipt["quantization"] or receipt["dtype"]
    return (
        f"{receipt['dst']}: {receipt['format']} ({types}), {console.size(receipt['bytes'])}; "
        f"merged into {receipt['base']} ({receipt['merged_into']})\n"
        f"mean KL divergence from {receipt['base']} in {receipt['reference']} with {receipt['adapter']} applied: "
        f"{found['mean']:.3g}{error}; "
        f"the likeliest token is the same in {found['top1']:.1%} of {found['rows']} predictions"
    ) + saving.of_what_was_learned(receipt)
