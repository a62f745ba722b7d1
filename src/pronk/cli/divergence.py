"""`pronk divergence`: how far one model's predictions lie from another's, and how much of that is rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pronk.cli import console, measuring, options, progress
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb
from pronk.formats import FLOATS

_BOTH = ("tokenizer", "device", "threads", "ctx_size", "revision")  # options of loading that A takes as well


@verb(
    epilog="""\b
Examples:
  pronk divergence smollm2:135m --quantize llm-int8           what 8 bits cost
  pronk divergence smollm2:135m --kv-dtype int8               the same weights, keys and values in 8 bits
  pronk divergence ./my-model my-model-q8.gguf --text chapter.txt
  pronk divergence model.gguf --quantize q4 --reference auto  against the file's own types

A is the reference, with its weights in f32 unless --reference says otherwise. The options under "Model
and engine" are B's; A takes its engine, device, threads, tokenizer and revision from there too. Without B,
A is compared with itself under these options; at least one is needed.

The noise floor is the divergence of a model from itself when its embeddings are off by one unit in the
last place of f32: smaller divergences are rounding noise. By default only 20 windows are used, because
each is read four times, twice by each model."""
)
@click.argument("a", type=NAME)
@click.argument("b", type=NAME, required=False)
@measuring.text_options(windows=20)
@measuring.per_window_option
@click.option("--reference", type=click.Choice([*FLOATS, "auto"]), default="f32", show_default=True,
              help="Convert A's weights to this format; auto keeps its file's formats.")  # fmt: skip
@measuring.special_option
@options.window_loading_options
@options.json_option
def command(
    a: str,
    b: str | None,
    file: str | None,
    ctx: int,
    windows: int,
    per_window: Path | None,
    reference: str,
    parse_special: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Measure the KL divergence of model B from model A.

    It also reports how often both find the same token likeliest (top-1 agreement), and how much of the divergence is
    rounding noise.
    """
    from pronk.checkpoint import grid
    from pronk.measure.divergence import with_floors
    from pronk.measure.machine import described, provenance

    text, name = measuring.read_text(file)
    first = _reference_loading(reference, loading)
    if b is None:
        if all(loading[option] is None for option in ("quantize", "kv_dtype", "attn")):
            raise click.UsageError("without B there must be an option that makes it differ, as --quantize llm-int8")
        # What is not asked for by name is as A has it: --kv-dtype alone changes keys and values alone.
        if loading["quantize"] is None:
            loading["quantize"] = first["quantize"]
    one = options.load_model(a, first)
    other = options.load_model(a if b is None else b, loading)
    teller = one if one.has_tokenizer or not other.has_tokenizer else other
    ids = teller.tokenizer.encode(text, special=parse_special)
    if other.has_tokenizer:
        others = other.tokenizer.encode(text, special=parse_special)
        measuring.check_same_tokens(one.name, ids, other.name, others)
    levels = grid.find(one.checkpoint)
    as_it_is = b is None or other.checkpoint.quantization in (None, one.checkpoint.quantization)
    if levels and as_it_is and other.backend.dtype in levels.formats:
        console.note(f"A: {levels}. Much of it {other.backend.dtype} holds for nothing, so it looks free here; "
                     "to see what it costs other models, compare a copy made with: pronk convert --rotate")  # fmt: skip
    with progress.shown(unit=progress.of_tokens) as advance:
        found = with_floors(one, other, ids, ctx=ctx, count=windows or None, progress=advance)
    measuring.note_fewer(found["divergence"]["windows"])
    result = {
        "reference": {**described(one), "kv_dtype": one.backend.kv_dtype},
        "own": {**described(other), "kv_dtype": other.backend.kv_dtype},
        "text": name,
        "tokens": len(ids),
        "grid": levels and levels.as_dict(),
        **found,
        "verdict": _verdict(found),
    }
    if per_window:
        measuring.write_windows(per_window, [(which, found[which]["per_window"]) for which in found])
    if as_json:
        origins = [
            provenance(llm.checkpoint, text, console.command(), llm.backend.conditions()) for llm in (one, other)
        ]
        console.write_json({**result, "provenance": dict(zip(("reference", "own"), origins, strict=True))})
    else:
        console.write(_as_text(result) + "\n")


