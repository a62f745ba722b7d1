"""`pronk convert`: a checkpoint in another format, and a receipt for what that did to its logits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, converted_adapter, options, progress
from pronk.cli.parameter_types import NAME
from pronk.cli.saving import open_source, save, tokenizer_for
from pronk.cli.verb import verb
from pronk.errors import PronkError
from pronk.formats import FLOATS, FORMATS, kept
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint

# What both models read for the receipt: prose, numbers, code, accents and an emoji.
TEXT = """In 1843 the mail coach from Bristol took 14 hours; by rail it took 4. "Progress," said Zoë, "is arriving
before one is ready." def area(r): return 3.14159 * r ** 2  # πr² 🚂
"""

_VERDICTS = {
    "rounding": "the same function, but for rounding",
    "different": "more than rounding in f32 (expected where DST stores fewer bits)",
}


@verb(
    epilog="""\b
Examples:
  pronk convert smollm2:135m smollm2-hf --to safetensors --dtype bf16
  pronk convert ./Llama-2-7b llama2-7b.gguf --dtype q8_0
  pronk convert old.gguf new.gguf                                 each tensor in the type it has
  pronk convert mine mine.gguf                                    a LoRA adapter, for llama.cpp's --lora
  pronk convert stories.bin stories-q.bin --to llama2c --version 2 --group-size 32
  pronk convert smollm2:135m twin --to safetensors --rotate 0     the same function with other weights

At the end pronk reads one text with SRC and with DST, both in f32, and prints the largest difference of
their logits. Where SRC is a LoRA adapter, the model that it belongs to reads the text with either.
To make a model smaller, take pronk quantize, which measures what that costs.

With --rotate, the norms' weights are folded into the matrices behind them, and the residual stream is
multiplied by a random orthogonal matrix drawn from SEED; lm_head is untied from the embeddings. Weights
that were already quantized then no longer fit the format exactly, so that what the format costs can be
measured. In f32 the logits differ by rounding alone: pronk compares their difference with the one that
an error of one ulp in every token embedding causes."""
)
@click.argument("src", type=NAME)
@click.argument("dst", type=NAME)
@click.option(
    "--to",
    type=click.Choice(["safetensors", "llama2c", "gguf"]),
    help="Write DST in this file format.  [default: gguf where DST ends in .gguf, llama2c where it ends in .bin; "
    "else required]",
)
@click.option(
    "--dtype",
    type=click.Choice([name for name, format in FORMATS.items() if format.files]),
    help="Store the weights in this data type; q8_0 is q8 rounded as llama.cpp rounds it.  [default: SRC's own, in "
    "GGUF tensor by tensor; f32 if the file format lacks it, or is not GGUF and SRC is quantized]",
)
@click.option(
    "--version",
    type=click.IntRange(0, 2),
    metavar="0|1|2",
    help="llama2c: write this version of the format; 2 is int8.  [default: 0, with --dtype int8 2]",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="llama2c version 2: share a scale among N weights.  [default: 64]",
)
@click.option(
    "--rotate",
    type=click.IntRange(min=0),
    metavar="SEED",
    help="Write an equivalent model with randomly rotated weights, for measuring quantization fairly.",
)
@click.option(
    "--base",
    type=NAME,
    metavar="MODEL",
    help="Where SRC is an adapter: the model that it belongs to.  [default: the one that the adapter names]",
)
@options.tokenizer_option
@options.revision_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.  [default: refuse to]")
@options.json_option
def command(
    src: str,
    dst: str,
    to: Any,
    dtype: Any,
    version: int | None,
    group_size: int | None,
    rotate: int | None,
    base: str | None,
    tokenizer: str | None,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another file format.

    It writes SRC to DST, and measures how far the logits differ. SRC is a model, or a LoRA adapter, which
    becomes a GGUF file.
    """
    from pronk.checkpoint import rotation
    from pronk.checkpoint.writers import write

    to = to or _format_of(dst)
    if converted_adapter.is_adapter(src):
        if to != "gguf" or version is not None or group_size is not None or rotate is not None:
            raise click.UsageError(f"{src} is an adapter, which becomes a GGUF file, with --dtype and --base alone")
        found = converted_adapter.convert(src, dst, base, dtype or "f32", tokenizer, revision, overwrite, TEXT)
        return console.write_json(found) if as_json else console.write(_as_text(found) + "\n")
    if base is not None:
        raise click.UsageError(f"--base is for an adapter, and {src} is none")
    if dtype and dtype not in write.DTYPES[to]:
        raise click.UsageError(f"{to} is not written in {dtype}; choose from {', '.join(write.DTYPES[to])}")
    if to != "llama2c" and version is not None:
        raise click.UsageError(f"--version {version} is llama2c's; {to} has one version only")
    in_groups = to == "llama2c" and (version == 2 or (version is None and dtype and FORMATS[dtype].codes is not None))
    if group_size is not None and not in_groups:
        raise click.UsageError("--group-size is for --to llama2c --version 2 only")
    checkpoint = open_source(src, tokenizer, revision)
    if rotate is not None:
        checkpoint = rotation.rotated(checkpoint, rotate)
    vocabulary, files = tokenizer_for(checkpoint, to)
    scaling = checkpoint.config.rope_scaling
    if to == "safetensors" and scaling and scaling.rope_type == "factors":
        console.note("its RoPE factors follow no rule that has a name: config.json will hold them as only pronk reads")
    beside = Path(dst).parent / "tokenizer.bin"
    alone = to == "llama2c" and not beside.exists()
    save(
        checkpoint,
        dst,
        to,
        vocabulary,
        files,
        dtype=dtype or _default_dtype(checkpoint, to, version),
        version=version,
        group_size=group_size or 64,
        overwrite=overwrite,
    )
    if alone and beside.exists():
        console.note(f"its tokenizer is beside it, in {beside}")
    try:
        receipt = _receipt(src, dst, tokenizer, revision, rotate)
    except PronkError as error:
        raise PronkError(f"{dst} is written and complete, but cannot be measured: {error}") from error
    except (KeyboardInterrupt, SystemExit):
        again = shlex.join(["pronk", "divergence", src, dst])
        console.note(f"\ninterrupted; {dst} is written and complete, but not compared with {src}; do it with: {again}")
        raise
    if as_json:
        console.write_json(receipt)
    else:
        console.write(_as_text(receipt) + "\n")


