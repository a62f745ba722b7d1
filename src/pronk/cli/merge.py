"""`pronk merge`: adapters and models made one set of weights, and a receipt for what rounding did to it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk import formats
from pronk.cli import console, options, origin, progress, saving
from pronk.cli.parameter_types import NAME, Number
from pronk.cli.verb import verb
from pronk.errors import ModelNotFound, PronkError
from pronk.system import human_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pronk.checkpoint.merging import Part
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.checkpoint.writers.write import Format


METHODS = ("linear", "ties", "dare-linear", "dare-ties", "slerp")  # merging.METHODS, which takes numpy
_ELSEWHERE = "measuring the result takes BASE in 16 bits at least; merge it on a larger machine"


@verb(
    epilog="""\b
Examples:
  pronk merge smollm2:135m mine smollm2-mine                          a folder, in f32
  pronk merge smollm2:135m mine smollm2-mine.gguf --dtype q8          a GGUF file
  pronk merge smollm2:135m mine smollm2-mine.gguf --dtype q4 --max-kld 0.05
  pronk merge smollm2:135m poet=0.7 lawyer=0.3 both                   0.7 of what one learned, 0.3 of the other
  pronk merge smollm2:135m poet lawyer both --method ties             the same, where they disagree
  pronk merge ./first ./second=0.4 ./between --method slerp           two models, 0.4 of the way from BASE

Each OTHER is a LoRA adapter of BASE (a folder, or a GGUF file), or a model that was trained from BASE. It
may be followed by =WEIGHT: how much of what it changes is counted (1 where none is given). The methods,
tensor by tensor and in f32:

\b
  linear       the weighted sum of the changes
  ties         of each change the largest numbers; at each place those that agree on the sign, averaged
  dare-linear  of each change numbers drawn by chance, grown to keep the mean; summed as by linear
  dare-ties    the same; those that agree on the sign are averaged
  slerp        along the arc from BASE to one other model; WEIGHT is how far (0.5 where none is given)

DST becomes a GGUF file if its name ends in .gguf, else a Hugging Face folder.

At the end pronk measures, on the text, how far DST's predictions lie from those of the same merge in
f32: the mean KL divergence, in nats, and how often both find the same token likeliest. Where that is over
a third of how far BASE itself lies from them, over a third of what was learned is lost: unless --accept-loss is
given, DST is not written, and the exit code is 3."""
)
@click.argument("base", type=NAME)
@click.argument("others", type=NAME, nargs=-1, required=True, metavar="OTHER[=WEIGHT]...")
@click.argument("dst", type=NAME)
@click.option(
    "--dtype",
    type=click.Choice(formats.names(engine="cpu")),
    default="f32",
    show_default=True,
    help="Store the weights in this format; folders cannot hold q8 and q4, GGUF files neither int8 nor llm-int8.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="linear",
    show_default=True,
    help="Merge by this rule.",
)
@click.option(
    "--density",
    type=Number(min=0, max=1),
    metavar="X",
    help="ties, dare-*: keep this share of each change.  [default: 0.2 with ties, 0.1 with dare-*]",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="dare-*: draw what is kept from this seed.  [default: 0]",
)
@click.option(
    "--max-kld",
    type=Number(min=0),
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
    others: tuple[str, ...],
    dst: str,
    dtype: Any,
    method: str,
    density: float | None,
    seed: int | None,
    max_kld: float | None,
    accept_loss: bool,
    file: str | None,
    tokenizer: str | None,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Merge LoRA adapters, or models, into one.

    It adds what each OTHER learned to BASE's weights, saves the result to DST, and measures what rounding
    changed.
    """
    from pronk import checkpoint
    from pronk.checkpoint import merging
    from pronk.checkpoint.writers import write
    from pronk.cli.measuring import read_text
    from pronk.engine.sampling import NotNumbers
    from pronk.system import expanded, replacing

    destination = expanded(dst)
    to: Format = "gguf" if destination.suffix.lower() == ".gguf" else "safetensors"
    if dtype not in write.DTYPES[to]:
        to_gguf = "; a DST whose name ends in .gguf takes it" if dtype in write.DTYPES["gguf"] else ""
        known = ", ".join(write.DTYPES[to])
        raise click.UsageError(f"{to} is not written in {dtype}; choose from {known}{to_gguf}")
    text, text_name = read_text(file)
    source = saving.open_source(base, tokenizer, revision)
    if seed is not None and not method.startswith("dare"):
        raise click.UsageError(f"--seed is for dare-linear and dare-ties; {method} draws nothing")
    parts = [_part(other, source, 0.5 if method == "slerp" else 1.0) for other in others]
    merged = merging.merged(source, parts, method, density, seed or 0)
    if merged.config.num_labels:
        raise PronkError(
            f"{' '.join(others)}: a reward model's adapter; what merging loses is measured by tokens, of which it "
            "predicts none: keep it beside BASE (pronk score BASE --adapter), or merge it with PEFT"
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
                    base=None if expanded(base).exists() else base,  # a path goes into no file that others may get
                )
            if made.is_dir():
                origin.write(made, base, list(others))
            try:
                receipt = saving.receipt(merged, "BASE and what is merged", made, text, _ELSEWHERE, source)
            except NotNumbers:
                raise PronkError(
                    f"{dst} is not written: what comes out predicts no numbers (NaN or infinity); take smaller weights "
                    "behind the =, or look at what is merged"
                ) from None
            receipt["bytes"] = receipt["bytes"]["after"]
            receipt |= {"base": base, "merged": [{"name": part.name, "weight": part.weight} for part in parts]}
            receipt |= {"method": method, "dst": dst, "dtype": dtype, "text": text_name}
            if method in merging.DENSITIES:
                receipt["density"] = merging.DENSITIES[method] if density is None else density
            if method.startswith("dare"):
                receipt["seed"] = seed or 0
            receipt["merged_into"] = _types(source)
            found = receipt["divergence"]["mean"]
            if max_kld is not None and not found <= max_kld:
                raise PronkError(
                    f"{dst} is not written: in {dtype} its predictions lie {found:.3g} nats from those of the merge in "
                    f"f32, and --max-kld allows {max_kld:g}; store more bits, or allow more"
                )
            alone = len(parts) == 1 and not isinstance(parts[0].of, checkpoint.Checkpoint)
            apart = "keep the adapter apart (--adapter)" if alone else None
            saving.check_loss(dst, dtype, receipt, text_name, accept_loss, apart=apart)
    except OSError as error:
        raise PronkError(f"{dst}: cannot be written: {error.strerror or error}") from None
    if problem := write.tokenizer_problem(source, to, vocabulary, files):
        console.note(f"the tokenizer is not written: {problem}")
    console.write_json(receipt) if as_json else console.write(_as_text(receipt) + "\n")