def _reference_loading(reference: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """The options that A is loaded with: on the engine of B."""
    from pronk import engines

    engine = engines.choose(loading["engine"], loading)
    made = {"quantize": None if reference == "auto" else reference}
    both = {name: loading[name] for name in _BOTH}
    return {**dict.fromkeys(options.LOADING), **both, **made, "engine": engine}


def _verdict(found: Mapping[str, Any]) -> str:
    """By the rule of pronk.measure.noise: beside the lower of both floors, and then beside B's own."""
    from pronk.measure.noise import Mean, standing

    difference, floor, own = (
        Mean(found[name]["mean"], found[name]["standard_error"])
        for name in ("divergence", "reference_floor", "own_floor")
    )
    beside_both, beside_own = standing(difference, [floor, own]), standing(difference, [own])
    if beside_both != "above":
        return {"unknown": "unknown", "unclear": "unclear", "within": "same"}[beside_both]
    return {"unclear": "noisy or different", "within": "noisy"}.get(beside_own, "different")


_MORE = "Measure more windows (--windows 0, or a longer text)."
_IN_WORDS = {
    "unknown": "A single window has no standard error, so whether B differs by more than noise is unknown. Measure "
    "more windows (a longer text, --windows, or a smaller --ctx).",
    "unclear": "This text is too short to tell whether B differs from A by more than noise: the standard error reaches "
    f"over the limit of 3 times the noise floor. {_MORE}",
    "noisy or different": "B differs from A. This text is too short to tell whether by more than B's own rounding "
    f"noise: the standard error reaches over the limit of 3 times B's noise floor. {_MORE}",
    "same": "A and B cannot be told apart: they differ by less than 3 times the noise floor.",
    "noisy": "B differs from A, but by less than 3 times its own noise floor: the difference comes from how B rounds "
    "activations, keys and values, not from its weights.",
    "different": "B differs from A by more than 3 times the noise floor, which rounding noise does not explain.",
}


def _as_text(result: Mapping[str, Any]) -> str:
    found = [result[name] for name in ("divergence", "reference_floor", "own_floor")]
    difference, perplexity = found[0], found[0]["perplexity"]

    def row(label: str, key: str, form: str = ".3g") -> tuple[str, ...]:
        return label, *(format(column[key], form) for column in found)

    errors = ["" if (error := column["standard_error"]) is None else f" ± {error:.2g}" for column in found]
    rows: list[tuple[object, ...]] = [
        ("", "B against A", "floor: A", "floor: B"),
        ("mean KLD, nats", *(f"{column['mean']:.3g}{error}" for column, error in zip(found, errors, strict=True))),
        row("median", "median"),
        row("99% below", "p99"),
        row("largest", "max"),
        row("change of the right token's probability, RMS", "rms_dp"),
        row("same likeliest token", "top1", ".2%"),
    ]
    lines = [
        f"A  {_line(result['reference'])}",
        f"B  {_line(result['own'])}",
        f"{result['text']}, {result['tokens']} tokens: {difference['windows']} windows of {difference['ctx']}, "
        f"{difference['rows']} predictions",
        *([f"batch: {measuring.ONE_BATCH}"] if difference["one_batch"] else []),
        f"\n{console.table(rows, right=(1, 2, 3))}\n",
        f"perplexity  A {perplexity['reference']:.4f}, B {perplexity['own']:.4f} ({measuring.in_words(perplexity)})",
        f"noise floor: {result['own_floor']['how']}",
        _IN_WORDS[result["verdict"]],
    ]
    return "\n".join(lines)


def _line(side: Mapping[str, Any]) -> str:
    kv = "" if side["kv_dtype"] == side["dtype"] else f", keys and values in {side['kv_dtype']}"
    return f"{side['model']}: {side['engine']} engine in {side['dtype']}{kv} on {side['device']}"
