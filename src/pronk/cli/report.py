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
    from pronk.measure import training_report
    from pronk.measure.report import NAME, render
    from pronk.system import expanded

    given = expanded(folder)
    place = given.parent if given.name == training_report.NAME else given
    of_training = (place / training_report.NAME).is_file()
    tables = []
    if not of_training or (place / NAME).is_file():
        tables.append(render(place))
    if of_training:
        tables.append(training_report.render(place))
    console.write("\n\n".join(tables) + "\n")
