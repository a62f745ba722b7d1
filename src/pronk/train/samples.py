"""Samples of a run, read back from a file that a crash or a hand may have damaged; runs/samples.py writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "samples.jsonl"  # in the run's folder


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines up to one that is none. Raises OSError."""
    found = []
    for raw in (folder / FILE).read_bytes().splitlines() if (folder / FILE).exists() else []:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            break
        if not all(isinstance(line.get(key), str) for key in ("prompt", "text")):
            break
        found.append(line)
    return found
