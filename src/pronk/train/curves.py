"""curves.html: the page of a run's curves, and of what its model says to the same prompts as it learns.

It is made anew at each look at held-out data and at each checkpoint, and while the run goes on it loads itself again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from pronk import terminal
from pronk.drawing import chart
from pronk.drawing.chart import Axis
from pronk.drawing.svg import Drawing, number
from pronk.errors import os_problem
from pronk.train import pages, samples
from pronk.train.folder import read_metrics

PAGE = "curves.html"  # in the run's folder
_HELD_OUT = "held_out_"
_SPEED = "tokens a second"
_TITLES = {"grad_norm": "length of the gradient", "lr": "learning rate"}
_FIRST, _LAST, _UNSHOWN = ("loss",), ("grad_norm", "lr", _SPEED), ("step", "epoch", "tokens", "targets", "seconds")
_WIDTH, _HEIGHT = 440, 190  # of a figure: at least so wide it is shown on a telephone, too
_POINTS, _STEPS = 400, 10  # of a line; of a mean, at least
_PROMPTS, _LOOKS = 8, 12  # of samples
_LEARNED, _OTHER = "var(--learned)", "var(--held)"  # Okabe and Ito's, brighter on a dark page

Line = list[tuple[int, float]]


class Curve(NamedTuple):
    name: str
    learned: Line  # of each step
    held_out: Line


def refresh(folder: Path, steps: int, note: Callable[[str], None], *, done: bool) -> None:
    """`steps`: of the whole run. `note` hears of a page that cannot be written: the run is worth more."""
    try:
        draw(folder, steps, done=done)
    except OSError as error:
        note(f"{folder / PAGE} cannot be written: {os_problem(error)}")


def draw(folder: Path, steps: int, *, done: bool) -> Path | None:
    """The page; None where there is nothing to show.

    Raises OSError where files cannot be read or written; what was there stays.
    """
    metrics = read_metrics(folder)
    made = [line for line in metrics if _number(line.get("loss")) is not None]
    found = curves(metrics)
    if not found:
        return None
    window = max(_STEPS, len(made) // 40)
    said = {
        "done": done,
        "step": metrics[-1]["step"],
        "steps": steps,
        "epoch": _number(made[-1].get("epoch")) if made else None,
        "seconds": sum(_number(line.get("seconds")) or 0 for line in made),
        "tokens": sum(_number(line.get("tokens")) or 0 for line in made),
        "window": window,
        "figures": [_figure(one, window, (0, max(1, metrics[-1]["step"]))) for one in found],
        "held_out": any(one.held_out for one in found),
        "prompts": _samples(samples.read(folder)),
        "file": samples.FILE,
    }
    path = folder / PAGE
    pages.write(path, (__package__, "curves.html.jinja"), said)
    return path


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """The loss, then what else the objective shows, then what all runs have."""
    lines: dict[str, Line] = {}
    for line in metrics:
        for name, value in line.items():
            if (value := _number(value)) is not None:
                lines.setdefault(name, []).append((line["step"], value))
        tokens, seconds = _number(line.get("tokens")), _number(line.get("seconds"))
        if tokens is not None and seconds:
            lines.setdefault(_SPEED, []).append((line["step"], tokens / seconds))
    names = dict.fromkeys(name.removeprefix(_HELD_OUT) for name in lines)
    own = [name for name in names if name not in (*_FIRST, *_LAST, *_UNSHOWN)]
    every = (Curve(name, lines.get(name, []), lines.get(_HELD_OUT + name, [])) for name in (*_FIRST, *own, *_LAST))
    return [one for one in every if one.learned or one.held_out]


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _figure(curve: Curve, window: int, span: tuple[int, int]) -> dict[str, Any]:
    said = []
    if curve.learned:
        said.append(number(curve.learned[-1][1]))
    if curve.held_out:
        said.append(f"held out {number(curve.held_out[-1][1])}")
    if curve.name == "loss" and len(curve.held_out) > 1:
        step, best = min(curve.held_out[1:], key=lambda point: point[1])
        said[-1] += f" (the best {number(best)}, of step {step:,})"
    title = _TITLES.get(curve.name, curve.name)
    return {
        "title": terminal.shown(title),
        "said": ", ".join(said),
        "picture": _drawing(curve, window, span).element(f"{title}: {', '.join(said)}"),
    }


def _drawing(curve: Curve, window: int, span: tuple[int, int]) -> Drawing:
    values = [value for line in (curve.learned, curve.held_out) for _, value in line]
    across = Axis(span[0], span[1], chart.whole(*span))
    up = replace(chart.linear(values, zero=curve.name in _LAST, most=4), label="")
    drawing, (panel,) = chart.chart([("", across, up)], _HEIGHT, width=_WIDTH)
    if curve.learned:
        noisy = curve.name != "lr"
        if noisy:
            drawing.line(panel.at(thinned(curve.learned)), _LEARNED, 1.2, opacity=0.4)
        drawing.line(panel.at(means(curve.learned, window if noisy else 1)), _LEARNED, 2.4)
    drawing.line(panel.at(thinned(curve.held_out)), _OTHER)
    for point in panel.at(pages.spread(curve.held_out, 40)):
        drawing.marker(*point, _OTHER, size=4)
    return drawing


def thinned(line: Line, most: int = _POINTS) -> Line:
    """Of each stretch of a long line its lowest and its highest point: what leaps out is not lost."""
    if len(line) <= most:
        return line
    found: Line = []
    stretches = most // 2
    for n in range(stretches):
        part = line[n * len(line) // stretches : (n + 1) * len(line) // stretches]
        found += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return found


def means(line: Line, window: int, most: int = _POINTS) -> Line:
    """Of so many steps up to each; of a long line at some of its steps, the last among them."""
    sums = [0.0, *accumulate(value for _, value in line)]
    found = []
    for end in pages.spread(range(1, len(line) + 1), most):
        begin = max(0, end - window)
        found.append((line[end - 1][0], (sums[end] - sums[begin]) / (end - begin)))
    return found


def _samples(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By prompt, what was said to it, the newest first."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(line["prompt"], []).append(line)
    return [
        {
            "asked": pages.clipped(asked),
            "said": [
                {"step": line["step"], "kept": line.get("kept") is True, "text": pages.clipped(line["text"])}
                for line in reversed(pages.spread(said, _LOOKS))
            ],
            "written": len(said),
        }
        for asked, said in pages.spread(list(by_prompt.items()), _PROMPTS)
    ]
