"""What `pronk outliers` prints: tables of a survey, and of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.cli import console

INPUTS = ("qkv", "o", "gate_up", "down")


def survey(found: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [("layer", *(word for name in INPUTS for word in (name, "")), "largest")]
    layers = sorted({entry["layer"] for entry in found["inputs"] if entry["layer"] >= 0})
    by_place = {(entry["layer"], entry["input"]): entry for entry in found["inputs"]}
    for layer in layers:
        entries = [by_place[layer, name] for name in INPUTS]
        cells = [word for entry in entries for word in _columns(entry)]
        rows.append((layer, *cells, f"{max(entry['largest'] for entry in entries):.1f}"))
    head = by_place[-1, "head"]
    top: list[tuple[object, ...]] = [("layer", "input", "column", "tokens", "largest")]
    top += [_column_row(column) for column in found["top"]]
    return "\n".join(
        [
            f"{found['model']}: {found['engine']} engine in {found['dtype']}; {found['tokens']} tokens of "
            f"{found['text']}, in {found['windows']} windows of {found['ctx']}",
            f"over {found['threshold']:g}: {found['outliers']:,} of {found['activations']:,} activations of all layers "
            f"({found['share_of_activations']:.3%}), in {found['columns']:,} columns",
            "",
            "columns that hold outliers, and the share of tokens that have any:",
            console.table(rows, right=range(len(rows[0]))),
            f"head: {' '.join(_columns(head))}, largest {head['largest']:.1f}",
            "",
            *(["the columns with the largest:", console.table(top, right=(0, 2, 3, 4)), ""] if found["top"] else []),
            _features(found["features"]),
        ]
    )


def _columns(entry: Mapping[str, Any]) -> tuple[str, str]:
    """How many of them hold outliers, and at how many tokens."""
    return str(entry["columns"]), f"{entry['share_of_tokens']:.1%}" if entry["columns"] else ""


def _column_row(column: Mapping[str, Any]) -> tuple[object, ...]:
    layer = column["layer"] if column["layer"] >= 0 else ""
    return layer, column["input"], column["column"], f"{column['share_of_tokens']:.1%}", f"{column['largest']:.1f}"


def _features(features: Mapping[str, Any]) -> str:
    rule = f"in {features['layers']:.0%} of the layers and at {features['positions']:.0%} of the positions at least"
    if not features["columns"]:
        return f"outlier features ({rule}): none"
    rows: list[tuple[object, ...]] = [("column", "layers", "positions", "largest")]
    rows += [
        (one["column"], f"{one['layers']:.0%}", f"{one['positions']:.1%}", f"{one['largest']:.1f}")
        for one in features["columns"]
    ]
    return f"outlier features ({rule}): {len(rows) - 1}\n{console.table(rows, right=range(4))}"


def sweep(found: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [
        ("computed in 32 bits", "mean KLD", "", "same top", "apart", "prefill tok/s", "decode tok/s")
    ]
    rows += [_point_row(f"over {point['threshold']:g}", point) for point in found["points"]]
    own = found["default"]
    rows.append(_point_row(f"over {own['threshold']:g}, and the {own['outliers']} largest", own))
    return "\n".join(
        [
            f"{found['model']}: llm-int8 on the {found['engine']} engine against f32; {found['windows']} windows "
            f"of {found['ctx']} tokens of {found['text']}, {found['rows']} predictions",
            "",
            console.table(rows, right=range(1, 7)),
            "",
            f"knee: {found['knee']:g}, the largest threshold that keeps nine tenths of what the best one gains in KLD "
            "over the largest",
            f"speeds: medians of {found['rounds']} rounds, a prompt of {found['prompt_tokens']} tokens and "
            f"{found['new_tokens']} new ones; apart: share of the activations",
        ]
    )


def _point_row(label: str, point: Mapping[str, Any]) -> tuple[object, ...]:
    error = point["standard_error"]
    return (
        label,
        f"{point['kld']:.3g}",
        "" if error is None else f"± {error:.1g}",
        f"{point['top1']:.1%}",
        f"{point['share_of_activations']:.2%}",
        f"{point['prefill_tok_s']['median']:.0f}",
        f"{point['decode_tok_s']['median']:.1f}",
    )
