"""The curves of a run, drawn from its metrics: what was learned, and what of it holds on data held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronk import system
from pronk.drawing import chart
from pronk.drawing.chart import Axis, Key
from pronk.drawing.svg import Drawing
from pronk.train.folder import read_metrics

CURVE = "loss.svg"
_STEPS = 10  # each is of few examples, and its loss says more of them than of the model
_LEARNED, _HELD_OUT = "#0072B2", "#D55E00"  # Okabe and Ito's
_PREFERENCES = {"loss": "loss", "rewards/margins": "margin of rewards", "rewards/accuracies": "accuracy of rewards"}
_JUDGED = {"loss": "loss", "kl": "how far it went (nats)", "rewards/accuracies": "accuracy of rewards"}
_REINFORCED = {"reward": "reward", "mismatch/kl": "mismatch (nats a token)", "completions/tokens": "tokens"}
Line = list[tuple[int, float]]


def draw(folder: Path) -> Path | None:
    """`loss.svg` in the run's folder; None where there is nothing to draw.

    Raises OSError where it cannot be written; what was there stays.
    """
    found = picture(folder)
    if found is None:
        return None
    path = folder / CURVE
    with system.replacing(path) as fresh:
        fresh.write_text(found[0].file("Curves of a training run", found[1]), encoding="utf-8", newline="\n")
    return path


def picture(folder: Path) -> tuple[Drawing, str] | None:
    """With what it says, to be read aloud; None where there is nothing to draw."""
    metrics = read_metrics(folder)
    steps = [line for line in metrics if "loss" in line]
    labels = {"loss": "loss (nats a token)"}
    marks = (("rewards/margins", _PREFERENCES), ("rewards/signed", _JUDGED), ("mismatch/kl", _REINFORCED))
    for mark, others in marks:
        labels = others if steps and mark in steps[0] else labels
    lines = {name: (_line(metrics, name), _line(metrics, f"held_out_{name}")) for name in labels}
    if not all(learned for learned, _ in lines.values()):
        return None
    said = [f"{label}: {each[0][1]:.4g} at first, {each[-1][1]:.4g} at last" + (
        f"; held out {held[0][1]:.4g} and {held[-1][1]:.4g}" if held else "")
        for label, (each, held) in zip(labels.values(), lines.values(), strict=True)]  # fmt: skip
    return _drawing(labels, lines), ". ".join(said) + "."


def _line(metrics: list[dict[str, Any]], name: str) -> Line:
    return [(line["step"], line[name]) for line in metrics if line.get(name) is not None]


def _drawing(labels: Mapping[str, str], lines: Mapping[str, tuple[Line, Line]]) -> Drawing:
    at = [step for both in lines.values() for line in both for step, _ in line]
    low, high = min(at), max(at)
    room = 0.03 * (high - low) or 1.0
    across, panels = Axis(low - room, high + room, chart.whole(low, high)), []
    for name, label in labels.items():
        values = [value for line in lines[name] for _, value in line]
        panels.append(
            ("", replace(across, label="step" * (name == list(labels)[-1])), chart.linear(values, label, zero=False))
        )
    keys = [Key("training, each step", _LEARNED, "line", opacity=0.4),
            Key(f"training, mean of {_STEPS} steps", _LEARNED, "line")]  # fmt: skip
    if any(held_out for _, held_out in lines.values()):
        keys.append(Key("held out", _HELD_OUT, "line", marker=0))
    drawing, drawn = chart.chart(panels, 300 if len(panels) == 1 else 170, keys, stacked=True)
    for panel, (learned, held_out) in zip(drawn, lines.values(), strict=True):
        ends = range(1, len(learned) + 1)
        values = [value for _, value in learned]
        means = [sum(values[max(0, end - _STEPS) : end]) / min(end, _STEPS) for end in ends]
        drawing.line(panel.at(learned), _LEARNED, 1.2, opacity=0.4)
        drawing.line(panel.at((step, mean) for (step, _), mean in zip(learned, means, strict=True)), _LEARNED, 2.4)
        if held_out:
            drawing.line(panel.at(held_out), _HELD_OUT)
        for point in panel.at(held_out):
            drawing.marker(*point, _HELD_OUT)
    return drawing
