"""Rows of tables: what a row is called, and the cell of each variant.

A row of which no cell says anything is no row, so that a report shows what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pronk.measure.report import reading, words
from pronk.measure.report.document import Cell
from pronk.measure.report.verdict import floored
from pronk.measure.report.verdict import name_of as name_of

Variant = Mapping[str, Any]
Make = Callable[[Variant], Cell]
Rows = list[tuple[str, list[Cell]]]


def original(variants: Sequence[Variant]) -> Variant | None:
    """The variant that says so, else the first."""
    return next((variant for variant in variants if variant.get("original") is True), variants[0] if variants else None)


def row(label: str, variants: Sequence[Variant], make: Make) -> Rows:
    cells = [make(variant) for variant in variants]
    return [(label, cells)] if any(cell.value != words.NONE for cell in cells) else []


def group(title: str, rows: Rows) -> Rows:
    return [(title, []), *rows] if rows else []


def plain(*path: str | int, unit: float = 1.0) -> Make:
    """A figure with its spread."""

    def cell(variant: Variant) -> Cell:
        found = reading.value(variant, *path)
        return Cell.of(words.digits(found.value * unit), words.spread(found)) if found else Cell(words.NONE)

    return cell


def beside(base: Variant | None, find: Callable[[Variant], Any], *, rate: bool) -> Make:
    """A time or rate with its spread, and what it is called beside the original's."""

    def cell(variant: Variant) -> Cell:
        own, value = find(variant), reading.value(find(variant))
        if value is None:
            return Cell(words.NONE)
        theirs = find(base) if base is not None and variant is not base else None
        times = reading.ratio(own, theirs) if rate else reading.ratio(theirs, own)
        return Cell.of(words.digits(value.value), words.spread(value), words.faster(times))

    return cell


def latency_of(*path: str | int) -> Callable[[Variant], Any]:
    return lambda variant: reading.at(variant, "latency", *path)


def predicted(measured: str, predicted: str, base: Variant | None, scale: float) -> Make:
    """Bytes measured, and beneath them the prediction with its error."""

    def cell(variant: Variant) -> Cell:
        own, said = (reading.number(variant, "memory", key) for key in (measured, predicted))
        guess = "" if said is None else f"predicted {words.digits(said / scale)}"
        if own is None:
            return Cell.of(words.NONE if not guess else f"({guess})")
        off = words.error_of(said, own)
        beside = None if base is None or variant is base else reading.number(base, "memory", measured)
        return Cell.of(
            words.digits(own / scale), f"{guess} ({off})" if guess and off else guess, words.smaller(own, beside)
        )

    return cell


def ppl(variant: Variant) -> Cell:
    found, error = (reading.number(variant, "quality", "perplexity", key) for key in ("value", "standard_error"))
    apart, its_error = (reading.number(variant, "quality", "perplexity", "beside_original", key)
                        for key in ("log_ratio", "standard_error"))  # fmt: skip
    beside = "" if apart is None or abs(apart) > 100 else words.change(math.exp(apart), its_error)
    twin = "of a rotated twin" if variant.get("twin") and found is not None else ""
    return Cell.of(words.digits(found, 4), words.error(error), beside, twin)


def quality(base: Variant | None, key: str, show: Callable[[float | None], str] = words.digits) -> Make:
    """A figure of the divergence, the mean with its error, and that of the noise floor that the verdict takes."""

    def cell(variant: Variant) -> Cell:
        own, error = (reading.number(variant, "quality", "divergence", name) for name in (key, "standard_error"))
        by = floored(variant, base)
        floor = reading.number(by, "quality", "noise_floor", key)
        said = "" if by is None or None in (floor, own) else f"noise floor {show(floor)} ({name_of(by)}'s)"
        twin = "of a rotated twin" if variant.get("twin") and own is not None else ""
        return Cell.of(show(own), words.error(error) if key == "mean" else "", said, twin)

    return cell


def own_floor(variant: Variant) -> Cell:
    mean, error = (reading.number(variant, "quality", "noise_floor", key) for key in ("mean", "standard_error"))
    return Cell.of(words.digits(mean), words.error(error))


def scored(task: str, metric: str) -> Make:
    """A score with its error, and how far it is from the original's."""

    def cell(variant: Variant) -> Cell:
        here = ("tasks", task, "metrics", metric)
        value, error = (reading.number(variant, *here, key) for key in ("value", "standard_error"))
        apart, its = (
            reading.number(variant, *here, "beside_original", key) for key in ("difference", "standard_error")
        )
        beside = "" if apart is None else f"{apart:+.3f} {words.error(its)}".strip()
        if apart and its is not None:
            beside += ", more than chance" if abs(apart) > 2 * its else ", chance would do"
        return Cell.of(words.digits(value), words.error(error), beside)

    return cell
