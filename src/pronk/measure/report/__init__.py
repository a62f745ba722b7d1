"""A comparison's report.json rendered: REPORT.md, report.html (one file that needs nothing else) and plots/*.svg.

Reads the JSON and nothing else: of pronk it imports only what lies here, the plots, and the schema. An unfinished
report renders as far as it goes and says what it lacks.
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
    from pronk.measure.report import html, markdown, reading, terminal
    from pronk.measure.report.pictures import draw
    from pronk.measure.report.sections import document
    from pronk.measure.schema import REPORT

    given = Path(folder)
    folder = given.parent if given.name == NAME else given
    report = reading.read(folder / NAME, REPORT, anew=_ANEW)
    drawn = draw(report)
    page = document(report, {name: (caption, alt) for name, (_, caption, alt) in drawn.items()})
    files = {f"plots/{name}.svg": drawing.file(caption, alt) for name, (drawing, caption, alt) in drawn.items()}
    files["report.html"] = html.page(page, {name: drawing.element(alt) for name, (drawing, _, alt) in drawn.items()})
    files["REPORT.md"] = markdown.page(page)
    for name, content in files.items():
        write(folder / name, content)
    return terminal.first_table(page)


def write(path: Path, content: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_text(content, encoding="utf-8", newline="\n")
