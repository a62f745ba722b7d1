"""Plots of a report: plain values in, matplotlib Figures out (the extra `report`).

One name has one colour in all plots of a report (`plot_style.colours`). Where a value is uncertain its bar or point
carries an error bar: minimum to maximum for times, two standard errors for quality. A value that is missing leaves a
gap, and a plot without any value is None.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pronk.measure.plot_style import (
    INK,
    MARKERS,
    ORIGINAL,
    Value,
    figure_of,
    line,
    logarithmic,
    reach,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 16  # that an axis has room for
THEORY = ", theory"  # ends the names of dashed lines
Series = Mapping[str, Value | None]  # by the name of a variant, in the order of the report


def bars(panels: Sequence[tuple[str, Series]], colour: Mapping[str, str]) -> Figure | None:
    """Horizontal bars, a panel for each (title with its unit, values): a bar a name, its value at its end."""
    panels = [(title, series) for title, series in panels if any(series.values())]
    if not panels:
        return None
    names = list(dict.fromkeys(name for _, series in panels for name in series))
    with figure_of(9.0, 0.9 + 0.36 * len(names), 1, len(panels), sharey=True) as (figure, axes):
        for axis, (title, series) in zip(axes, panels, strict=True):
            for row, name in enumerate(names):
                if value := series.get(name):
                    _bar(axis, row, value, colour[name])
            _finish_bars(axis, title, names, [v for v in series.values() if v])
    return figure


def paired_bars(
    panels: Sequence[tuple[str, Series, Series]], colour: Mapping[str, str], words: tuple[str, str]
) -> Figure | None:
    """Two bars a name: (title, the pale upper ones, the full lower ones); `words` say in a legend which is which."""
    panels = [panel for panel in panels if any(panel[1].values()) or any(panel[2].values())]
    if not panels:
        return None
    names = list(dict.fromkeys(name for panel in panels for series in panel[1:] for name in series))
    with figure_of(9.0, 1.25 + 0.52 * len(names), 1, len(panels), sharey=True) as (figure, axes):
        for axis, (title, pale, full) in zip(axes, panels, strict=True):
            for row, name in enumerate(names):
                if value := pale.get(name):
                    _bar(axis, row - 0.19, value, colour[name], height=0.32, pale=True)
                if value := full.get(name):
                    _bar(axis, row + 0.19, value, colour[name], height=0.32)
            _finish_bars(axis, title, names, [v for series in (pale, full) for v in series.values() if v])
        from matplotlib.patches import Patch

        keys = [Patch(facecolor="none", edgecolor=ORIGINAL, hatch="/////"), Patch(facecolor=ORIGINAL)]
        figure.legend(keys, words, loc="outside upper right", ncols=2)
    return figure


def histogram(
    counts: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    means: Mapping[str, float | None],
    colour: Mapping[str, str],
    *,
    label: str,
) -> Figure | None:
    """How often each value occurred, over a logarithmic axis: {name: (edges [N + 1], counts [N])}.

    Bins that touch zero or infinity have no place on the axis and are left out; shares are of all rows all the same.
    """
    drawn = {name: _bins(*pair) for name, pair in counts.items()}
    if not any(drawn.values()):
        return None
    with figure_of(9.0, 3.4) as (figure, (axis,)):
        for name, bins in drawn.items():
            if bins is None:
                continue
            edges, shares = bins
            axis.stairs(shares, edges, fill=True, color=colour[name], alpha=0.16)
            axis.stairs(shares, edges, color=colour[name], linewidth=1.6, label=name)
            if mean := means.get(name):
                axis.axvline(mean, color=colour[name], linestyle=(0, (1, 2)), linewidth=1.4)
        axis.set_xscale("log")
        logarithmic(axis.xaxis)
        axis.set_xlabel(f"{label}; dotted: the mean")
        axis.set_ylabel("share of tokens (%)")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=8)
    return figure


def scatter(
    points: Mapping[str, tuple[float, Value]],
    colour: Mapping[str, str],
    *,
    x: str,
    y: str,
    floor: float | None = None,
    floor_label: str = "",
) -> Figure | None:
    """A labelled point for each name at (x, y), y logarithmic; `floor` is a line under which nothing can be told."""
    points = {name: point for name, point in points.items() if point[1].value > 0}
    if not points:
        return None
    with figure_of(9.0, 3.6) as (figure, (axis,)):
        for n, (name, (across, up)) in enumerate(points.items()):
            axis.errorbar(
                across, up.value, yerr=reach(up), fmt=MARKERS[n % len(MARKERS)], markersize=8, capsize=3,
                color=colour[name],
            )  # fmt: skip
        axis.set_yscale("log")
        logarithmic(axis.yaxis)
        lowest, highest = min(up.value for _, up in points.values()), max(up.value for _, up in points.values())
        if floor is not None and floor > 0:
            axis.axhline(floor, color=ORIGINAL, linestyle=(0, (4, 3)), linewidth=1)
            axis.annotate(
                floor_label, (0, floor), (4, 4), xycoords=("axes fraction", "data"), textcoords="offset points",
                fontsize=8.5,
            )  # fmt: skip
            lowest = min(lowest, floor)
        axis.set_ylim(lowest / 2.5, highest * 3.5)
        axis.set_xlim(0, max(across for across, _ in points.values()) * 1.15)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid()
        _label_points(axis, {name: (across, up.value) for name, (across, up) in points.items()})
    return figure


def lines(
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[tuple[float, Value]]]]],
    colour: Mapping[str, str],
) -> Figure | None:
    """Values along an axis, one line a name: a panel for each (title, label of the axis, {name: [(x, value)]})."""
    panels = [panel for panel in panels if any(panel[2].values())]
    if not panels:
        return None
    with figure_of(9.0, 3.4, 1, len(panels)) as (figure, axes):
        for axis, (title, across, series) in zip(axes, panels, strict=True):
            for n, (name, points) in enumerate(series.items()):
                if name.endswith(THEORY):  # no point of it was measured, and its colour says whose it is
                    across_, up = zip(*((x, value.value) for x, value in points), strict=True)
                    axis.plot(across_, up, color=colour[name], linestyle=(0, (4, 3)), linewidth=1)
                else:
                    line(axis, name, points, colour[name], MARKERS[n % len(MARKERS)])
            ticks = sorted({x for points in series.values() for x, _ in points})
            if ticks and ticks[0] > 0:
                axis.set_xscale("log", base=2)
            ticks = ticks[:: -(-len(ticks) // _MOST_TICKS)] if ticks else []
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.margins(x=0.12)
            axis.set_ylim(bottom=0)
            axis.set_title(title)
            axis.set_xlabel(across)
            axis.grid(axis="y")
        _legend(figure, axes)
    return figure


def grouped_bars(
    panels: Sequence[tuple[str, Mapping[str, Sequence[Value | None]]]],
    settings: Sequence[str],
    colour: Mapping[str, str],
) -> Figure | None:
    """Upright bars, a group for each setting: a panel for each (title with its unit, {way: a value a setting})."""
    panels = [(title, ways) for title, ways in panels if any(value for values in ways.values() for value in values)]
    if not panels:
        return None
    with figure_of(9.0, 3.3, 1, len(panels)) as (figure, axes):
        for axis, (title, ways) in zip(axes, panels, strict=True):
            width = 0.8 / len(ways)
            for n, (way, values) in enumerate(ways.items()):
                for place, value in enumerate(values):
                    if value:
                        axis.bar(
                            place + (n - (len(ways) - 1) / 2) * width, value.value, width * 0.9, color=colour[way],
                            yerr=reach(value), error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2}, label=way,
                        )  # fmt: skip
            axis.set_xticks(range(len(settings)), [_wrapped(s) for s in settings])
            axis.set_title(title)
            axis.set_xlim(-0.6, len(settings) - 0.4)
            axis.grid(axis="y")
        _legend(figure, axes)
    return figure


# Parts


def _bar(axis: Axes, row: float, value: Value, colour: str, height: float = 0.62, pale: bool = False) -> None:
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": colour, "hatch": "/////"} if pale else {"color": colour}
    axis.barh(
        row, value.value, height, xerr=reach(value), error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2.5}, **look
    )
    end = max(value.value, value.high or 0)
    axis.annotate(short(value.value), (end, row), (5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _finish_bars(axis: Axes, title: str, names: Sequence[str], values: Sequence[Value]) -> None:
    axis.set_title(title)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(0, max(max(v.value, v.high or 0) for v in values) * 1.16 or 1)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="x")
    axis.spines["bottom"].set_visible(False)
    axis.spines["left"].set_visible(True)


def _label_points(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """A name beside each point: right or left of it, above or below, where it meets no other name or point."""
    x0, x1 = axis.get_xlim()
    y0, y1 = (math.log(y) for y in axis.get_ylim())
    place = {  # in points of type on axes of about 560 x 200
        name: (560 * (x - x0) / (x1 - x0), 200 * (math.log(y) - y0) / (y1 - y0)) for name, (x, y) in points.items()
    }
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in place.values()]
    for name, (x, y) in place.items():
        width = 6.6 * len(name)
        boxes = [(dx, dy, side, x + dx - (width if dx < 0 else 0), y + dy)
                 for dy in (3, -13) for dx, side in ((8, "left"), (-8, "right"))]  # fmt: skip

        def collisions(left: float, bottom: float, width: float = width) -> int:
            return sum(left < x1 and x0 < left + width and bottom < y1 and y0 < bottom + 11 for x0, y0, x1, y1 in taken)

        dx, dy, side, left, bottom = min(boxes, key=lambda box: collisions(*box[3:]))
        taken.append((left, bottom, left + width, bottom + 11))
        axis.annotate(
            name, points[name], (dx, dy), textcoords="offset points", ha=side, fontweight="bold", annotation_clip=False
        )


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One above all panels: each name once."""
    named: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="outside upper right", ncols=8)


def _bins(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Edges and shares in percent of the bins that a logarithmic axis has room for, from the first used to the last."""
    total = sum(counts)
    if total <= 0 or len(edges) != len(counts) + 1:
        return None
    kept = [n for n, count in enumerate(counts) if count > 0 and 0 < edges[n] < edges[n + 1] < math.inf]
    if not kept:
        return None
    first, last = kept[0], kept[-1] + 1
    return list(edges[first : last + 1]), [100 * count / total for count in counts[first:last]]


def _wrapped(setting: str, width: int = 14) -> str:
    return "\n".join(textwrap.wrap(setting, width)) or setting
