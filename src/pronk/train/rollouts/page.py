"""The page of a run's rollouts, made anew while the run goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from pronk.errors import os_problem
from pronk.train import curve, pages
from pronk.train.pages import clipped, spread
from pronk.train.rollouts.lines import read

PAGE = "rollouts.html"  # in the run's folder
_STEPS, _PROMPTS, _COMPLETIONS = 12, 8, 16  # that are shown; the file has them all
_STEP = re.compile(rb'\{"step": (\d{1,15}), ')

Line = Mapping[str, Any]  # of rollouts.jsonl


def refresh(folder: Path, rollouts: Path, note: Callable[[str], None]) -> None:
    """`note` hears of a page that cannot be written: the run is worth more."""
    try:
        draw(folder, rollouts)
    except OSError as error:
        note(f"{folder / PAGE} cannot be written: {os_problem(error)}")


def draw(folder: Path, rollouts: Path) -> Path | None:
    """`rollouts.html` in the run's folder, of a file as objectives/rollouts.py writes; None where that has nothing.

    Raises OSError where it cannot be read or written; what was there stays.
    """
    steps = _by_step(rollouts)
    chosen = {step: _read(steps[step]) for step in spread(sorted(steps), _STEPS)}
    shown = [_step(step, lines) for step, lines in reversed(chosen.items()) if lines]
    if not shown:
        return None
    path = folder / PAGE
    picture = curve.picture(folder)
    said = {
        "file": rollouts.name,
        "steps": shown,
        "written": len(steps),
        "picture": picture[0].element(picture[1]) if picture else "",
    }
    pages.write(path, (__package__, "page.html.jinja"), said)
    return path


def by_prompt(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Each group of completions with what was asked, of a conversation what was said last."""
    found = []
    for prompt, group in groupby(lines, lambda line: json.dumps(line["prompt"])):
        asked = json.loads(prompt)
        found.append((asked if isinstance(asked, str) else str(asked[-1].get("content") or prompt), list(group)))
    return found


def _step(step: int, lines: Sequence[Line]) -> dict[str, Any]:
    groups = by_prompt(lines)
    most = max(abs(line["advantage"]) for line in lines) or 1.0
    return {
        "step": step,
        "reward": sum(line["reward"] for line in lines) / len(lines),
        "prompts": len(groups),
        "completions": len(lines),
        "groups": [_group(asked, group, most) for asked, group in spread(groups, _PROMPTS)],
    }


def _group(asked: str, lines: Sequence[Line], most: float) -> dict[str, Any]:
    """The best first. `most`: the largest advantage, or disadvantage, of the step."""
    ranked = sorted(lines, key=lambda line: -line["reward"])
    return {
        "asked": clipped(asked),
        "written": len(lines),
        "completions": [
            {
                **line,
                "text": clipped(line["completion"]),
                "part": round(50 * min(1.0, abs(line["advantage"]) / most), 1),  # per cent of a bar's width
                "rewards": line["rewards"] if len(line["rewards"]) > 1 else {},
            }
            for line in spread(ranked, _COMPLETIONS)
        ],
    }


def _by_step(rollouts: Path) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    with rollouts.open("rb") as file:
        for raw in file:
            if step := _STEP.match(raw):
                found.setdefault(int(step[1]), []).append(raw)
    return found


def _read(raws: Sequence[bytes]) -> list[Line]:
    """Up to one that is damaged, as the last may be, half written."""
    return [line for line in takewhile(lambda line: line is not None, map(read, raws)) if line]
