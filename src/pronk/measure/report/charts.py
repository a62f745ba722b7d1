"""The pictures of a report: which of its figures each shows, and what is said beneath it and instead of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pronk.drawing.svg import Drawing
from pronk.measure import plots
from pronk.measure.figures import Path, Value, at, value
from pronk.measure.formatting import digits, listed, name_of, plain
from pronk.measure.report import verdict
from pronk.measure.report.tables import Own
from pronk.measure.report.techniques import RATES, title_of, ways_of
from pronk.measure.report.variants import peak_of, unit_of

Variants = Sequence[Own]
# Of a technique: a figure, its title and unit, and what theory has in its place. The first two of which there are
# figures are drawn; memory over what was held before only where theory has it.
KINDS = (
    ("seconds", "Time (s)", 1.0, "theory_s"),
    ("grew_by", "Memory over what was held before (MB)", 1e6, "theory_kv_peak"),
    ("peak_bytes", "Peak memory (MB)", 1e6, ""),
    *((rate, said.capitalize(), 1.0, "") for rate, said in RATES.items()),
)


class Picture(NamedTuple):
    drawing: Drawing
    caption: str
    alt: str  # for those who cannot see it

    def file(self) -> str:
        return self.drawing.file(self.caption, self.alt)

    def element(self) -> str:
        return self.drawing.element(self.alt)


def draw(report: Own, colour: plots.Colour) -> dict[str, Picture]:
    """Those for which there are figures; `colour`: of each variant."""
    variants: Variants = report["variants"]
    (unit, size), (where, peak) = unit_of(variants), peak_of(variants)
    columns = {name_of(v): v for v in variants}
    of, memory = partial(_series, columns), partial(_series, columns, unit=size)

    def rates(path: str, length: str) -> dict[str, dict[Any, Value | None]]:
        return {name: {one[length]: value(one, "tok_s") for one in at(v, path) or ()} for name, v in columns.items()}

    made = {
        "latency": _picture(plots.bars, [
            ("Each token: ITL p50 (ms)", "", {"": of("latency.itl_ms.p50")}),
            ("First token: TTFT (ms)", "", {"": of("latency.ttft_ms")}),
        ], colour, "Latency: shorter is better. Lines reach from the fastest round to the slowest."),
        "speed": _picture(plots.lines, [
            ("Prefill (tokens/s)", "tokens in the prompt", rates("latency.prefill", "tokens")),
            ("Decode (tokens/s)", "tokens of context", rates("latency.decode", "context")),
        ], colour, "Speed against length: higher is better."),
        "memory": _picture(plots.bars, [
            (f"Weights ({unit})", "", {key: memory(f"memory.weights_{key}") for key in ("predicted", "measured")}),
            (f"Peak {where} ({unit})", "", {"predicted": memory("memory.total_predicted"), "measured": memory(peak)}),
        ], colour, "Memory: predicted before loading, and measured."),
        "divergence": _divergence(columns, colour),
        "size": _size(variants, colour, unit, size),
    }  # fmt: skip
    for place, technique in enumerate(report.get("techniques") or (), 1):
        made[f"technique-{place}"] = _technique(technique, colour)
    return {name: picture for name, picture in made.items() if picture}


def _series(columns: Mapping[str, Own], path: Path, unit: float = 1.0) -> dict[str, Value | None]:
    return {name: found and found.in_units(unit) for name, own in columns.items() for found in [value(own, path)]}


def _picture(
    draw: Callable[..., Drawing | None], panels: Sequence[plots.Panel], colour: plots.Colour, caption: str
) -> Picture | None:
    drawing, said = draw(panels, colour), []
    for title, _, series in panels:
        for key, each in series.items():
            values = (f"{name if isinstance(name, str) else f'at {name:g}:'} {digits(one.value)}"
                      for name, one in each.items() if one)  # fmt: skip
            said.append(f"{', '.join(filter(None, (title, key)))}: {', '.join(values)}.")
    return Picture(drawing, caption, " ".join(said)) if drawing else None


def _divergence(columns: Mapping[str, Own], colour: plots.Colour) -> Picture | None:
    found = {name: of for name, v in columns.items() if (of := at(v, "quality.divergence"))}
    found = {name: of for name, of in found.items() if of.get("histogram") and of["mean"]}  # 0: the reference itself
    counts = {name: ([10.0**edge for edge in of["histogram"]["edges"]], of["histogram"]["counts"])
              for name, of in found.items()}  # fmt: skip
    means = {name: of["mean"] for name, of in found.items()}
    drawing = plots.histogram(counts, means, colour, "KLD of one token (nats)")
    caption = "How often each KLD occurs. Further left is closer to the reference."
    said = ", ".join(f"{name} {digits(mean)}" for name, mean in means.items())
    return Picture(drawing, caption, f"Histograms of KLD, token by token. Means: {said}.") if drawing else None


def _size(variants: Variants, colour: plots.Colour, unit: str, size: float) -> Picture | None:
    points = {name_of(v): (weight / size, kld) for v in variants
              if (weight := verdict.size(v)) and (kld := verdict.divergence(v))}  # fmt: skip
    floors = [(floor, name_of(v)) for v in variants if (floor := at(v, "quality.noise_floor.mean"))]
    floor, whose = min(floors, default=(None, ""))
    drawing = plots.scatter(points, colour, x=f"weights ({unit})", y="mean KLD (nats)", floor=floor,
                            floor_label=f"noise floor ({whose}'s)")  # fmt: skip
    caption = "Quality against size: nearer to the lower left corner is better."
    if absent := [name for name, (_, kld) in points.items() if kld.value <= 0]:
        caption += f" {listed(absent)}, at 0, is not on a logarithmic axis."
    said = (f"{name}: {digits(x)} {unit}, KLD {digits(kld.value)}" for name, (x, kld) in points.items())
    return Picture(drawing, caption, f"Quality against size. {', '.join(said)}.") if drawing else None


def _technique(technique: Own, known: plots.Colour) -> Picture | None:
    """Lines against length where each point has one of its own, else bars."""
    points, names = technique["points"], {way: plain(way) for way in ways_of(technique)}
    colour = plots.colours(list(names.values()), known=known)
    settings = [plain(point["setting"]) for point in points]
    lengths = [float(last[1]) for setting in settings if (last := re.search(r"(\d+)\D*$", setting))]
    lined = len(set(lengths)) == len(points) >= 4
    theories = lined and any("theory_s" in way for point in points for way in point["ways"].values())
    label = " ".join(re.sub(r"\d+", " ", settings[0]).split()) if lined else ""
    columns: list[Any] = list(zip(lengths if lined else settings, points, strict=True))
    panels: list[plots.Panel] = []
    for key, title, unit, theory in KINDS:
        if key == "grew_by" and not theories:
            continue
        series = {name: _series(dict(columns), ("ways", way, key), unit) for way, name in names.items()}
        for way, name in names.items() if theories and theory else ():
            series[name + plots.THEORY] = _series(dict(columns), ("ways", way, theory), unit)
            colour[name + plots.THEORY] = colour[name]
        if any(any(each.values()) for each in series.values()):
            panels.append((title, label, series))
    draw = plots.lines if lined else partial(plots.bars, by_series=True)
    return _picture(draw, panels[:2], colour, f"{title_of(technique)}.")
