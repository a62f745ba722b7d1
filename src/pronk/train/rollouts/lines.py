"""Lines of rollouts.jsonl, one for each completion, read back from a file that a crash or a hand may have damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pronk.errors import PronkError

_KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int, "prompt": (str, list), "completion": str, "reward": (int, float), "rewards": dict,
    "advantage": (int, float), "tokens": int, "ended": bool,
}  # fmt: skip


def raw_lines(file: Path) -> list[bytes]:
    """With their ends; none where there is no file. Raises PronkError."""
    try:
        return file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PronkError(f"{file}: cannot be read: {error.strerror or error}") from None


def read(raw: bytes) -> dict[str, Any] | None:
    """None of what no run wrote."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not _KINDS.keys() <= line.keys():
        return None
    if not all(isinstance(line[key], kind) for key, kind in _KINDS.items()):
        return None
    if isinstance(line["prompt"], list) and not (line["prompt"] and all(isinstance(m, dict) for m in line["prompt"])):
        return None
    return line if all(map(_is_number, (line["reward"], line["advantage"], *line["rewards"].values()))) else None


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and -1e308 < value < 1e308 and math.isfinite(value)
