"""A comparison's report.json rendered: REPORT.md, report.html (one file that needs nothing else) and plots/*.svg.

Reads the JSON and nothing else: of pronk it imports only what lies here, the plots, and the schema. An unfinished
report renders as far as it goes and says what it lacks. report.jinja says what stands in a report, and in which order;
it is filled in once for each format, whose own template has the macros that write it.
"""

from __future__ import annotations

from pathlib import Path

from pronk.system import replacing

NAME = "report.json"
_ANEW = "pronk compare MODEL --out FOLDER --overwrite measures anew"


def render(folder: Path | str) -> str:
    """Write REPORT.md, report.html and plots beside report.json; gives the first table, as a terminal shows it.

    `folder` may also be the report.json itself. The same JSON gives the same bytes. Raises BadFile for a report.json
    that is not as `schema` has it.
    """
    from pronk import terminal
    from pronk.measure import schema
    from pronk.measure.report import content, pages

    given = Path(folder)
    folder = given.parent if given.name == NAME else given
    said = content.of(schema.visible(schema.read(folder / NAME, anew=_ANEW)))
    files = {f"plots/{name}.svg": picture.file() for name, picture in said["pictures"].items()}
    files |= {name: pages.filled(f"{name}.jinja", said) for name in ("report.html", "REPORT.md")}
    for name, text in files.items():
        write(folder / name, text)
    first = next(filter(None, (said["tables"]["glance"], *(one.table for one in said["techniques"]))), None)
    if first is None:
        return "Nothing has been measured yet."
    return terminal.table(first.as_text("Metric", said["original"]), right=range(1, len(first.head) + 1))


def write(path: Path, content: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_text(content, encoding="utf-8", newline="\n")
