"""The curves of a run, drawn from its metrics: what was learned, and what of it holds on data held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pronk.train.folder import read_metrics

CURVE = "loss.png"
_STEPS = 10  # each is of few examples, and its loss says more of them than of the model
_LEARNED, _HELD_OUT = "#0072B2", "#D55E00"  # Okabe and Ito's
_PREFERENCES = {"loss": "loss", "rewards/margins": "margin of rewards", "rewards/accuracies": "accuracy of rewards"}


def draw(folder: Path) -> Path | None:
    """`loss.png` in the run's folder; None where matplotlib is not installed, or there is nothing to draw.

    Raises OSError where it cannot be written; what was there stays.
    """
    metrics = read_metrics(folder)
    steps = [line for line in metrics if "loss" in line]
    if not steps or find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _PREFERENCES if "rewards/margins" in steps[0] else {"loss": "loss (nats a token)"}
    figure = Figure(figsize=(7, 4 if len(panels) == 1 else 2.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(every, panels.items(), strict=True):
        _plot(axes, metrics, name)
        axes.set(ylabel=label)
    every[0].legend(frameon=False)
    every[-1].set(xlabel="step")
    path, fresh = folder / CURVE, folder / f".{CURVE}.part"
    try:
        figure.savefig(fresh, dpi=150, format="png")
        return fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _plot(axes: Any, metrics: Sequence[Mapping[str, Any]], name: str) -> None:
    steps = [(line["step"], line[name]) for line in metrics if name in line]
    held_out = [(line["step"], line[f"held_out_{name}"]) for line in metrics if f"held_out_{name}" in line]
    numbers, values = zip(*steps, strict=True)
    means = [sum(values[max(0, at - _STEPS) : at]) / min(at, _STEPS) for at in range(1, len(values) + 1)]
    axes.plot(numbers, values, color=_LEARNED, linewidth=1, alpha=0.35, label="training, each step")
    axes.plot(numbers, means, color=_LEARNED, linewidth=2, label=f"training, mean of {_STEPS} steps")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=_HELD_OUT, label="held out")
    axes.grid(alpha=0.3)
