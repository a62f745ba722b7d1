"""Tables as data: a row is a label, the path of a figure, how it is shown, and what stands beneath it in small type.

The columns of most tables are variants; those of a technique are its ways, held against the first. A row of which no
cell says anything is no row, and a table without rows is none, so that a report shows what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pronk.measure.figures import Path, at, number, ratio, value
from pronk.measure.formatting import NONE, digits, error, faster, plain, smaller, spread

Own = Mapping[str, Any]


class Cell(NamedTuple):
    """A value, and beneath it what belongs to it: its spread, its ratio to the original's, what was predicted."""

    value: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    label: str
    path: Path
    show: Callable[[float], str] = digits
    notes: Sequence[Callable[[Own, Own | None, Row], str]] = ()  # of a column and of what it is held against, if any
    unit: float = 1.0
    of: Path = ""  # how many there are of what it counts
    of_base: bool = True  # or it says nothing of what the others are held against


class Line(NamedTuple):
    label: str
    cells: Sequence[Cell]  # none: a heading of the lines below


class Table(NamedTuple):
    caption: str
    corner: str
    head: Sequence[str]
    lines: Sequence[Line]
    variants: bool = True  # these are the names of its columns, which have colours

    def as_text(self, original: str = "") -> list[list[str]]:
        """For a terminal: notes in lines of their own."""
        text = [[self.corner, *(f"{name} (original)" if name == original else name for name in self.head)]]
        for label, cells in self.lines:
            text += [[label, *(cell.value for cell in cells)]] if cells else [[""], [label.upper()]]
            for n in range(max((len(cell.notes) for cell in cells), default=0)):
                text.append(["", *(cell.notes[n] if n < len(cell.notes) else "" for cell in cells)])
        width = len(self.head) + 1
        return [line + [""] * (width - len(line)) for line in text]


def table(
    caption: str, corner: str, rows: Iterable[Row | str], columns: Sequence[tuple[str, Own]], base: Own | None,
    *, variants: bool = True,
) -> Table | None:  # fmt: skip
    """A word among the rows is a heading, which stands where a row of it does."""
    lines: list[Line] = []
    heading = ""
    for row in rows:
        if isinstance(row, str):
            heading = row
            continue
        cells = [_cell(row, own, base) for _, own in columns]
        if any(cell.value != NONE or cell.notes for cell in cells):
            lines += [Line(heading, ())] if heading else []
            lines.append(Line(row.label, cells))
            heading = ""
    return Table(caption, corner, [name for name, _ in columns], lines, variants) if lines else None


def _cell(row: Row, own: Own, base: Own | None) -> Cell:
    found = number(own, row.path) if own is not base or row.of_base else None
    if found is None:
        shown = NONE
    else:
        shown = row.show(found / row.unit) + (f" of {at(own, row.of)}" if row.of else "")
    notes = [note(own, None if own is base else base, row) for note in row.notes]
    return Cell(shown, [note for note in notes if note])


# What stands beneath a figure


def ranged(own: Own, base: Own | None, row: Row) -> str:
    return spread(value(own, row.path))


def as_time(own: Own, base: Own | None, row: Row) -> str:
    return faster(ratio(at(base, row.path), at(own, row.path)))


def as_rate(own: Own, base: Own | None, row: Row) -> str:
    return faster(ratio(at(own, row.path), at(base, row.path)))


def as_size(own: Own, base: Own | None, row: Row) -> str:
    return smaller(number(own, row.path), number(base, row.path))


def with_error(own: Own, base: Own | None, row: Row) -> str:
    return error(beside(own, row, "standard_error"))


def beside(own: Own, row: Row, *key: str) -> Any:
    """What lies beside the row's figure."""
    steps = row.path.split(".") if isinstance(row.path, str) else row.path
    return at(own, [*steps[:-1], *key])


def predicted(path: str) -> Callable[[Own, Own | None, Row], str]:
    """What was predicted, and how far that is off, in percent of what was measured."""

    def said(own: Own, base: Own | None, row: Row) -> str:
        guess, measured = number(own, path), number(own, row.path)
        if guess is None:
            return ""
        off = f" ({100 * (guess / measured - 1):+.1f}%)" if measured else ""
        return f"predicted {digits(guess / row.unit)}{off}"

    return said


def name_of(own: Own) -> str:
    return plain(own["name"]) or "unnamed"
