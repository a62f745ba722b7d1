"""`pronk quantize`: a checkpoint in fewer bits on disk, and a receipt for what that did to its predictions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk import calibrate as calibration
from pronk import formats
from pronk.cli import blocks, console, options, origin, progress, saving
from pronk.cli.failures import short_of_memory
from pronk.cli.measuring import read_text
from pronk.cli.parameter_types import NAME, Number
from pronk.cli.verb import verb
from pronk.errors import BadRequest, NoTokenizer, PronkError, os_problem
from pronk.formats import FORMATS, GROUP
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.checkpoint.writers.write import Format

# How each format of fewer bits is saved; None is either, as DST is named.
CONTAINERS: dict[str, Format | None] = {
    name: None if FORMATS[name].codes is None else "gguf" if "gguf" in FORMATS[name].files else "safetensors"
    for name in sorted(formats.names(engine="cpu"), key=lambda name: FORMATS[name].codes is None)
    if FORMATS[name].bits < 32
} | dict.fromkeys(calibration.NAMES, "gguf")
_SHORTEST = 16  # tokens
_COMPARE_ELSEWHERE = "compare the two on a larger machine, with pronk divergence"
_NO_BUDGET = "--max-kld compares with SRC in f32: choose a smaller model, or name a format, as --to q4"


@verb(
    epilog="""\b
Examples:
  pronk quantize smollm2:135m smollm2-int8 --to int8          a folder that transformers and vLLM read
  pronk quantize smollm2:135m smollm2-8bit --to llm-int8      a folder as bitsandbytes writes it
  pronk quantize ./Llama-2-7b llama2-7b-q4.gguf --to q4       a file that llama.cpp reads
  pronk quantize model-hf mixed.gguf --max-kld 0.002          as small as that budget allows
  pronk quantize mine/model mine-q4.gguf --to q4 --base smollm2:135m
  pronk quantize smollm2:135m small.gguf --to q4_0 --calibrate               on the text that comes with pronk
  pronk quantize smollm2:135m small.gguf --to q3_k --calibration-text my.txt  on yours
  pronk quantize smollm2:135m second.gguf --to q4_0 --rounding autoround      a second opinion; it takes torch
  pronk quantize smollm2:135m small.gguf --max-size 80MB --calibrate          as good as that size allows

int8 and llm-int8 are saved as folders (compressed-tensors' and bitsandbytes' layouts), q8, q4 and mixed
precision as GGUF files (Q8_0, Q4_1), for which DST must end in .gguf; bf16 and f16 as either, depending
on that ending. --max-kld measures what 8 and 4 bits cost in each part of the model, one after the other,
and gives each part as few bits as the budget allows. q8 loses least; for 4 bits, q4_k --calibrate loses least.

q4_0 and q2_k to q6_k are GGUF's block types. With --calibrate their codes and scales are chosen by what each
matrix is fed on a text, and its errors made up for along its rows (GPTQ). Part of that text the model writes
itself first (--self-written), for its own text is like what it was trained on. --rounding autoround learns in
steps instead which way each weight is rounded, and each group's range, by what comes out of a layer
(AutoRound): it needs torch and takes far longer. The embedding and lm_head are in Q6_K, and calibrated by
GPTQ alone. A matrix whose rows do not fill blocks of 256, as most of the default model's do not, is in
Q4_0, Q4_1, Q5_1 or Q8_0 instead; the embedding and lm_head in no less than Q4_1. At the end pronk also
prints what plain rounding would have cost, on a text that had no part in it. Blocks of SRC that are in the
type asked for are kept as they are.
--max-size measures on the same text what errors cost in each matrix, and chooses among these types,
IQ4_NL, IQ4_XS, Q4_1, Q5_0, Q5_1, Q8_0 and F16.

