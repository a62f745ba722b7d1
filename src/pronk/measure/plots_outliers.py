"""Plots of `pronk outliers`: a heat map of a survey, and a sweep over thresholds. See plots.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pronk.measure.plot_style import ORIGINAL, PALETTE, Value, as_value, figure_of, line, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 480  # that a picture has room for


def heat_map(counts: Any, title: str) -> Figure:
    """How often each column passed, a row a layer: counts [layers, columns], any array of numbers from 0 up.

    Colours are logarithmic, and zero has none. Where there are more columns than pixels, neighbours share a cell, which
    shows the largest of them, so that a single column cannot vanish. The columns that passed most
    often, over all layers, are named above the map.
    """
    import numpy as np

    counts = np.asarray(counts, np.float64)
    rows, columns = counts.shape
    together = -(-columns // _MOST_COLUMNS)
    padded = np.pad(counts, ((0, 0), (0, -columns % together)))
    pooled = padded.reshape(rows, -1, together).max(axis=2)
    with figure_of(9.0, 1.7 + 0.115 * rows) as (figure, (axis,)):
        from matplotlib.colors import LinearSegmentedColormap, LogNorm

        axis.set_title(title, pad=22)
        axis.set_ylabel("layer")
        axis.set_xlabel("column" + (f" (a cell shows the largest of {together} neighbours)" if together > 1 else ""))
        extent = (-0.5, pooled.shape[1] * together - 0.5, rows - 0.5, -0.5)
        image = axis.imshow(
            np.ma.masked_less_equal(pooled, 0), aspect="auto", interpolation="nearest", extent=extent,
            cmap=LinearSegmentedColormap.from_list("passed", ["#9CC9E8", "#0072B2", "#D55E00"]),
            norm=LogNorm(1, max(counts.max(initial=0), 2)),
        )  # fmt: skip
        axis.set_xlim(-0.5, columns - 0.5)
        axis.set_yticks(range(0, rows, max(1, -(-rows // 12))))
        _name_columns(axis, counts.sum(axis=0))
        if counts.any():
            bar = figure.colorbar(image, ax=axis, label="times passed", pad=0.01, aspect=16)
            logarithmic(bar.ax.yaxis)
            bar.outline.set_visible(False)
        else:
            axis.annotate("no column passed", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")
    return figure


def sweep(
    thresholds: Sequence[float],
    kld: Sequence[float | None],
    tok_s: Sequence[Any],
    knee: float | None = None,
    *,
    speed: str = "Speed (tokens/s)",
) -> Figure:
    """KLD above and speed below, over thresholds: evenly spaced whatever they are, for 0 and inf are among them.

    `tok_s` holds numbers or {"median", "min", "max"}, and `speed` says what of; `knee` is one of the thresholds.
    """
    places = range(len(thresholds))
    with figure_of(9.0, 4.6, 2, 1, sharex=True) as (figure, (above, below)):
        points = [(float(n), Value(value)) for n, value in zip(places, kld, strict=True) if value]
        line(above, "", points, PALETTE[0], "o")
        if points:
            above.set_yscale("log")
            logarithmic(above.yaxis, between=(2, 5))
            above.set_ylim(min(v.value for _, v in points) / 2, max(v.value for _, v in points) * 2)
        above.set_title("Divergence from f32: mean KLD (nats)")
        rates = [(float(n), value) for n, given in zip(places, tok_s, strict=True) if (value := as_value(given))]
        line(below, "", rates, PALETTE[1], "s")
        below.set_title(speed)
        below.set_ylim(bottom=0)
        below.set_xticks(list(places), ["∞" if math.isinf(t) else f"{t:g}" for t in thresholds])
        below.set_xlabel("threshold: activations over it are computed in 32 bits")
        for axis in (above, below):
            axis.grid(axis="y")
            if knee is not None and knee in thresholds:
                axis.axvline(list(thresholds).index(knee), color=ORIGINAL, linestyle=(0, (4, 3)), linewidth=1)
        if knee is not None and knee in thresholds:
            above.annotate(
                f"knee: {knee:g}", (list(thresholds).index(knee), 1), (6, -4), xycoords=("data", "axes fraction"),
                textcoords="offset points", va="top", fontweight="bold",
            )  # fmt: skip
    return figure


def _name_columns(axis: Axes, sums: Any, most: int = 6) -> None:
    """The columns that passed most often, above the map; of those too near to each other the first."""
    named: list[int] = []
    for column in sums.argsort(kind="stable")[::-1]:
        if sums[column] > 0 and all(abs(int(column) - other) > 0.045 * len(sums) for other in named):
            named.append(int(column))
        if len(named) == most:
            break
    for column in named:
        axis.annotate(
            str(column), (column, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
