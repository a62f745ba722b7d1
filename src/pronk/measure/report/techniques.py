"""Techniques: a switch on and off, a table and a picture for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pronk.measure.figures import at
from pronk.measure.formatting import NONE, digits, error, plain, whole
from pronk.measure.report.tables import Cell, Line, Own, Row, Table, as_rate, as_size, as_time, ranged, table

RATES = {
    "prompt_tok_s": "read: tokens of the prompt/s",
    "decode_tok_s": "decode: new tokens of one text/s",
    "all_tok_s": "in all: new tokens of all texts/s",
    "tok_s": "tokens/s",
}
AT_ONCE = "not all of them at once"  # beneath keys and values that are more than the process grew by
_NOT_TOLD = Cell(NONE, ("not told: the file lies on its grid",))
_SECONDS = "fewer where they take more seconds than"  # what the settings call it


class Technique(NamedTuple):
    name: str  # of its picture
    title: str
    what: str
    table: Table | None
    at_once: bool  # whether AT_ONCE stands in the table


def techniques(report: Own) -> Iterator[Technique]:
    told_apart = at(report, "model.grid.formats") or ()
    for place, given in enumerate(report.get("techniques") or (), 1):
        found = _table(given, told_apart)
        at_once = found is not None and any(AT_ONCE in cell.notes for line in found.lines for cell in line.cells)
        yield Technique(f"technique-{place}", title_of(given), given["what"], found, at_once)


def title_of(technique: Own) -> str:
    return plain(technique["title"] or technique["name"]) or "a technique"


def ways_of(technique: Own) -> list[str]:
    """Names of what is compared, in the order in which they first occur."""
    return list(dict.fromkeys(name for point in technique["points"] for name in point["ways"]))


def _table(technique: Own, on_its_grid: Sequence[str]) -> Table | None:
    """A table of the points of a technique below one another; each way is held against the first."""
    ways, lines = ways_of(technique), []
    head = [plain(way) for way in ways]
    for point in technique["points"]:
        columns = [(way, point["ways"].get(way, {})) for way in ways]
        found = table("", "", ROWS, columns, columns[0][1] if columns else None)
        lines.append(Line(plain(point["setting"]), ()))
        for line in found.lines if found else ():
            hidden = on_its_grid if line.label in (KLD, SAME) else ()
            lines.append(Line(line.label, [_NOT_TOLD if way in hidden else cell
                                           for way, cell in zip(ways, line.cells, strict=True)]))  # fmt: skip
        notes = [plain(own.get("note") or "", 160) for _, own in columns]
        lines += [Line("note", [Cell(note) for note in notes])] if any(notes) else []
    return Table(_caption(technique.get("settings") or {}), "Setting", head, lines, variants=False) if ways else None


def _caption(settings: Mapping[str, Any]) -> str:
    rest = dict(settings)
    runs, seconds, model = rest.pop("runs", None), rest.pop(_SECONDS, None), rest.pop("model", None)
    said = f"Median of {runs} runs" if runs else "Median of the runs"
    said += "; beneath it the lowest and the highest run, and the difference from the first way"
    if runs and seconds:
        said += f"; fewer runs where {runs} would take more than {seconds:g} seconds"
    others = [f"the model in {model}"] * bool(model) + [f"{key} {value}" for key, value in rest.items()]
    return said + (f"; {plain(', '.join(others), 200)}" if others else "")


def _quality(own: Own, base: Own | None, row: Row) -> str:
    return error(own.get("kld_error"))


def _own_floor(own: Own, base: Own | None, row: Row) -> str:
    found = own.get("noise_floor")
    return "" if found is None else f"its own noise floor {digits(found)}"


def _at_once(own: Own, base: Own | None, row: Row) -> str:
    grown = own.get("grew_by")
    return AT_ONCE if grown is not None and (own.get("kv_bytes") or 0) > max(grown, 0) else ""


KLD, SAME = "mean KLD", "texts the same as the first way's"
MB = 1e6
ROWS = (
    Row("time, s", "seconds", notes=(ranged, as_time)),
    Row("time by theory, s", "theory_s"),
    *(Row(label, key, notes=(ranged, as_rate)) for key, label in RATES.items()),
    Row("peak, MB", "peak_bytes", notes=(as_size,), unit=MB),
    Row("peak over what was held before, MB", "grew_by", unit=MB),
    Row("keys and values of all texts, MB", "kv_bytes", notes=(_at_once,), unit=MB),
    Row("their peak by theory, MB", "theory_kv_peak", unit=MB),
    Row("weights, MB", "weights_bytes", notes=(as_size,), unit=MB),
    Row("process grew in loading by, MB", "loading_took", notes=(as_size,), unit=MB),
    Row(KLD, "kld", notes=(_quality, _own_floor)),
    Row(SAME, "same_texts", whole, of="texts", of_base=False),
)