At the end pronk measures, on the text, how far DST's predictions lie from SRC's in f32 (in 16 bits where
f32 does not fit into memory): the mean KL divergence, in nats, and how often both find the same token
likeliest. BASE is what a merged or fully trained SRC was before: --base, or what SRC's folder says where
pronk made it. Where DST lies over a third as far from SRC as BASE does, over a third of what SRC learned
is lost. Unless --accept-loss is given, DST is then not written, and the exit code is 3."""
)
@click.argument("src", type=NAME)
@click.argument("dst", type=NAME)
@click.option(
    "--to",
    type=click.Choice(list(CONTAINERS), case_sensitive=False),
    help="Store the weights in this format.  [required, unless --max-kld or --max-size is given]",
)
@click.option(
    "--max-kld",
    type=Number(min=0, min_open=True),
    metavar="X",
    help="Choose 16, 8 or 4 bits for each part of the model, within a budget of X nats of mean KL divergence from f32; "
    "replaces --to.",
)
@click.option(
    "--max-size",
    type=blocks.Size(),
    metavar="SIZE",
    help="Choose a block type for each matrix, so that the file takes SIZE at most (80MB, 1.5GB, a number of bytes, or "
    "4.5bpw: bits a weight) and answers as nearly as it can as SRC does; replaces --to.",
)
@click.option(
    "--int8-threshold",
    type=Number(min=0, min_open=True, infinite=True),
    metavar="X",
    help="llm-int8: record in DST that activations whose magnitude is above X are computed in f32.  "
    "[default: 6.0, or SRC's own]",
)
@click.option(
    "--base",
    type=NAME,
    metavar="MODEL",
    help="Measure how much is lost of what SRC learned since it was MODEL.  [default: what pronk merge or a run of "
    "pronk's made SRC of, as its folder says; else not measured]",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Choose codes and scales by what each matrix is fed on a text (GPTQ); for q4_0 and q2_k to q6_k. The default "
    "model takes about half a minute more.  [default: rounding to nearest]",
)
@click.option(
    "--calibration-text",
    type=NAME,
    metavar="FILE",
    help="Implies --calibrate: use the text in FILE ('-': standard input).  [default: the text that comes with pronk]",
)
@click.option(
    "--self-written",
    type=click.IntRange(min=0, max=calibration.MOST),
    metavar="N",
    help="Implies --calibrate: use N tokens as well that the model writes first; writing them takes its time.  "
    f"[default: {calibration.WRITTEN} beside the text that comes with pronk, 0 beside FILE]",
)
@click.option(
    "--rounding",
    type=click.Choice(calibration.ROUNDINGS),
    help="Implies --calibrate: round in this way.  [default: gptq]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"autoround: learn the rounding of each layer in N steps.  [default: {calibration.STEPS}]",
)
@saving.accept_loss_option
@options.text_option
@options.tokenizer_option
@options.revision_option
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.  [default: refuse to]")
@options.json_option
def command(
    src: str,
    dst: str,
    to: str | None,
    max_kld: float | None,
    max_size: blocks.Limit | None,
    int8_threshold: float | None,
    base: str | None,
    calibrate: bool,
    calibration_text: str | None,
    self_written: int | None,
    rounding: str | None,
    steps: int | None,
    accept_loss: bool,
    file: str | None,
    tokenizer: str | None,
    revision: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantize a checkpoint to fewer bits, and save it.

    It writes SRC to DST, and measures how far the predictions differ.
    """
    from pronk.calibrate.calibrated import rounded, to_round, types
    from pronk.calibrate.grids import RULES
    from pronk.calibrate.sized import least
    from pronk.checkpoint.writers import write
    from pronk.system import check_disk, expanded, replacing

    if sum(option is not None for option in (to, max_kld, max_size)) != 1:
        raise click.UsageError("give one of --to, --max-kld and --max-size")
    in_blocks = to in calibration.NAMES or max_size is not None
    calibrate = calibrate or any(option is not None for option in (calibration_text, self_written, rounding))
    if calibrate and not in_blocks:
        raise click.UsageError(f"--calibrate is for --to {', '.join(calibration.NAMES)} and for --max-size")
    steps = blocks.steps(rounding, steps, max_size is not None)
    if int8_threshold is not None and not (to in FORMATS and FORMATS[to].outliers):
        raise click.UsageError("--int8-threshold is for --to llm-int8 only")
    container = _container(dst, to)
    known = base or origin.base_of(src)
    if accept_loss and known is None:
        raise click.UsageError("--accept-loss is for --base, without which no loss is measured")
    if calibration_text is not None and calibration_text == file:
        raise BadRequest(blocks.ONE_TEXT)
    blocks.check_kernels()
    text, text_name = read_text(file)
    checkpoint = saving.open_source(src, tokenizer, revision)
    untouched = _untouched(src, checkpoint, known, named=base is not None) if known else None
    base = known if untouched else None
    write.check_destination(checkpoint, Path(dst), container, overwrite)
    vocabulary, files = saving.tokenizer_for(checkpoint, container)
    if container == "gguf":
        write.check_gguf(checkpoint, vocabulary)
    if base and Path(base).exists() and Path(dst).exists() and Path(dst).samefile(base):
        raise BadRequest(f"{dst} is --base, which what is saved is measured against; give DST another name")
    loading = {"tokenizer": tokenizer, "revision": revision}
    ids = _encoded(src, checkpoint, text, text_name)
    choice = None if max_kld is None else _choose(src, ids, max_kld, loading)
    receipt: dict[str, Any] = {"src": src, "dst": dst, "base": base, "calibration": None}
    how: dict[str, Any] = {
        "dtype": choice["formats"] if choice else to,
        "int8_threshold": int8_threshold,
        "finite": True,
    }
    made, plain, kinds = checkpoint, None, dict[str, str]()
    if in_blocks:
        how["dtype"] = {}  # as they are
        fed = None
        if max_size:
            blocks.check_size(max_size, src, checkpoint, vocabulary)
        smallest = least(checkpoint) if max_size else types(checkpoint, to or "")
        check_disk(expanded(dst), write.gguf_size(rounded(checkpoint, smallest), vocabulary))
        if calibrate and not max_size and not to_round(checkpoint, smallest):
            console.note("no matrix is rounded, and nothing calibrated: each is in its type already, or fits no blocks")
            calibrate = False
        if calibrate or max_size:
            fed = blocks.fed(src, checkpoint, calibration_text, text, self_written if calibrate else 0)
        if max_size and fed:
            choice = blocks.within(max_size, src, checkpoint, vocabulary, fed.called, fed.ids, calibrate)
            check_disk(expanded(dst), write.gguf_size(rounded(checkpoint, choice["kinds"]), vocabulary))
        kinds = choice["kinds"] if choice else smallest
        made, plain, receipt["calibration"] = blocks.made(checkpoint, kinds, fed if calibrate else None, steps)
    try:
        if untouched:  # beside DST, which gets its name once enough of what was learned is in it
            with replacing(expanded(dst)) as partial:
                saving.save(made, partial, container, vocabulary, files, known_as=Path(dst), **how)
                receipt |= saving.receipt(checkpoint, "SRC", partial, ids, _COMPARE_ELSEWHERE, untouched, plain)
                saving.check_loss(dst, to or "mixed precision", receipt, text_name, accept_loss)
        else:
            saving.save(made, dst, container, vocabulary, files, overwrite=overwrite, **how)
    except OSError as error:
        raise PronkError(f"{dst}: cannot be written: {os_problem(error)}") from None
    try:
        if not untouched:
            receipt |= saving.receipt(checkpoint, "SRC", Path(dst), ids, _COMPARE_ELSEWHERE, plain=plain)
    except PronkError as error:
        raise PronkError(f"{dst} is written and complete, but cannot be measured: {error}") from error
    except KeyboardInterrupt:
        again = shlex.join(["pronk", "divergence", src, dst])
        console.note(f"\ninterrupted; {dst} is written and complete, but not measured; measure it with: {again}")
        raise
    size = receipt["bytes"]
    if checkpoint.quantization and size["after"] > 0.99 * size["before"]:
        little = "no" if size["after"] >= size["before"] else "hardly"
        console.note(f"{dst} is {little} smaller than {src}, which is quantized already ({checkpoint.quantization})")
    if plain and (found := receipt["divergence"]["mean"]) > receipt["plain"]["mean"]:
        console.note(
            f"{dst} answers worse than with plain rounding (mean KL divergence {found:.3g} against "
            f"{receipt['plain']['mean']:.3g} nats on {text_name}): calibrate on a text more like it, or "
            "leave out --calibrate"
        )
    if to in calibration.NAMES:
        asked = calibration.NAMES[to]
        blocks.tell_of_short_rows(checkpoint, RULES[asked].block, f"{asked} has", kinds)
    elif container == "gguf" and not (to in FORMATS and FORMATS[to].codes is None):
        blocks.tell_of_short_rows(checkpoint, GROUP, "8 and 4 bits have", {})
    receipt |= {"to": to, "text": None if ids is None else text_name, "choice": choice}
    if as_json:
        from pronk.measure.machine import provenance

        read = None if ids is None else text
        found = provenance(checkpoint, read, console.command(), receipt.pop("ran"))
        console.write_json(receipt | {"provenance": found})
    else:
        console.write(_as_text(receipt) + "\n")


