"""The loss curve of a run, drawn from its metrics: what was learned, and what of it holds on data held out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pronk.train.folder import read_metrics

CURVE = "loss.png"
_STEPS = 10  # each is of few examples, and its loss says more of them than of the model
_LEARNED, _HELD_OUT = "#0072B2", "#D55E00"  # Okabe and Ito's


def draw(folder: Path) -> Path | None:
    """`loss.png` in the run's folder; None where matplotlib is not installed, or there is nothing to draw."""
    metrics = read_metrics(folder)
    steps = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    held_out = [(line["step"], line["held_out_loss"]) for line in metrics if "held_out_loss" in line]
    if not steps or find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    numbers, losses = zip(*steps, strict=True)
    means = [sum(losses[max(0, at - _STEPS) : at]) / min(at, _STEPS) for at in range(1, len(losses) + 1)]
    axes.plot(numbers, losses, color=_LEARNED, linewidth=1, alpha=0.35, label="training, each step")
    axes.plot(numbers, means, color=_LEARNED, linewidth=2, label=f"training, mean of {_STEPS} steps")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=_HELD_OUT, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = folder / CURVE
    figure.savefig(path, dpi=150)
    return path