def _part(given: str, base: Checkpoint, usual: float) -> Part:
    """An adapter, or a model, with its weight. A name that holds a = is taken for one that is there first."""
    from pronk.checkpoint import adapter as adapters
    from pronk.checkpoint.merging import Part
    from pronk.system import expanded

    name, weight = given, usual
    head, equals, tail = given.rpartition("=")
    if equals and not expanded(given).exists():
        try:
            name, weight = head, float(tail)
        except ValueError:
            raise click.UsageError(f"{given}: {tail!r} is no weight; give a number behind the =") from None
        if not math.isfinite(weight):
            raise click.UsageError(f"{given}: a weight must be a number, not {tail}")
    path = expanded(name)
    if path.exists() and adapters.found(path):
        return Part(name, adapters.open(path, base), weight)
    try:
        return Part(name, saving.open_source(name, None, None), weight)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; nor is it an adapter, which has {adapters.CONFIG}") from None


def _types(source: Checkpoint) -> str:
    """What the weights are that an adapter is added to: an adapter fits best beside those it was trained beside."""
    if source.quantization:
        return source.quantization
    return Counter(tensor.dtype for tensor in source.tensors.values()).most_common(1)[0][0]


def _named(receipt: Mapping[str, Any]) -> str:
    """One adapter as it is applied; several, each with its weight."""
    merged = receipt["merged"]
    if len(merged) == 1 and merged[0]["weight"] == 1:
        return f"{merged[0]['name']} applied"
    return " and ".join(f"{part['weight']:g} of {part['name']}" for part in merged)


def _how(receipt: Mapping[str, Any]) -> str:
    """The method, but for the plain sum."""
    if receipt["method"] == "linear":
        return ""
    told = [f"by {receipt['method']}"]
    told += [f"{name} {receipt[name]:g}" for name in ("density", "seed") if name in receipt]
    return ", " + ", ".join(told)


def _as_text(receipt: Mapping[str, Any]) -> str:
    found = receipt["divergence"]
    error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.2g}"
    types = receipt["quantization"] or receipt["dtype"]
    return (
        f"{receipt['dst']}: {receipt['format']} ({types}), {human_size(receipt['bytes'])}; "
        f"merged into {receipt['base']} ({receipt['merged_into']}){_how(receipt)}\n"
        f"mean KL divergence from {receipt['base']} in {receipt['reference']} with {_named(receipt)}: "
        f"{found['mean']:.3g}{error}; "
        f"the likeliest token is the same in {found['top1']:.1%} of {found['rows']} predictions"
    ) + saving.of_what_was_learned(receipt)
