"""`pronk list`: the models on this machine."""

from __future__ import annotations

from pronk.cli import console, options
from pronk.cli.verb import verb
from pronk.system import human_size


@verb(
    epilog="""\b
Examples:
  pronk list
  pronk list --json | jq -r '.[] | select(.path) | .name'""",
)
@options.json_option
def command(as_json: bool) -> None:
    """List local models, and those that pull knows by name."""
    from pronk.checkpoint.hub import resolve as hub

    models = hub.cached()
    if as_json:
        console.write_json([{"name": m.name, "path": m.path and str(m.path), "bytes": m.nbytes} for m in models])
        return
    rows = [
        (m.name, "" if m.nbytes is None else human_size(m.nbytes), m.path or f"not here; pronk pull {m.name}")
        for m in models
    ]
    console.write(console.table(rows, right=(1,)) + "\n")
