"""Techniques: a switch on and off, a table and a plot for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.measure.report import reading, words
from pronk.measure.report.document import Block, Cell, Heading, Paragraph, Plot, Table

RATES = {
    "prompt_tok_s": "read: tokens of the prompt/s",
    "decode_tok_s": "decode: new tokens of one text/s",
    "all_tok_s": "in all: new tokens of all texts/s",
    "tok_s": "tokens/s",  # of older reports
}
COLUMNS = {
    "seconds": "time, s",
    "theory_s": "time by theory, s",
    **RATES,
    "peak_bytes": "peak, MB",
    "grew_by": "peak over what was held before, MB",
    "kv_bytes": "keys and values, MB",
    "theory_kv_peak": "their peak by theory, MB",
    "weights_bytes": "weights, MB",
    "loading_took": "process grew in loading by, MB",
    "kld": "mean KLD",
    "same_texts": "texts the same as the first way's",
}
BYTES = ("peak_bytes", "weights_bytes", "loading_took")
COUNTED = ("grew_by", "kv_bytes", "theory_kv_peak")  # bytes as well, which no ratio belongs beside


def ways_of(technique: Mapping[str, Any]) -> list[str]:
    """Names of what is compared, in the order in which they first occur."""
    ways = [reading.at(point, "ways") for point in reading.entries(technique, "points")]
    return list(dict.fromkeys(name for way in ways for name in way))


_ON_ITS_GRID = Cell(words.NONE, ("not told: the file lies on its grid",))


def plot_name(place: int) -> str:
    return f"technique-{place + 1}"


def title_of(technique: Mapping[str, Any]) -> str:
    return words.plain(reading.text(technique, "title") or reading.text(technique, "name") or "a technique")


def techniques(report: Mapping[str, Any], pictures: Mapping[str, Plot]) -> list[Block]:
    blocks: list[Block] = []
    formats = reading.at(report, "model", "grid", "formats") or []
    for place, technique in enumerate(reading.entries(report, "techniques")):
        ways, points = ways_of(technique), reading.entries(technique, "points")
        blocks.append(Heading(title_of(technique)))
        if what := reading.text(technique, "what"):
            blocks.append(Paragraph(what))
        if not ways:
            continue
        rows: list[tuple[str, list[Cell]]] = []
        for point in points:
            found = point["ways"]
            rows.append((words.plain(reading.text(point, "setting")), []))
            for key, label in COLUMNS.items():
                cells = [
                    _ON_ITS_GRID if way in formats and key in ("kld", "same_texts")
                    else _cell(found.get(way), found.get(ways[0]), key)
                    for way in ways
                ]  # fmt: skip
                if any(cell.value != words.NONE for cell in cells):
                    rows.append((label, cells))
            notes = [words.plain(reading.text(found.get(way), "note"), 160) for way in ways]
            if any(notes):
                rows.append(("note", [Cell(note) for note in notes]))
        caption = ", ".join(filter(None, ("Median with minimum and maximum", _settings(technique))))
        blocks.append(Table(caption, "Setting", [words.plain(way) for way in ways], rows, variants=False))
        if plot_name(place) in pictures:
            blocks.append(pictures[plot_name(place)])
    return blocks


def _cell(way: Any, first: Any, key: str) -> Cell:
    """A figure with its spread, and what it is called beside that of the first way."""
    found = reading.value(way, key)
    if found is None:
        return Cell(words.NONE)
    if key == "kld":
        error, floor = reading.number(way, "kld_error"), reading.number(way, "noise_floor")
        return Cell.of(words.digits(found.value), words.error(error),
                       "" if floor is None else f"its own noise floor {words.digits(floor)}")  # fmt: skip
    if key == "same_texts":
        return Cell(words.NONE if way is first else f"{found.value:g} of {reading.text(way, 'texts')}")
    if key in COUNTED or key == "theory_s":
        return Cell(words.digits(found.value / (1e6 if key in COUNTED else 1)))
    if key in BYTES:
        beside = "" if way is first else words.smaller(found.value, reading.number(first, key))
        return Cell.of(words.digits(found.value / 1e6), beside)
    theirs = reading.at(first, key)
    times = reading.ratio(theirs, way[key]) if key == "seconds" else reading.ratio(way[key], theirs)
    return Cell.of(words.digits(found.value), words.spread(found), "" if way is first else words.faster(times))


def _settings(technique: Mapping[str, Any]) -> str:
    given = technique.get("settings") or {}
    return words.plain(", ".join(f"{key} {value}" for key, value in given.items()), 200)
