"""`pronk report`: what a comparison measured rendered again, as after an upgrade."""

from __future__ import annotations

import click

from pronk.cli import console, options


@options.verb(
    epilog="""\b
Examples:
  pronk report report/

Reads FOLDER/report.json, which `pronk compare` wrote, and training.json of `pronk compare-training`; measures
nothing. Writes REPORT.md, report.html and plots, or TRAINING.md and training.svg, beside it, and prints the tables that
`pronk compare` prints."""
)
@click.argument("folder", type=options.NAME)
def command(folder: str) -> None:
    """Render the report of a comparison again."""
    from pronk.measure import report, training_report
    from pronk.system import expanded

    given = expanded(folder)
    place = given.parent if given.name in (report.NAME, training_report.NAME) else given
    kinds = [kind for kind in (report, training_report) if (place / kind.NAME).is_file()]
    console.write("\n\n".join(kind.render(place) for kind in kinds or [report]) + "\n")
