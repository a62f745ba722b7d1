"""What a run keeps as its best, as its position says it: which look at held-out data found it, and its digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kept:
    line: Mapping[str, Any]  # of metrics.jsonl, of that look
    digest: str


def read(raw: Any, step: int) -> Kept | None:
    """As a checkpoint of that step has it; one of a pronk before has none. Raises ValueError."""
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.keys() != {"line", "digest"} or not isinstance(raw["digest"], str):
        raise ValueError("what it says of the best is not whole")
    line = raw["line"]
    if not isinstance(line, dict) or not all(value is None or type(value) in (int, float) for value in line.values()):
        raise ValueError("what it says of the best is no line of metrics")
    if type(line.get("step")) is not int or not 0 < line["step"] <= step or line.get("held_out_loss") is None:
        raise ValueError("what it says of the best is of no look of this run")
    return Kept(**raw)
