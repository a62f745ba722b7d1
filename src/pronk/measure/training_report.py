"""training.json rendered: TRAINING.md and training.svg. Reads the JSON and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronk import terminal
from pronk.drawing import chart, svg
from pronk.drawing.chart import Key
from pronk.measure import schema
from pronk.measure.formatting import NONE, plain
from pronk.measure.plots import ORIGINAL, PALETTE
from pronk.measure.report import pages, write
from pronk.measure.report.charts import Picture
from pronk.measure.report.tables import Cell, Table

NAME = "training.json"
PAGE, PLOT = "TRAINING.md", "training.svg"
_KINDS = {
    "parameters": "parameters", "activations": "activations", "gradients": "gradients", "optimizer": "optimizer state",
    "peak": "peak memory", "compute": "compute a token", "time": "time a token",
}  # fmt: skip
_COLUMNS = ("peak, MB", "foretold", "s a step", "tokens/s", "trained", "loss")
_STACKED = {"parameters": PALETTE[0], "optimizer": PALETTE[1], "gradients": PALETTE[2], "activations": PALETTE[5],
            "logits": PALETTE[3]}  # fmt: skip


def render(folder: Path) -> str:
    """Write the page and the plot; gives the tables as text. Raises BadFile."""
    anew = "pronk compare-training --overwrite measures anew"
    report = schema.visible(schema.read(folder / NAME, schema.TRAINING, anew=anew))
    drawn, lengths = picture(report), sorted(report["lengths"])
    changed = [
        (plain(one["name"]), [Cell(_change(one.get("changes"), kind)) for kind in _KINDS])
        for one in report["techniques"]
    ]
    points = [(plain(one["name"]), [Cell(said) for said in _point(one)]) for one in report["points"]]
    changes, settings = Table(list(_KINDS.values()), changed), Table(_COLUMNS, points)
    if drawn:
        write(folder / PLOT, drawn.file())
    said = {"report": report, "changes": changes, "settings": settings, "picture": drawn, "plot": PLOT,
            "tokens": " to ".join(dict.fromkeys((str(lengths[0]), str(lengths[-1]))))}  # fmt: skip
    write(folder / PAGE, pages.filled(f"{PAGE}.jinja", said))
    tables = (changes.as_text("Technique"), settings.as_text("Setting"))
    return "\n\n".join(terminal.table(rows, right=range(1, len(rows[0]))) for rows in tables)


def _change(changes: Mapping[str, Any] | None, kind: str) -> str:
    """Of a kind of memory or work, beside the same training without the technique."""
    if changes is None:
        return NONE
    arrow, times = changes[kind]["arrow"], changes[kind].get("times")
    return arrow if times is None or arrow == "=" else f"{arrow} {times:.2f}×"


def _point(point: Mapping[str, Any]) -> tuple[str, ...]:
    planned = point.get("planned_bytes")
    if "out_of_memory" in point:
        foretold = f"{planned / 1e6:,.0f} MB" if planned else NONE
        return f"out of memory: {plain(point['out_of_memory'], 200)}", foretold, *[NONE] * 4
    peak, seconds = point["peak_bytes"]["median"], point["seconds"]
    losses = [point["loss"].get(key) for key in ("first", "last")]
    return (
        f"{peak / 1e6:,.0f}",
        f"{planned / peak - 1:+.0%}" if planned and peak else NONE,
        f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})",
        f"{point['tok_s']:.0f}",
        f"{point['trained_share']:.2%}",
        ", ".join(NONE if loss is None else f"{loss:.4f}" for loss in losses),
    )


def picture(report: Mapping[str, Any]) -> Picture | None:
    """Bars a setting: what the peak is made of, and the time of a token."""
    points = [point for point in report["points"] if point.get("at_peak")]
    if not points:
        return None
    names = chart.named([plain(point["name"]) for point in points])
    peaks = [point["peak_bytes"]["median"] / 1e9 for point in points]
    sums = [sum(point["at_peak"][kind] for kind in _STACKED) / 1e9 for point in points]
    seconds = [1e3 * point["seconds"]["median"] / point["tokens"] for point in points]
    keys = [Key("process, measured", svg.INK, "tick"), *(Key(kind, colour) for kind, colour in _STACKED.items())]
    drawing, (memory, time) = chart.chart([
        ("Memory of tensors at the peak, GB", chart.linear([*peaks, *sums], most=5), names),
        ("Time, ms a token", chart.linear(seconds, room=chart.beside(seconds), most=5), replace(names, ticks={})),
    ], 25 * len(points), keys)  # fmt: skip
    said = []
    for row, (point, peak, each) in enumerate(zip(points, peaks, seconds, strict=True)):
        ys, left = (row - 0.31, row + 0.31), 0.0
        for kind, colour in _STACKED.items():
            right = left + point["at_peak"][kind] / 1e9
            memory.bar((left, right), ys, colour)
            left = right
        drawing.line(memory.at([(peak, y) for y in ys]), svg.INK, 2, kind="peak")
        time.bar((0, each), ys, ORIGINAL)
        time.label(each, row, svg.number(each))
        said.append(f"{plain(point['name'])}: {svg.number(peak)} GB, {svg.number(each)} ms a token")
    return Picture(drawing, "Peak memory and time of a step in each setting", f"{'; '.join(said)}.")
