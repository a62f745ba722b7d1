"""`pronk outliers`: which activations are over a threshold, and what LLM.int8() costs at one after another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, measuring, options, progress
from pronk.cli.failures import short_of_memory
from pronk.cli.parameter_types import NAME, THRESHOLD, several
from pronk.cli.verb import verb
from pronk.formats import FLOATS
from pronk.measure.formatting import digits, error, percent

if TYPE_CHECKING:
    from pronk.drawing.svg import Drawing
    from pronk.llm import LLM

_LESS = "choose a smaller model, or keep its weights in fewer bits (--quantize bf16, or auto)"
_THRESHOLDS = "0,1,2,3,4,6,8,12,inf"
INPUTS = ("qkv", "o", "gate_up", "down")

Found = tuple[dict[str, Any], "Drawing"]  # what was found, in words and in a picture


def _threshold(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise click.BadParameter(f"{text!r}: a threshold is a number from 0 on, or inf")
    return number


@verb(
    epilog="""\b
Examples:
  pronk outliers smollm2:135m
  pronk outliers ./my-model --text chapter.txt --threshold 4 --plot outliers.svg
  pronk outliers smollm2:135m --sweep --plot sweep.svg        speed and quality over thresholds
  pronk outliers smollm2:135m --sweep=0,4,6,inf --json

An outlier is an activation whose magnitude is above the threshold: LLM.int8() (arXiv 2208.07339) computes
it in f32. An outlier feature, in the paper's words, is a dimension of the hidden state with outliers in at
least 25% of the layers and at 6% of all positions."""
)
@options.model_argument
@measuring.text_options(windows=8)
@options.together(
    click.option("--threshold", type=THRESHOLD, metavar="X",
                 help="Count activations whose magnitude is above X.  [default: 6.0]"),
    click.option("--sweep", is_flag=False, flag_value=_THRESHOLDS, metavar="[X,Y,…]",
                 callback=several(_threshold, "thresholds", "--sweep=0,3,6,inf"),
                 help="Measure llm-int8's KL divergence from f32, top-1 agreement and speed at each threshold instead. "
                 f"A list goes behind =, as in --sweep=0,4,6.  [without a list: {_THRESHOLDS}]"),
    click.option("--rounds", type=click.IntRange(min=1), metavar="N",
                 help="--sweep: time each threshold N times, and report the median.  [default: 3]"),
    click.option("--plot", type=NAME, callback=measuring.written(".svg"), metavar="FILE",
                 help="Draw a heat map (layers by columns), or the sweep, to this .svg file."),
    click.option("--input", "fed", type=click.Choice(["hidden", *INPUTS]),
                 help="--plot: draw this input of each layer; hidden: the hidden state before qkv and gate_up.  "
                 "[default: hidden]"),
    click.option("--quantize", type=click.Choice([*FLOATS, "auto"]),
                 help="Convert the weights to this format; auto keeps the file's formats.  [default: f32]"),
)  # fmt: skip
@options.together(
    options.tokenizer_option, options.revision_option, options.engine_option, options.device_option,
    options.threads_option, heading=options.LOADED,
)  # fmt: skip
@options.json_option
def command(
    model: str,
    file: str | None,
    ctx: int,
    windows: int,
    threshold: float | None,
    sweep: tuple[float, ...] | None,
    rounds: int | None,
    plot: Path | None,
    fed: str | None,
    quantize: str | None,
    as_json: bool,
    **loading: Any,
) -> None:
    """Find activation outliers, or sweep LLM.int8's threshold."""
    from pronk import engines
    from pronk.measure import comparison

    if sweep is not None:
        for option, value in (("--threshold", threshold), ("--quantize", quantize), ("--input", fed)):
            if value is not None:
                raise click.UsageError(f"{option} has no part in --sweep; leave it out")
    elif rounds is not None:
        raise click.UsageError("--rounds is for --sweep")
    elif fed is not None and plot is None:
        raise click.UsageError("--input is for --plot")
    text, name = measuring.read_text(file)
    # A sweep loads the model many times, on one engine.
    loading["engine"] = engines.choose(loading["engine"], dict.fromkeys(options.LOADING) | loading)
    cut = {"ctx": ctx, "count": windows or None}
    if sweep is None:
        loading["quantize"] = None if quantize == "auto" else quantize or "f32"
        with short_of_memory(_LESS if quantize in (None, "f32") else "choose a smaller model"):
            found, drawing = _survey(model, loading, text, cut, threshold, fed or "hidden")
    else:
        with short_of_memory("a sweep is measured from f32: choose a smaller model"):
            found, drawing = _sweep(model, loading, text, cut, sweep, rounds or 3)
    result = {**found, "text": name}
    table = (_survey_as_text if sweep is None else _sweep_as_text)(result)
    if as_json:
        console.write_json(comparison.as_json({**result, "provenance": options.origin(model, loading, text)}))
    else:
        console.write(table + "\n")
    if plot:  # last: what was measured is not to be lost with a disk that is full
        measuring.write(plot, drawing.file(f"Outliers of {model}", table))


