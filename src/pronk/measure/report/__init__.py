"""A comparison's report.json rendered: REPORT.md, report.html (one file that needs nothing else) and plots/*.svg.

Reads the JSON and nothing else: of pronk it imports only what lies here and the plots. An unfinished report renders as
far as it goes and says what it lacks. Without matplotlib (the extra `report`) everything but plots is written.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronk.measure.report.pictures import Picture

NAME = "report.json"
SCHEMA = 1
_ANEW = "; pronk compare MODEL --out FOLDER --overwrite measures anew"
NO_PLOTS = "Plots are left out, for matplotlib is missing: pip install 'pronk[report]', then pronk report FOLDER."


def render(folder: Path | str) -> str:
    """Write REPORT.md, report.html and plots beside report.json; gives the first table, as a terminal shows it.

    `folder` may also be the report.json itself. The same JSON gives the same bytes. Raises ValueError, in one line, for
    a report.json that cannot be read.
    """
    from pronk.measure import plot_style
    from pronk.measure.report import html, markdown, terminal
    from pronk.measure.report.sections import document

    given = Path(folder)
    folder = given.parent if given.name == NAME else given
    report = read(folder / NAME)
    drawn: dict[str, Picture] = {}
    if plot_style.available():
        from pronk.measure.report.pictures import draw

        drawn = draw(report)
    page = document(report, {name: (caption, alt) for name, (_, caption, alt) in drawn.items()})
    note = "" if plot_style.available() else NO_PLOTS
    pictures = {name: plot_style.svg(figure) for name, (figure, _, _) in drawn.items()}
    files = {f"plots/{name}.svg": picture for name, picture in pictures.items()}
    inline = {name: plot_style.inline(pictures[name], name, alt) for name, (_, _, alt) in drawn.items()}
    files["report.html"] = html.page(page, inline, note)
    files["REPORT.md"] = markdown.page(page, note)
    for name, content in files.items():
        write(folder / name, content)
    return terminal.first_table(page)


def read(path: Path) -> dict[str, Any]:
    """The object that a report.json holds. Raises ValueError."""
    try:
        report = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is none; pronk compare MODEL --out FOLDER writes one") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {str(error).splitlines()[0]}{_ANEW}") from None
    if not isinstance(report, dict):
        raise ValueError(f"{path}: holds no report: an object was expected{_ANEW}")
    if report.get("schema") != SCHEMA:
        found = json.dumps(report.get("schema"))[:40]
        raise ValueError(f"{path}: its schema is {found}, and this version of pronk renders {SCHEMA}{_ANEW}")
    return report


def write(path: Path, content: str) -> None:
    """Beside its place first: nobody ever finds half of it."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
        beside.replace(path)
    except OSError as error:  # which names the one beside
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
