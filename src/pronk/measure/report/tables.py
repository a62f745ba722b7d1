"""Tables as data: a row is a label, the path of a figure, and what stands beneath it in small type, by name.

The columns of most tables are variants; those of a technique are its ways, held against the first. A row of which no
cell says anything is no row, and a table without rows is none, so that a report shows what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from pronk.measure.figures import Path, at, number, ratio, value
from pronk.measure.formatting import NONE, change, digits, error, faster, name_of, smaller, spread
from pronk.measure.report.verdict import floored

Own = Mapping[str, Any]


class Row(NamedTuple):
    label: str
    path: Path
    notes: str = ""  # names of NOTES
    show: Callable[[float], str] = digits
    unit: float = 1.0
    predicted: str = ""  # the path of that
    of: str = ""  # the path of how many there are of what is counted
    of_base: bool = True  # or it says nothing of what the others are held against


class Cell(NamedTuple):
    value: str
    notes: Sequence[str] = ()


class Table(NamedTuple):
    head: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Cell]]]  # without cells: a heading of the lines below

    def as_text(self, corner: str, original: str = "") -> list[list[str]]:
        """For a terminal: notes in lines of their own."""
        text = [[corner, *(f"{name} (original)" if name == original else name for name in self.head)]]
        empty = [""] * len(self.head)
        for label, cells in self.lines:
            text += [[label, *(cell.value for cell in cells)]] if cells else [["", *empty], [label.upper(), *empty]]
            text += [["", *notes] for notes in zip_longest(*(cell.notes for cell in cells), fillvalue="")]
        return text


def table(rows: Iterable[Row | str], columns: Sequence[tuple[str, Own]], base: Own | None) -> Table | None:
    """A word among the rows is a heading, which stands where a row of it does."""
    lines: list[tuple[str, Sequence[Cell]]] = []
    heading = ""
    for row in rows:
        if isinstance(row, str):
            heading = row
            continue
        cells = [_cell(row, own, base) for _, own in columns]
        if any(cell.value != NONE or cell.notes for cell in cells):
            lines += [(heading, ()), (row.label, cells)] if heading else [(row.label, cells)]
            heading = ""
    return Table([name for name, _ in columns], lines) if lines else None


def _cell(row: Row, own: Own, base: Own | None) -> Cell:
    found = number(own, row.path) if own is not base or row.of_base else None
    shown = NONE if found is None else row.show(found / row.unit) + (f" of {at(own, row.of)}" if row.of else "")
    notes = [NOTES[name](own, None if own is base else base, row) for name in row.notes.split()]
    return Cell(shown, [note for note in notes if note])


# What stands beneath a figure: of the figure's own column and of what that is held against, if it is


def beside(own: Own, row: Row, *keys: str) -> Any:
    """What lies beside the row's figure."""
    return at(own, [*(row.path.split(".") if isinstance(row.path, str) else row.path)[:-1], *keys])


def _predicted(own: Own, base: Own | None, row: Row) -> str:
    """With how far that is off, in percent of what was measured."""
    guess, measured = number(own, row.predicted), number(own, row.path)
    off = f" ({100 * (guess / measured - 1):+.1f}%)" if guess is not None and measured else ""
    return "" if guess is None else f"predicted {digits(guess / row.unit)}{off}"


def _changed(own: Own, base: Own | None, row: Row) -> str:
    """Of a perplexity, beside the original's on the same windows."""
    found = beside(own, row, "beside_original") or {"log_ratio": math.inf}
    return change(math.exp(found["log_ratio"]), found.get("standard_error")) if abs(found["log_ratio"]) <= 100 else ""


def _floor(own: Own, base: Own | None, row: Row) -> str:
    """The noise floor that the verdict takes, in the same figure."""
    judge = floored(own, base)
    found = at(judge, ["quality", "noise_floor", str(row.path).rpartition(".")[2]])
    told = judge is not None and found is not None and number(own, row.path) is not None
    return f"noise floor {row.show(found)} ({name_of(judge)}'s)" if told and judge else ""


def _apart(own: Own, base: Own | None, row: Row) -> str:
    """Of a score: how far it is from the original's, and whether chance would do that."""
    by, its = (beside(own, row, "beside_original", key) for key in ("difference", "standard_error"))
    said = "" if by is None else f"{by:+.3f} {error(its)}".strip()
    if not by or its is None:
        return said
    return f"{said}, {'more than chance' if abs(by) > 2 * its else 'chance would do'}"


def _parted(own: Own, base: Own | None, row: Row) -> str:
    """Over the prompts, from the text that parts first to the one that parts last."""
    each = (base and beside(own, row, "first_divergences")) or []
    known = [one for one in each if one is not None]
    return f"{min(known)} to {'never' if None in each else max(known)}" if known else ""


AT_ONCE = "not all of them at once"  # of keys and values that are more than the process grew by
NOTES: Mapping[str, Callable[[Own, Own | None, Row], str]] = {
    "range": lambda own, base, row: spread(value(own, row.path)),
    "time": lambda own, base, row: faster(ratio(at(base, row.path), at(own, row.path))),
    "rate": lambda own, base, row: faster(ratio(at(own, row.path), at(base, row.path))),
    "size": lambda own, base, row: smaller(number(own, row.path), number(base, row.path)),
    "predicted": _predicted,
    "error": lambda own, base, row: error(beside(own, row, "standard_error")),
    "changed": _changed,
    "floor": _floor,
    "twin": lambda own, base, row: "of a rotated twin" if own.get("twin") and number(own, row.path) is not None else "",
    "apart": _apart,
    "parted": _parted,
    "kld_error": lambda own, base, row: error(own.get("kld_error")),
    "own_floor": lambda own, base, row: (
        "" if own.get("noise_floor") is None else f"its own noise floor {digits(own['noise_floor'])}"
    ),
    "at_once": lambda own, base, row: AT_ONCE if (own.get("kv_bytes") or 0) > (own.get("grew_by") or math.inf) else "",
}