def _survey(
    model: str, loading: dict[str, Any], text: str, cut: Mapping[str, Any], threshold: float | None, fed: str
) -> Found:
    from pronk.formats.quantize import INT8_THRESHOLD
    from pronk.measure.outliers import outliers
    from pronk.measure.plots_outliers import heat_map
    from pronk.measure.windows import begins_with, windows

    threshold = INT8_THRESHOLD if threshold is None else threshold
    llm = options.load_model(model, dict.fromkeys(options.LOADING) | loading)
    read = windows(llm.tokenizer.encode(text), **cut, bos=begins_with(llm))
    with progress.shown(unit=progress.of_tokens) as advance:
        found = outliers(llm, [window.ids for window in read], threshold, progress=advance)

    what, of = ("hidden states", 2 * found.tokens) if fed == "hidden" else (f"inputs of {fed}", found.tokens)
    drawing = heat_map(found.counts(fed), f"{llm.name}: {what} over {threshold:g}, of {of} a cell")
    head = {"model": llm.name, "engine": llm.backend.engine, "dtype": llm.backend.dtype}
    return {**head, "windows": len(read), "ctx": cut["ctx"], **found.as_dict()}, drawing


def _sweep(
    model: str, loading: dict[str, Any], text: str, cut: Mapping[str, Any], thresholds: tuple[float, ...], rounds: int
) -> Found:
    import pronk
    from pronk.measure import plots_outliers
    from pronk.measure.sweep import sweep

    def load(**own: Any) -> LLM:
        return pronk.load(model, **{**loading, **own})

    with progress.shown(unit=lambda done, total: f"{done} of {total} steps") as advance:
        found = sweep(load, text, thresholds, **cut, rounds=rounds, progress=advance)
    return {"engine": loading["engine"], **found}, plots_outliers.sweep(found["points"], found["knee"])


def _survey_as_text(found: Mapping[str, Any]) -> str:
    places = {(entry["layer"], entry["input"]): entry for entry in found["inputs"]}
    rows: list[tuple[object, ...]] = [("layer", *(word for name in INPUTS for word in (name, "")), "largest")]
    for layer in sorted({layer for layer, _ in places if layer >= 0}):
        entries = [places[layer, name] for name in INPUTS]
        rows.append((layer, *(word for one in entries for word in _columns(one)), _largest(*entries)))
    top = [("layer", "input", "column", "tokens", "largest")]
    for one in found["top"]:
        layer = one["layer"] if one["layer"] >= 0 else ""
        top.append((layer, one["input"], one["column"], percent(one["share_of_tokens"]), _largest(one)))
    features = found["features"]
    widest = [("column", "layers", "positions", "largest")]
    for one in features["columns"]:
        widest.append((one["column"], f"{one['layers']:.0%}", percent(one["positions"]), _largest(one)))
    rule = f"in {features['layers']:.0%} of the layers and at {features['positions']:.0%} of the positions at least"
    parts = [
        f"{found['model']}: {found['engine']} engine in {found['dtype']}; {found['tokens']} tokens of {found['text']}, "
        f"in {found['windows']} windows of {found['ctx']}\n"
        f"over {found['threshold']:g}: {found['outliers']:,} of {found['activations']:,} activations of all layers "
        f"({found['share_of_activations']:.3%}), in {found['columns']:,} columns",
        f"columns that hold outliers, and the share of tokens that have any:\n{console.table(rows, right=range(10))}\n"
        f"head: {' '.join(_columns(places[-1, 'head']))}, largest {_largest(places[-1, 'head'])}",
        f"the columns with the largest activations:\n{console.table(top, right=(0, 2, 3, 4))}" if found["top"] else "",
        f"outlier features ({rule}): "
        + (f"{len(widest) - 1}\n{console.table(widest, right=range(4))}" if features["columns"] else "none"),
    ]
    return "\n\n".join(filter(None, parts))


def _columns(entry: Mapping[str, Any]) -> tuple[str, str]:
    """How many of them hold outliers, and at how many tokens."""
    return str(entry["columns"]), percent(entry["share_of_tokens"]) if entry["columns"] else ""


def _largest(*entries: Mapping[str, Any]) -> str:
    return f"{max(entry['largest'] for entry in entries):.1f}"


def _sweep_as_text(found: Mapping[str, Any]) -> str:
    head = ("computed in f32", "mean KLD", "", "top-1", "outliers", "prefill tok/s", "decode tok/s")
    rows: list[tuple[object, ...]] = [head]
    own = found["default"]
    points = {f"over {point['threshold']:g}": point for point in found["points"]}
    for label, one in {**points, f"over {own['threshold']:g}, and the {own['outliers']} largest": own}.items():
        speeds = (digits(one[rate]["median"]) for rate in ("prefill_tok_s", "decode_tok_s"))
        shares = percent(one["top1"]), f"{one['share_of_activations']:.2%}"
        rows.append((label, digits(one["kld"]), error(one["standard_error"]), *shares, *speeds))
    return (
        f"{found['model']}: llm-int8 on the {found['engine']} engine against f32; {found['windows']} windows of "
        f"{found['ctx']} tokens of {found['text']}, {found['rows']} predictions\n\n"
        f"{console.table(rows, right=range(1, 7))}\n\n"
        f"knee: {found['knee']:g}, the largest threshold with nine tenths of the best one's gain in KLD over the "
        f"largest one\nspeeds: medians of {found['rounds']} rounds, a prompt of {found['prompt_tokens']} tokens and "
        f"{found['new_tokens']} new ones; outliers: share of the activations; top-1: agreement with f32"
    )
