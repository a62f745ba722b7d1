"""`pronk report`: a comparison's report.json rendered again, after an upgrade or with plots."""

from __future__ import annotations

import click

from pronk.cli import console, options


@options.verb(
    epilog="""\b
Examples:
  pronk report report/
  pip install 'pronk[report]' && pronk report report/      the same, with plots

Reads FOLDER/report.json, which `pronk compare` wrote; measures nothing. Writes REPORT.md, report.html
and plots beside it, and prints the first table."""
)
@click.argument("folder", type=options.NAME)
def command(folder: str) -> None:
    """Render the report of a comparison again."""
    from pronk.errors import BadRequest
    from pronk.measure import plot_style
    from pronk.measure.report import NO_PLOTS, render
    from pronk.paths import expanded

    try:
        table = render(expanded(folder))
    except ValueError as error:
        raise BadRequest(str(error)) from None
    console.write(table + "\n")
    if not plot_style.available():
        console.note(NO_PLOTS)
