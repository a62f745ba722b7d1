"""Plots of a report: plain values in, drawings out.

One name has one colour in all plots of a report (`colours`). Where a value is uncertain its bar or point
carries an error bar: minimum to maximum for times, two standard errors for quality. A value that is missing leaves a
gap, and a plot without any value is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from types import MappingProxyType
from typing import Any

from pronk.drawing import chart, svg
from pronk.drawing.chart import Axis, Key
from pronk.drawing.svg import Drawing
from pronk.measure.figures import Value

# Okabe and Ito's colours, which people with any of the common colour blindnesses tell apart, in an order that keeps
# neighbours far from each other; yellow, which vanishes on paper, is darker, and a purple is added. The original is
# grey: it is the ground.
ORIGINAL = "#7A8190"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B5A642", "#AA3377")
_MOST_TICKS = 16  # that an axis has room for
THEORY = ", theory"  # ends the names of dashed lines
Colour = Mapping[str, str]
# Title with its unit, label of the axis, and of each series its values: by the name of a variant or a setting, in the
# order of the report, or by where they lie on the axis.
Panel = tuple[str, str, Mapping[str, Mapping[Any, Value | None]]]


def colours(
    names: Sequence[str], original: str | None = None, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """A colour for each name; the original's is the grey one. After eight the palette begins again.

    `known`: the colours that some have elsewhere. They keep these, and no other gets one while there is a free one.
    """
    have = {name: known[name] for name in names if name in known} | ({} if original is None else {original: ORIGINAL})
    others = [name for name in dict.fromkeys(names) if name not in have]
    free = [colour for colour in PALETTE if colour not in have.values()]
    return have | dict(zip(others, cycle(free or PALETTE), strict=False))


def bars(panels: Sequence[Panel], colour: Colour, *, by_series: bool = False) -> Drawing | None:
    """Horizontal bars: a name has one of each series, in its own colour and all but the last pale, or `by_series` in
    that of the series. A legend tells series apart where there are several."""
    if not (panels := _drawn(panels)):
        return None
    names = list(dict.fromkeys(name for _, _, every in panels for one in every.values() for name in one))
    series = list(dict.fromkeys(key for _, _, every in panels for key in every))
    rows = chart.named(names)
    axes: list[tuple[str, Axis, Axis]] = []
    for title, label, every in panels:
        found = [value for one in every.values() for value in one.values() if value]
        room = chart.beside(value.value for value in found)
        across = chart.linear((value.top for value in found), label, room=room, most=5)
        axes.append((title, across, replace(rows, ticks={}) if axes else rows))
    pale = set() if by_series else set(series[:-1])
    keys = [Key(key, colour[key] if by_series else ORIGINAL, "pale" if key in pale else "bar") for key in series]
    height = (14 + (20 if len(series) < 3 else 16) * len(series)) * len(names)
    drawing, drawn = chart.chart(axes, height, keys if len(keys) > 1 else ())
    step = 0.8 / len(series)
    for panel, (_, _, every) in zip(drawn, panels, strict=True):
        for n, (key, one) in enumerate(every.items()):
            for row, name in enumerate(names):
                if value := one.get(name):
                    at = row + (n - (len(series) - 1) / 2) * step
                    fill = colour[key if by_series else name]
                    panel.bar((0, value.value), (at - 0.4 * step, at + 0.4 * step), fill, key in pale)
                    if ends := value.ends:
                        panel.error((ends[0], at), (ends[1], at))
                    panel.label(value.top, at, svg.number(value.value))
    return drawing


def histogram(
    counts: Mapping[str, tuple[Sequence[float], Sequence[float]]], means: Mapping[str, float | None], colour: Colour,
    label: str,
) -> Drawing | None:  # fmt: skip
    """How often each value occurred, over a logarithmic axis: {name: (edges [N + 1], counts [N])}.

    Bins that touch zero or infinity have no place on the axis and are left out; shares are of all rows all the same.
    """
    bins = {name: found for name, pair in counts.items() if (found := _bins(*pair))}
    if not bins:
        return None
    edges = [edge for found, _ in bins.values() for edge in found]
    across = chart.logarithmic(min(edges), max(edges), f"{label}; dotted: the mean")
    up = chart.linear((share for _, shares in bins.values() for share in shares), "share of tokens (%)")
    drawing, (panel,) = chart.chart([("", across, up)], 240, [Key(name, colour[name], "line") for name in bins])
    for name, (at, shares) in bins.items():
        outline = [(at[0], 0.0)]
        for left, right, share in zip(at[:-1], at[1:], shares, strict=True):
            outline += [(left, share), (right, share)]
        points = panel.at([*outline, (at[-1], 0.0)])
        drawing.area(points, colour[name], 0.16)
        drawing.line(points, colour[name], 1.8)
        if mean := means.get(name):
            panel.rule(x=mean, colour=colour[name], dash=svg.DOTTED)
    return drawing


def scatter(
    points: Mapping[str, tuple[float, Value]], colour: Colour, *, x: str, y: str, floor: float | None = None,
    floor_label: str = "",
) -> Drawing | None:  # fmt: skip
    """A labelled point for each name at (x, y), y logarithmic; `floor` is a line under which nothing can be told."""
    points = {name: point for name, point in points.items() if point[1].value > 0}
    if not points:
        return None
    values = [value for _, value in points.values()]
    low = min([value.value for value in values] + ([floor] if floor else []))
    up = chart.logarithmic(low / 2.5, max(max(3.5 * value.value, 1.3 * value.top) for value in values), y)
    drawing, (panel,) = chart.chart([("", chart.linear((at for at, _ in points.values()), x, room=0.15), up)], 260)
    if floor:
        panel.rule(y=floor, colour=ORIGINAL)
        drawing.text(panel.left + 6, panel.y(floor) - 6, floor_label, "start", size=svg.SMALL, fill=svg.SOFT)
    for n, (name, (at, value)) in enumerate(points.items()):
        if ends := value.ends:
            panel.error((at, ends[0]), (at, ends[1]), colour[name], 4)
        drawing.marker(panel.x(at), panel.y(value.value), colour[name], n, 6)
    _label_points(panel, {name: (panel.x(at), panel.y(value.value)) for name, (at, value) in points.items()})
    return drawing


def lines(panels: Sequence[Panel], colour: Colour) -> Drawing | None:
    """Values along an axis, a line a series."""
    if not (panels := _drawn(panels)):
        return None
    axes = []
    for title, label, series in panels:
        points = [(x, value) for each in series.values() for x, value in each.items() if value]
        axes.append((title, _lengths({x for x, _ in points}, label), chart.linear(value.top for _, value in points)))
    names = list(dict.fromkeys(name for _, _, series in panels for name, each in series.items() if any(each.values())))
    keys = [Key(name, colour[name], "line", n) for n, name in enumerate(n for n in names if not n.endswith(THEORY))]
    which = {key.name: key.marker for key in keys}
    if len(keys) < len(names):
        keys.append(Key("theory", svg.SOFT, "line", dash=svg.DASHED))
    drawing, drawn = chart.chart(axes, 230, keys)
    for panel, (_, _, series) in zip(drawn, panels, strict=True):
        for name, each in series.items():
            line(panel, [(x, value) for x, value in each.items() if value], colour[name], which.get(name))
    return drawing


def line(panel: chart.Panel, points: Sequence[tuple[float, Value]], colour: str, marker: int | None) -> None:
    """Points joined by a line, each with its error bar; without a marker it is dashed: nothing of it was measured."""
    at = panel.at((x, value.value) for x, value in points)
    if marker is None:
        return panel.drawing.line(at, colour, 1.4, dash=svg.DASHED)
    panel.drawing.line(at, colour)
    for (x, value), place in zip(points, at, strict=True):
        if ends := value.ends:
            panel.error((x, ends[0]), (x, ends[1]), colour)
        panel.drawing.marker(*place, colour, marker)


# Parts


def _drawn(panels: Sequence[Panel]) -> list[Panel]:
    """Those that hold a value."""
    return [panel for panel in panels if any(any(series.values()) for series in panel[2].values())]


def _lengths(lengths: set[float], label: str) -> Axis:
    """Of lengths, which double more often than not: logarithmic, with a tick at each."""
    at = sorted(lengths)
    room = (at[-1] / at[0]) ** 0.12 if at[0] > 0 else 0.0
    axis = chart.logarithmic(at[0] / room, at[-1] * room) if room else chart.linear(at, zero=False, room=0.12)
    return replace(axis, ticks={x: svg.number(x) for x in at[:: -(-len(at) // _MOST_TICKS)]}, label=label, grid=False)


def _label_points(panel: chart.Panel, points: Mapping[str, tuple[float, float]]) -> None:
    """A name beside each point: right or left of it, above or below, where it meets no other name or point."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in points.values()]
    for name, (x, y) in points.items():
        said = svg.fitted(name, svg.WIDTH / 3, bold=True)
        width = svg.width_of(said, bold=True)
        boxes = [(at, y + dy - 11, at + width, y + dy + 3) for dy in (-5, 14) for at in (x + 10, x - 10 - width)]

        def collisions(box: tuple[float, float, float, float]) -> int:
            left, top, right, bottom = box
            outside = left < panel.left or right > svg.WIDTH - 4
            return 99 * outside + sum(left < x1 and x0 < right and top < y1 and y0 < bottom for x0, y0, x1, y1 in taken)

        taken.append(best := min(boxes, key=collisions))
        panel.drawing.text(best[0], best[3] - 3, said, "start", bold=True)


def _bins(edges: Sequence[float], counts: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Edges and shares in percent of the bins that a logarithmic axis has room for, from the first used to the last."""
    kept = [n for n, count in enumerate(counts) if count > 0 and 0 < edges[n] < edges[n + 1] < math.inf]
    if not kept:
        return None
    first, last, total = kept[0], kept[-1] + 1, sum(counts)
    return list(edges[first : last + 1]), [100 * count / total for count in counts[first:last]]
