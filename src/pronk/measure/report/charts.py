"""The pictures of a report: which of its figures each shows, and what is said beneath it and instead of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pronk.drawing.svg import Drawing
from pronk.measure import plots
from pronk.measure.figures import Path, Value, at, value
from pronk.measure.formatting import digits, listed, name_of, plain
from pronk.measure.plot_style import colours
from pronk.measure.report import verdict
from pronk.measure.report.tables import Own
from pronk.measure.report.techniques import RATES, title_of, ways_of
from pronk.measure.report.variants import original, peak_of, unit_of

Variants = Sequence[Own]
Colour = Mapping[str, str]
THEORY = {"seconds": "theory_s", "grew_by": "theory_kv_peak"}  # what stands beside a measured figure


class Picture(NamedTuple):
    drawing: Drawing
    caption: str
    alt: str  # for those who cannot see it

    def file(self) -> str:
        return self.drawing.file(self.caption, self.alt)

    def element(self) -> str:
        return self.drawing.element(self.alt)


def draw(report: Own) -> dict[str, Picture]:
    """Those for which there are figures."""
    variants: Variants = report["variants"]
    base = original(variants)
    colour = colours([name_of(v) for v in variants], name_of(base) if base else None)
    (unit, size), (where, peak) = unit_of(variants), peak_of(variants)
    latency = {
        "Each token: ITL p50 (ms)": {"": "latency.itl_ms.p50"},
        "First token: TTFT (ms)": {"": "latency.ttft_ms"},
    }
    speed = {
        "Prefill (tokens/s)": ("tokens in the prompt", "latency.prefill", "tokens"),
        "Decode (tokens/s)": ("tokens of context", "latency.decode", "context"),
    }
    memory = {
        f"Weights ({unit})": {"predicted": "memory.weights_predicted", "measured": "memory.weights_measured"},
        f"Peak {where} ({unit})": {"predicted": "memory.total_predicted", "measured": peak},
    }
    made = {
        "latency": _bars(variants, colour, latency, 1.0, "Latency: shorter is better. Lines reach from the fastest "
                         "round to the slowest."),
        "speed": _lines(variants, colour, speed, "Speed against length: higher is better."),
        "memory": _bars(variants, colour, memory, size, "Memory: predicted before loading, and measured."),
        "divergence": _divergence(variants, colour),
        "size": _size(variants, colour, unit, size),
    }  # fmt: skip
    for place, technique in enumerate(report.get("techniques") or (), 1):
        made[f"technique-{place}"] = _technique(technique, colour)
    return {name: picture for name, picture in made.items() if picture}


def _series(columns: Mapping[str, Own], path: Path, unit: float = 1.0) -> dict[str, Value | None]:
    return {name: found and found.in_units(unit) for name, own in columns.items() for found in [value(own, path)]}


def _said(title: str, series: Mapping[str, Value | None]) -> str:
    return f"{title}: {', '.join(f'{name} {digits(value.value)}' for name, value in series.items() if value)}."


def _bars(
    variants: Variants, colour: Colour, paths: Mapping[str, Mapping[str, str]], unit: float, caption: str
) -> Picture | None:
    columns, panels, said = {name_of(v): v for v in variants}, [], []
    for title, each in paths.items():
        panels.append((title, {key: _series(columns, path, unit) for key, path in each.items()}))
        said += [_said(f"{title}, {key}" if key else title, series) for key, series in panels[-1][1].items()]
    drawing = plots.bars(panels, colour)
    return Picture(drawing, caption, " ".join(said)) if drawing else None


def _lines(
    variants: Variants, colour: Colour, paths: Mapping[str, tuple[str, str, str]], caption: str
) -> Picture | None:
    panels, said = [], []
    for title, (label, path, key) in paths.items():
        series = {name_of(v): {one[key]: value(one, "tok_s") for one in at(v, path) or ()} for v in variants}
        panels.append((title, label, {name: [(x, y) for x, y in each.items() if y] for name, each in series.items()}))
        said += [_said(f"{title}, {name}", {f"at {x:g}:": y for x, y in each.items()}) for name, each in series.items()]
    drawing = plots.lines(panels, colour)
    return Picture(drawing, caption, " ".join(said)) if drawing else None


def _divergence(variants: Variants, colour: Colour) -> Picture | None:
    found = {name_of(v): at(v, "quality.divergence") for v in variants}
    found = {name: of for name, of in found.items() if of and of.get("histogram") and of["mean"]}  # 0: the reference
    counts = {name: ([10.0**edge for edge in of["histogram"]["edges"]], of["histogram"]["counts"])
              for name, of in found.items()}  # fmt: skip
    drawing = plots.histogram(counts, {name: of["mean"] for name, of in found.items()}, colour,
                              label="KLD of one token (nats)")  # fmt: skip
    caption = "How often each KLD occurs. Further left is closer to the reference."
    alt = _said("Histograms of KLD, token by token. Means", _series(found, "mean"))
    return Picture(drawing, caption, alt) if drawing else None


def _size(variants: Variants, colour: Colour, unit: str, size: float) -> Picture | None:
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


def _technique(technique: Own, known: Colour) -> Picture | None:
    """Lines against length where each point has one of its own, else bars; time, and memory if there is any."""
    points, names = technique["points"], {way: plain(way) for way in ways_of(technique)}
    colour = colours(list(names.values()), known=known)
    settings = [plain(point["setting"]) for point in points]
    found = [re.search(r"(\d+)\D*$", setting) for setting in settings]
    lengths = [float(last[1]) for last in found if last]
    lined = len(set(lengths)) == len(points) >= 4
    theories = lined and any("theory_s" in way for point in points for way in point["ways"].values())
    kinds = {"seconds": ("Time (s)", 1.0), "grew_by": ("Memory over what was held before (MB)", 1e6),
             "peak_bytes": ("Peak memory (MB)", 1e6)}  # fmt: skip
    kinds |= {key: (said.capitalize(), 1.0) for key, said in RATES.items()}
    panels: list[tuple[str, dict[str, list[Value | None]]]] = []
    for key, (title, unit) in kinds.items():
        series = {}
        for suffix, path in (("", key), (plots.THEORY, THEORY.get(key, ""))):
            for way, name in names.items() if path and (theories or key != "grew_by") else ():
                each = [_series({way: point}, ["ways", way, path], unit)[way] for point in points]
                if not suffix or (theories and any(each)):
                    series[name + suffix], colour[name + suffix] = each, colour[name]
        if any(each for values in series.values() for each in values):
            panels.append((title, series))
    panels = panels[:2]  # tokens/s says what the time says; it is drawn where time or memory is missing
    if lined:
        label = " ".join(re.sub(r"\d+", " ", settings[0]).split()) or "length"
        drawing = plots.lines([(title, label, {
            name: [(x, y) for x, y in zip(lengths, each, strict=True) if y] for name, each in values.items()
        }) for title, values in panels], colour)  # fmt: skip
    else:
        drawing = plots.bars([(title, {name: dict(zip(settings, each, strict=True)) for name, each in values.items()})
                              for title, values in panels], colour, by_series=True)  # fmt: skip
    said = (_said(f"{title}, {name}", dict(zip(settings, each, strict=True)))
            for title, values in panels for name, each in values.items())  # fmt: skip
    title = f"{title_of(technique)}."
    return Picture(drawing, title, " ".join([title, *said])) if drawing else None
