"""What `pronk outliers` prints: tables of a survey, and of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.cli import console
from pronk.measure.formatting import digits, error, percent

INPUTS = ("qkv", "o", "gate_up", "down")


def survey(found: Mapping[str, Any]) -> str:
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


def sweep(found: Mapping[str, Any]) -> str:
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
