"""`pronk list`: the models on this machine."""

from __future__ import annotations

import json

import click

from pronk.cli import console, options


@click.command(
    "list",
    epilog="""\b
Examples:
  pronk list
  pronk list --json | jq -r '.[].path'""",
)
@options.json_option
def command(as_json: bool) -> None:
    """List the models that are on this machine."""
    from pronk.checkpoint import hub

    models = [{"name": m.name, "path": str(m.path), "bytes": m.nbytes} for m in hub.cached()]
    if as_json:
        click.echo(json.dumps(models, ensure_ascii=False))
    elif models:
        console.write(console.table([(m["name"], console.size(m["bytes"]), m["path"]) for m in models]) + "\n")
    else:
        console.note("no models here yet; `pronk pull smollm2:135m` fetches one")
