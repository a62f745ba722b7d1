"""Plots of `pronk outliers`: a heat map of a survey, and a sweep over thresholds. See plots.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pronk.drawing import chart, svg
from pronk.drawing.chart import Axis, Panel
from pronk.drawing.svg import Drawing
from pronk.measure.figures import Value, as_value
from pronk.measure.plots import ORIGINAL, PALETTE, line

_MOST_COLUMNS = 480  # that a picture has room for
_LEVELS = 24
_HEAT = ((0x9C, 0xC9, 0xE8), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00))  # from few to most


def heat_map(counts: Any, title: str) -> Drawing:
    """How often each column passed, a row a layer: counts [layers, columns], any array of numbers from 0 up.

    Colours are logarithmic, and zero has none. Where there are more columns than pixels, neighbours share a cell, which
    shows the largest of them, so that a single column cannot vanish. The columns that passed most
    often, over all layers, are named above the map.
    """
    import numpy as np

    counts = np.asarray(counts, np.float64)
    rows, columns = counts.shape
    together = -(-columns // _MOST_COLUMNS)
    pooled = np.pad(counts, ((0, 0), (0, -columns % together))).reshape(rows, -1, together).max(axis=2)
    colours = chart.logarithmic(1, max(counts.max(initial=0), 2), "times passed")
    levels = [[math.ceil(_LEVELS * max(colours.part(cell), 1e-9)) if cell > 0 else 0 for cell in row] for row in pooled]

    label = "column" + (f" (a cell shows the largest of {together} neighbours)" if together > 1 else "")
    across = Axis(-0.5, pooled.shape[1] * together - 0.5, chart.whole(0, columns - 1), label, grid=False)
    up = Axis(rows - 0.5, -0.5, {row: str(row) for row in range(0, rows, max(1, -(-rows // 12)))}, "layer", grid=False)
    drawing, (panel,) = chart.chart([("", across, up)], max(60, 9 * rows), above=38, right=90 * bool(counts.any()))
    drawing.text(12, 24, svg.fitted(title, svg.WIDTH - 24, bold=True), "start", bold=True)
    size = f"{panel.width / pooled.shape[1]:.6g} {panel.height / rows:.6g}"
    place = f"translate({panel.left:.1f} {panel.top}) scale({size})"
    drawing.parts.append(f'<g transform="{place}" style="stroke-width: 1; shape-rendering: crispEdges">')
    runs = [run for at, row in enumerate(levels) for run in _runs(row, at)]
    for level in range(1, _LEVELS + 1):
        if path := "".join(stroke for found, stroke in runs if found == level):
            drawing.parts.append(f'<path class="cells" d="{path}" style="stroke: {_colour(level)}"/>')
    drawing.parts.append("</g>")
    if counts.any():
        _name_columns(panel, counts.sum(axis=0))
        _colour_bar(panel, colours)
    else:
        drawing.text(panel.left + panel.width / 2, panel.top + panel.height / 2 + 4, "no column passed")
    return drawing


def sweep(points: Sequence[Mapping[str, Any]], knee: float | None = None) -> Drawing:
    """KLD above and speed below, over thresholds: evenly spaced whatever they are, for 0 and inf are among them.

    Of prefill: decoding reads all weights for each token, whatever is computed apart. `points`: as of sweep.py, where
    figures may be None; `knee` is one of the thresholds.
    """
    thresholds = [point["threshold"] for point in points]
    klds = [(float(n), Value(kld)) for n, point in enumerate(points) if (kld := point["kld"]) and kld > 0]
    rates = [(float(n), rate) for n, point in enumerate(points) if (rate := as_value(point["prefill_tok_s"]))]
    found = [value.value for _, value in klds]
    above = chart.logarithmic(min(found) / 2, max(found) * 2) if found else Axis(0, 1)
    names: dict[float, str] = {n: "∞" if math.isinf(one) else f"{one:g}" for n, one in enumerate(thresholds)}
    label = "threshold: activations over it are computed in 32 bits"
    across = Axis(-0.3, len(thresholds) - 0.7, names, label, grid=False)
    below = chart.linear(value.top for _, value in rates)
    panels = [
        ("Divergence from f32: mean KLD (nats)", replace(across, label=""), above),
        ("Speed of prefill (tokens/s)", across, below),
    ]
    drawing, drawn = chart.chart(panels, 150, stacked=True)
    if knee is not None and knee in thresholds:
        at, said = thresholds.index(knee), f"knee: {knee:g}"
        for panel in drawn:
            panel.rule(x=at, colour=ORIGINAL)
        x = min(drawn[0].x(at) + 7, svg.WIDTH - 8 - svg.width_of(said, bold=True))
        drawing.text(x, drawn[0].top + 12, said, "start", bold=True)
    for n, (panel, values) in enumerate(zip(drawn, (klds, rates), strict=True)):
        line(panel, values, PALETTE[n], n)
    return drawing


def _runs(row: Sequence[int], at: int) -> list[tuple[int, str]]:
    """The cells of row `at`: a level, and as path data a stroke, for each run of neighbours."""
    runs = [list(run) for _, run in groupby(enumerate(row), key=lambda cell: cell[1])]
    return [(run[0][1], f"M{run[0][0]} {at}.5h{len(run)}") for run in runs]


def _colour(level: int) -> str:
    place = 2 * (level - 1) / (_LEVELS - 1)
    low, high, part = (*_HEAT[:2], place) if place < 1 else (*_HEAT[1:], place - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def _colour_bar(panel: Panel, colours: Axis) -> None:
    """Right of the map: which colour is how often."""
    x, bar, height = panel.left + panel.width + 14, replace(panel, up=colours), panel.height / _LEVELS
    for level in range(_LEVELS):
        top = panel.top + panel.height - (level + 1) * height
        panel.drawing.rect(x, top, 12, height + 0.6, _colour(level + 1), kind="key")
    for tick, said in colours.ticks.items():
        panel.drawing.text(x + 18, bar.y(tick) + 4.2, said, "start", size=svg.SMALL, fill=svg.SOFT)
    panel.drawing.text(svg.WIDTH - 8, panel.top - 12, colours.label, "end", size=svg.SMALL, fill=svg.SOFT)


def _name_columns(panel: Panel, sums: Any, most: int = 6) -> None:
    """The columns that passed most often, above the map; of those too near to each other the first."""
    named: list[int] = []
    for column in map(int, sums.argsort(kind="stable")[::-1]):
        if sums[column] > 0 and len(named) < most and all(abs(column - other) > 0.06 * len(sums) for other in named):
            named.append(column)
            panel.drawing.text(panel.x(column), panel.top - 6, str(column), size=svg.SMALL)