def _format_of(dst: str) -> Any:
    """The file format that a name tells."""
    if found := {".gguf": "gguf", ".bin": "llama2c"}.get(Path(dst).suffix.lower()):
        return found
    raise click.UsageError(f"--to is missing, and the name {dst} tells no file format (.gguf and .bin do)")


def _default_dtype(checkpoint: Checkpoint, to: Any, version: int | None) -> Any:
    """Nothing is lost, unless a version was asked for that has 8 bits only."""
    from pronk.checkpoint.writers.gguf_types import has
    from pronk.checkpoint.writers.write import DTYPES

    if to == "gguf":  # each tensor as it is, but for types that GGUF has not
        matrices = (tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
        return {tensor.name: "f32" for tensor in matrices if not has(tensor.dtype)}
    if to == "llama2c" and version == 2:
        return "int8"
    stored = {kept(tensor.dtype).name for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2}
    return stored.pop() if len(stored) == 1 and stored <= {*FLOATS} & {*DTYPES[to]} else "f32"


def _receipt(src: str, dst: str, tokenizer: str | None, revision: str | None, rotate: int | None) -> dict[str, Any]:
    import pronk
    from pronk.measure.verify import compare, same_function, sample_ids

    with progress.shown("reading SRC") as advance:
        before = pronk.load(src, tokenizer=tokenizer, revision=revision, quantize="f32", progress=advance)
    with progress.shown("reading DST") as advance:
        after = pronk.load(Path(dst), quantize="f32", progress=advance)
    ids = sample_ids(before, TEXT)[: before.ctx_size]
    return {
        "src": src,
        "dst": dst,
        "rotate": rotate,
        "format": after.checkpoint.format,
        "quantization": after.checkpoint.quantization,
        "bytes": sum(file.stat().st_size for file in after.checkpoint.files),
        **(compare if rotate is None else same_function)(before, after, ids),
    }


def _as_text(receipt: dict[str, Any]) -> str:
    at = receipt["first_greedy_divergence"]
    lines = [
        f"{receipt['dst']}: {receipt['format']}, {human_size(receipt['bytes'])}",
        f"largest logit difference {receipt['max_abs_difference']:.3g} over {receipt['tokens']} tokens; "
        f"greedy tokens differ {'nowhere' if at is None else f'from token {at} on'}",
    ]
    if receipt["rotate"] is not None:
        lines.append(
            f"RMS difference at the worst token {receipt['worst_rms_difference']:.3g}; an error of one ulp in every "
            f"token embedding causes {receipt['noise_floor']:.3g}, and rounding may cause {receipt['allowed']:.3g}: "
            f"{_VERDICTS[receipt['verdict']]}"
        )
    return "\n".join(lines)
