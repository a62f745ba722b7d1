"""training.json rendered: TRAINING.md and training.svg. Reads the JSON and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronk.drawing import chart, svg
from pronk.drawing.chart import Key
from pronk.measure.plot_style import ORIGINAL, PALETTE
from pronk.measure.report import markdown, reading, words, write
from pronk.measure.schema import TRAINING

NAME = "training.json"
PAGE, PLOT = "TRAINING.md", "training.svg"
_COLUMNS = (
    ("parameters", "parameters"), ("activations", "activations"), ("gradients", "gradients"),
    ("optimizer", "optimizer state"), ("peak", "peak memory"), ("compute", "compute a token"), ("time", "time a token"),
)  # fmt: skip
_STACKED = (("parameters", PALETTE[0]), ("optimizer", PALETTE[1]), ("gradients", PALETTE[2]),
            ("activations", PALETTE[5]), ("logits", PALETTE[3]))  # fmt: skip


def render(folder: Path) -> str:
    """Write the page and the plot; gives the tables as text. Raises BadFile."""
    report = reading.read(folder / NAME, TRAINING, anew="pronk compare-training --overwrite measures anew")
    arrows, points = _arrows(report), _points(report)
    page = _page(report, arrows, points)
    if picture := plot(report):
        write(folder / PLOT, picture)
        page += f"\n![Peak memory and time of a step in each setting]({PLOT})\n"
    write(folder / PAGE, page)
    return _plain(arrows) + "\n\n" + _plain(points)


def _page(report: Mapping[str, Any], arrows: Sequence[Sequence[str]], points: Sequence[Sequence[str]]) -> str:
    machine, settings = report["machine"], report["settings"]
    lengths = sorted(set(report["lengths"]))
    tokens = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    data = settings.get("data") or "the text that comes with pronk"
    load = "" if machine.get("load") is None else f", load {machine['load']} when it began"
    where = markdown.escaped(
        f"{machine['cpu']}, {machine.get('threads')} threads of {machine['cores']} cores, on {machine.get('device')}; "
        f"torch {machine.get('torch')}, pronk {report['pronk']}{load}. Examples of {tokens} tokens of {data}"
    )
    unfinished = "" if report["finished"] else "**Unfinished:** not everything is measured yet.\n\n"
    return (
        f"# What techniques of training cost and buy: {markdown.escaped(report['model']['name'])}\n\n{unfinished}"
        f"{where}; LoRA of rank {settings['rank']} on all linear layers; AdamW. {settings['rounds']} rounds "
        f"in turns, each setting in a process of its own: one step to warm up, {report['timed_steps']} timed. Made "
        f"{markdown.escaped(report['made'][:10])} by {markdown.code(report['command'])}.\n\n"
        "## Each technique by itself\n\n"
        "↑ more, ↓ less, = the same within 2% (times: where the rounds overlap), and how many times what there was "
        "without it. Memory is the most that live tensors of each kind took in a step, gradients on their way counted "
        "as activations; peak memory is the process's; compute is the operations of matrix products.\n\n"
        f"{_markdown(arrows)}\n\n## All settings\n\n"
        "Seconds are medians of a step, with the least and the most of the rounds; the loss is that of the first and "
        "of the last step, all on the same examples. 8 x 1: eight micro-batches of one example a step.\n\n"
        f"{_markdown(points)}\n"
    )


def _arrows(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["Technique", *(title for _, title in _COLUMNS)]]
    for technique in report["techniques"]:
        changes = technique.get("changes")
        cells = [words.NONE if changes is None else _cell(changes[key]) for key, _ in _COLUMNS]
        rows.append([words.plain(technique["name"]), *cells])
    return rows


def _cell(change: Mapping[str, Any]) -> str:
    times = change.get("times")
    return change["arrow"] if times is None or change["arrow"] == "=" else f"{change['arrow']} {times:.2f}×"


def _points(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["Setting", "peak, MB", "foretold", "s a step", "tokens/s", "trained", "loss"]]
    for point in report["points"]:
        name, planned = words.plain(point["name"]), point.get("planned_bytes")
        if "out_of_memory" in point:
            foretold = f"{planned / 1e6:,.0f} MB" if planned else words.NONE
            rows.append(
                [name, f"out of memory: {words.plain(point['out_of_memory'], 200)}", foretold, *[words.NONE] * 4]
            )
            continue
        peak, seconds = point["peak_bytes"]["median"], point["seconds"]
        rows.append(
            [
                name,
                f"{peak / 1e6:,.0f}",
                f"{planned / peak - 1:+.0%}" if planned and peak else words.NONE,
                f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['max']:.2f})",
                f"{point['tok_s']:.0f}",
                f"{point['trained_share']:.2%}",
                ", ".join(
                    words.NONE if (loss := point["loss"].get(key)) is None else f"{loss:.4f}"
                    for key in ("first", "last")
                ),
            ]
        )
    return rows


def plot(report: Mapping[str, Any]) -> str | None:
    """Bars a setting: what the peak is made of, and the time of a token. An SVG."""
    points = [point for point in report["points"] if point.get("at_peak")]
    if not points:
        return None
    names = chart.named([words.plain(point["name"]) for point in points], downwards=True)
    peaks = [point["peak_bytes"]["median"] / 1e9 for point in points]
    sums = [sum(point["at_peak"][kind] for kind, _ in _STACKED) / 1e9 for point in points]
    seconds = [1e3 * point["seconds"]["median"] / point["tokens"] for point in points]
    keys = [Key("process, measured", svg.INK, "tick"), *(Key(kind, colour) for kind, colour in _STACKED)]
    drawing, (memory, time) = chart.chart([
        ("Memory of tensors at the peak, GB", chart.linear([*peaks, *sums], most=5), names),
        ("Time, ms a token", chart.linear(seconds, room=chart.beside(seconds), most=5), replace(names, ticks={})),
    ], 25 * len(points), keys)  # fmt: skip
    for row, point in enumerate(points):
        ys, left = (row - 0.31, row + 0.31), 0.0
        for kind, colour in _STACKED:
            right = left + point["at_peak"][kind] / 1e9
            memory.bar((left, right), ys, colour)
            left = right
        drawing.line(memory.at([(peaks[row], ys[0]), (peaks[row], ys[1])]), svg.INK, 2, kind="peak")
        time.bar((0, seconds[row]), ys, ORIGINAL)
        at = time.x(seconds[row]) + 6, time.y(row) + 4.2
        drawing.text(*at, svg.number(seconds[row]), "start", size=svg.SMALL)
    said = "; ".join(
        f"{words.plain(point['name'])}: {svg.number(peak)} GB, {svg.number(time)} ms a token"
        for point, peak, time in zip(points, peaks, seconds, strict=True)
    )
    return drawing.file("Peak memory and time of a step in each setting", f"{said}.")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join("| " + " | ".join(markdown.escaped(cell) for cell in line) + " |" for line in lines)


def _plain(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
