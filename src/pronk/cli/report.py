"""`pronk report`: what a comparison measured rendered again, as after an upgrade."""

from __future__ import annotations

import click

from pronk.cli import console
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb
from pronk.errors import BadFile


@verb(
    epilog="""\b
Examples:
  pronk report report/

It reads report.json, which `pronk compare` wrote to FOLDER, or training.json of `pronk compare-training`, and measures
nothing. It writes REPORT.md and report.html, or TRAINING.md and training.svg, beside it, and prints the
tables that the comparison printed."""
)
@click.argument("folder", type=NAME)
def command(folder: str) -> None:
    """Render a comparison's report again, without measuring."""
    from pronk.measure import report, training_report
    from pronk.system import expanded

    given = expanded(folder)
    place = given.parent if given.name in (report.NAME, training_report.NAME) else given
    kinds = [kind for kind in (report, training_report) if (place / kind.NAME).exists()]
    if not kinds:
        found = f"has neither {report.NAME} nor {training_report.NAME}"
        if not place.is_dir():
            found = "is no folder" if place.exists() else "no such folder"
        raise BadFile(place, f"{found}; pronk compare MODEL --out FOLDER and pronk compare-training make reports")
    console.write("\n\n".join(kind.render(place) for kind in kinds) + "\n")
