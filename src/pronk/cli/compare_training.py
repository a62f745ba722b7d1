"""`pronk compare --training`: what techniques of training cost and buy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import click

from pronk.cli import console, measuring


def perform(
    asked: Mapping[str, Any], others: Mapping[str, Any], out: str, *, resume: bool, overwrite: bool, as_json: bool
) -> None:
    """`asked`: of training_grid.Request. `others`: options that mean nothing here, and are refused where given."""
    if given := next((name for name, value in others.items() if value not in (None, (), False)), None):
        raise click.UsageError(f"--{given.replace('_', '-')} says nothing about training; leave it or --training out")
    if resume and overwrite:
        raise click.UsageError("--resume goes on with a report and --overwrite replaces it; choose one")
    from pronk.measure import compare, training, training_report
    from pronk.measure.training_grid import Request
    from pronk.system import expanded
    from pronk.torch_engine import import_torch

    import_torch()
    folder, command = expanded(out), shlex.join(["pronk", *sys.argv[1:]])
    request = Request(**asked)
    grid, journal = training.begin(request, folder, resume=resume, overwrite=overwrite, command=command)
    console.note(
        f"{grid.request.model}: {len(grid.settings)} settings, {grid.request.rounds} rounds in turns, examples of up "
        f"to {grid.request.tokens} tokens"
    )
    for line in compare.warnings():
        console.note(line)
    with measuring.shown(journal, "pronk", "compare", "--training", "--resume", "--out", out) as advance:
        found = training.measure(grid, journal, progress=advance)
        tables = training_report.render(folder)
    console.note(f"written to {out}: {training_report.PAGE}, {training_report.PLOT}, {training.NAME}")
    console.write_json(found) if as_json else console.write(tables + "\n")
