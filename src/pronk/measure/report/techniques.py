"""Techniques: a switch on and off, a table and a picture for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pronk.measure.figures import at
from pronk.measure.formatting import NONE, count, plain
from pronk.measure.report.tables import AT_ONCE, Cell, Own, Row, Table, table

RATES = {
    "prompt_tok_s": "read: tokens of the prompt/s",
    "decode_tok_s": "decode: new tokens of one text/s",
    "all_tok_s": "in all: new tokens of all texts/s",
    "tok_s": "tokens/s",
}
MB = 1e6
ROWS = (
    Row("time, s", "seconds", "range time"),
    Row("time by theory, s", "theory_s"),
    *(Row(label, key, "range rate") for key, label in RATES.items()),
    Row("peak, MB", "peak_bytes", "size", unit=MB),
    Row("peak over what was held before, MB", "grew_by", unit=MB),
    Row("keys and values of all texts, MB", "kv_bytes", "at_once", unit=MB),
    Row("their peak by theory, MB", "theory_kv_peak", unit=MB),
    Row("weights, MB", "weights_bytes", "size", unit=MB),
    Row("process grew in loading by, MB", "loading_took", "size", unit=MB),
    Row(KLD := "mean KLD", "kld", "kld_error own_floor"),
    Row(SAME := "texts the same as the first way's", "same_texts", show=count, of="texts", of_base=False),
)
_NOT_TOLD = Cell(NONE, ("not told: the file lies on its grid",))


class Technique(NamedTuple):
    name: str  # of its picture
    title: str
    given: Own
    table: Table | None

    @property
    def at_once(self) -> bool:
        return self.table is not None and any(AT_ONCE in cell.notes for _, cells in self.table.lines for cell in cells)


def techniques(report: Own) -> Iterator[Technique]:
    for place, given in enumerate(report.get("techniques") or (), 1):
        of_weights = given["name"] != "kv-dtype"  # whose types have names of weight formats, too
        found = _table(given, (of_weights and at(report, "model.grid.formats")) or ())
        yield Technique(f"technique-{place}", title_of(given), given, found)


def title_of(technique: Own) -> str:
    return plain(technique["title"] or technique["name"]) or "a technique"


def ways_of(technique: Own) -> list[str]:
    """Names of what is compared, in the order in which they first occur."""
    return list(dict.fromkeys(name for point in technique["points"] for name in point["ways"]))


def _table(technique: Own, on_its_grid: Sequence[str]) -> Table | None:
    """A table of the points of a technique below one another; each way is held against the first."""
    ways, lines = ways_of(technique), []
    for point in technique["points"] if ways else ():
        columns = [(way, point["ways"].get(way, {})) for way in ways]
        found = table([plain(point["setting"]), *ROWS], columns, columns[0][1])
        for label, cells in found.lines if found else ():
            hidden = on_its_grid if label in (KLD, SAME) else ()
            told = (_NOT_TOLD if way in hidden else cell for way, cell in zip(ways, cells, strict=False))
            lines.append((label, list(told)))
        notes = [plain(own.get("note") or "", 160) for _, own in columns]
        lines += [("note", [Cell(note) for note in notes])] if any(notes) else []
    return Table([plain(way) for way in ways], lines) if lines else None