def _untouched(src: str, checkpoint: Checkpoint, base: str, *, named: bool) -> Checkpoint | None:
    """What SRC was made of; None, and a line that says so, where its folder names something that is not to be had.
    `named`: by the user, who is refused instead."""
    if checkpoint.config.num_labels and not named:  # what is measured is predictions
        return None
    if not (named or origin.is_here(base)):
        problem = "which is not here"
    else:
        found = saving.open_source(base, None, None)
        if found.config.vocab_size == checkpoint.config.vocab_size:
            return found
        if named:
            raise BadRequest(f"--base {base} is no model that {src} was made of: it has another vocabulary")
        problem = "which has another vocabulary"
    console.note(f"{src} was made of {base}, {problem}: what is lost of what it learned is not measured (--base MODEL)")
    return None


def _container(dst: str, to: str | None) -> Format:
    """The kind of file that holds it. Wrong usage where DST's name says another."""
    named = "gguf" if Path(dst).suffix.lower() == ".gguf" else "safetensors"
    container: Format = (CONTAINERS[to] if to else "gguf") or named  # type: ignore[assignment]
    if container == named:
        return container
    kind, end = ("GGUF file", "ends") if container == "gguf" else ("folder", "does not end")
    what = f"{to or 'mixed precision'} is saved as a {kind}"
    raise click.UsageError(f"{what}: give DST a name that {end} in .gguf, not {dst!r}")


def _choose(src: str, ids: list[int] | None, max_kld: float, loading: Mapping[str, Any]) -> dict[str, Any]:
    """What pronk.measure.mixed chooses; see its Choice."""
    from pronk.measure.mixed import choose

    if ids is None:
        raise NoTokenizer(
            f"{src} carries no tokenizer, so there is no text to measure on; name one with --tokenizer FILE"
        )
    with progress.shown(unit=lambda done, total: f"{done} of {total}") as advance, short_of_memory(_NO_BUDGET):
        return asdict(choose(src, max_kld=max_kld, ids=ids, progress=advance, loading=loading))


def _encoded(src: str, checkpoint: Checkpoint, text: str, text_name: str) -> list[int] | None:
    """None where there is no tokenizer: a receipt can do without a text. Raises BadRequest for another model's."""
    from pronk.loading import tokenizer_of

    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None:
        return None
    ids = tokenizer.encode(text)
    if len(ids) < _SHORTEST:
        raise BadRequest(f"{text_name} has {len(ids)} tokens, too few to measure {src} on; give {_SHORTEST} or more")
    return ids


def _as_text(receipt: Mapping[str, Any]) -> str:
    found, size = receipt["divergence"], receipt["bytes"]
    error = found["standard_error"]
    types = f" ({receipt['quantization']})" if receipt["quantization"] else ""
    lines = [
        f"{receipt['dst']}: {receipt['format']}{types}, {human_size(size['after'])}; "
        f"{receipt['src']} has {human_size(size['before'])}",
        f"mean KL divergence from {receipt['src']} in {receipt['reference']}: {found['mean']:.3g}"
        + ("" if error is None else f" ± {error:.2g}")
        + f"; the likeliest token is the same in {found['top1']:.1%} of {found['rows']} predictions",
    ]
    if plain := receipt["plain"]:
        used = receipt["calibration"]
        part = f"{used['read']} of {used['tokens']}" if used["read"] < used["tokens"] else f"{used['tokens']}"
        how = "" if used["steps"] is None else f" by {used['rounding']}, {used['steps']} steps a layer,"
        read = f"on {used['text']} ({part} tokens)"
        if used["written"]:
            read += f" and {used['written']} tokens that the model wrote itself"
        lines.append(
            f"plain rounding: {plain['mean']:.3g}; the same token in {plain['top1']:.1%}. Calibrated{how} {read}; "
            f"measured on {receipt['text']}, another one"
        )
    lines[-1] += saving.of_what_was_learned(receipt)
    if choice := receipt["choice"]:
        lines[:0] = _why(choice) if "max_kld" in choice else blocks.why(choice)
    return "\n".join(lines)


def _why(choice: Mapping[str, Any]) -> list[str]:
    """The parts, what each is made and what it would have cost; what the whole costs."""
    from pronk.measure.mixed import SMALLER

    rows = [("part", "format", *(f"{FORMATS[bits].bits} bits" for bits in SMALLER))]
    for part in choice["parts"]:
        harms = (f"{part['harms'][bits]:.2g}" if bits in part["harms"] else "" for bits in SMALLER)
        rows.append((part["part"], part["format"], *harms))
    return [
        "mean KL divergence from f32, in nats, of each part in 8 and in 4 bits:",
        console.table(rows, right=tuple(range(2, len(rows[0])))),
        f"all together: {choice['measured_kld']:.2g} ± {choice['standard_error']:.1g} on windows that had no part in "
        f"the choice; the budget is {choice['max_kld']:.2g}, and 16 bits alone cost {choice['floor_kld']:.2g}",
        "",
    ]
