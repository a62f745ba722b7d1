"""The pictures of a report: report.json -> {name: (drawing, caption, alternative text)}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pronk.drawing.svg import Drawing
from pronk.measure import plots
from pronk.measure.plot_style import Value, colours
from pronk.measure.report import reading, verdict, words
from pronk.measure.report.rows import name_of, original
from pronk.measure.report.techniques import RATES, plot_name, title_of, ways_of

THEORY = {"seconds": "theory_s", "grew_by": "theory_kv_peak"}  # what stands beside a measured figure
Picture = tuple[Drawing, str, str]
Variants = Sequence[Mapping[str, Any]]


def draw(report: Mapping[str, Any]) -> dict[str, Picture]:
    """Those for which there are figures to draw."""
    variants = reading.entries(report, "variants")
    base = original(variants)
    colour = colours([name_of(v) for v in variants], name_of(base) if base else None)
    made: dict[str, Picture | None] = {
        "latency": _latency(variants, colour),
        "speed": _speed(variants, colour),
        "memory": _memory(variants, colour),
        "divergence": _divergence(variants, colour),
        "size": _size(variants, colour),
    }
    for place, technique in enumerate(reading.entries(report, "techniques")):
        made[plot_name(place)] = _technique(technique, colour)
    return {name: picture for name, picture in made.items() if picture}


def _series(variants: Variants, *path: str, unit: float = 1.0) -> dict[str, Value | None]:
    return {name_of(v): _scaled(reading.value(v, *path), unit) for v in variants}


def _scaled(value: Value | None, unit: float) -> Value | None:
    if value is None:
        return None
    low, high = (None if end is None else end / unit for end in (value.low, value.high))
    return Value(value.value / unit, low, high)


def _said(series: Mapping[str, Value | None], unit: str) -> str:
    """A series in words, for those who cannot see it."""
    return ", ".join(f"{name} {words.digits(value.value)} {unit}".strip() for name, value in series.items() if value)


def _latency(variants: Variants, colour: Mapping[str, str]) -> Picture | None:
    each, first = _series(variants, "latency", "itl_ms", "p50"), _series(variants, "latency", "ttft_ms")
    drawing = plots.bars([("Each token: ITL p50 (ms)", each), ("First token: TTFT (ms)", first)], colour)
    alt = f"Bars of latency. ITL p50: {_said(each, 'ms')}. TTFT: {_said(first, 'ms')}."
    caption = "Latency: shorter is better. Lines reach from the fastest round to the slowest."
    return (drawing, caption, alt) if drawing else None


def _speed(variants: Variants, colour: Mapping[str, str]) -> Picture | None:
    def points(part: str, key: str) -> dict[str, list[tuple[float, Value]]]:
        return {
            name_of(v): [
                (length, rate)
                for e in reading.entries(v, "latency", part)
                if (length := reading.number(e, key)) is not None and (rate := reading.value(e, "tok_s"))
            ]
            for v in variants
        }

    prefill, decode = points("prefill", "tokens"), points("decode", "context")
    panels = [
        ("Prefill (tokens/s)", "tokens in the prompt", prefill),
        ("Decode (tokens/s)", "tokens of context", decode),
    ]
    drawing = plots.lines(panels, colour)
    alt = "Lines of speed. " + " ".join(
        f"{what}, {name}: " + ", ".join(f"{words.digits(y.value)} tokens/s at {x:g}" for x, y in found) + "."
        for what, series in (("Prefill", prefill), ("Decode", decode)) for name, found in series.items() if found
    )  # fmt: skip
    return (drawing, "Speed against length: higher is better.", alt) if drawing else None


def _memory(variants: Variants, colour: Mapping[str, str]) -> Picture | None:
    on_gpu = any(reading.number(v, "memory", "peak_device") for v in variants)
    keys = ("weights_predicted", "weights_measured", "total_predicted", "peak_device" if on_gpu else "peak_rss")
    unit, scale = words.scale([reading.number(v, "memory", key) for v in variants for key in keys])
    found = [_series(variants, "memory", key, unit=scale) for key in keys]
    panels = [
        (f"Weights ({unit})", found[0], found[1]),
        (f"Peak {'on the GPU' if on_gpu else 'of the process'} ({unit})", found[2], found[3]),
    ]
    drawing = plots.paired_bars(panels, colour, ("predicted", "measured"))
    alt = f"Bars of memory. Weights: {_said(found[1], unit)}. Peak: {_said(found[3], unit)}."
    return (drawing, "Memory: predicted before loading, and measured.", alt) if drawing else None


def _divergence(variants: Variants, colour: Mapping[str, str]) -> Picture | None:
    counts, means = {}, {}
    for variant in variants:
        edges = reading.numbers(variant, "quality", "divergence", "histogram", "edges")
        heights = reading.numbers(variant, "quality", "divergence", "histogram", "counts")
        mean = reading.number(variant, "quality", "divergence", "mean")
        if heights and mean:  # a mean of 0 is the reference itself
            counts[name_of(variant)] = ([10.0**e for e in edges], heights)
            means[name_of(variant)] = mean
    drawing = plots.histogram(counts, means, colour, label="KLD of one token (nats)")
    alt = (
        "Histograms of KLD, token by token. Means: "
        + ", ".join(f"{n} {words.digits(m)}" for n, m in means.items())
        + "."
    )
    return (drawing, "How often each KLD occurs. Further left is closer to the reference.", alt) if drawing else None


def _size(variants: Variants, colour: Mapping[str, str]) -> Picture | None:
    unit, scale = words.scale([verdict.size(v) for v in variants])
    points = {
        name_of(v): (size / scale, kld)
        for v in variants
        if (size := verdict.size(v)) and (kld := verdict.divergence(v))
    }
    floors = [(f, name_of(v)) for v in variants if (f := reading.number(v, "quality", "noise_floor", "mean"))]
    floor, whose = min(floors, default=(None, ""))
    drawing = plots.scatter(points, colour, x=f"weights ({unit})", y="mean KLD (nats)", floor=floor,
                           floor_label=f"noise floor ({whose}'s)")  # fmt: skip
    alt = "Quality against size. " + ", ".join(
        f"{name}: {words.digits(x)} {unit}, KLD {words.digits(y.value)}" for name, (x, y) in points.items()
    )
    absent = [name for name, (_, kld) in points.items() if kld.value <= 0]
    caption = "Quality against size: nearer to the lower left corner is better."
    if absent:
        caption += f" {words.listed(absent)}, at 0, is not on a logarithmic axis."
    return (drawing, caption, alt) if drawing else None


def _technique(technique: Mapping[str, Any], known: Mapping[str, str]) -> Picture | None:
    ways, points = ways_of(technique), reading.entries(technique, "points")
    names = {way: words.plain(way) for way in ways}
    colour = colours(list(names.values()), known=known)
    settings = [words.plain(reading.text(point, "setting")) for point in points]
    lengths = [_last_number(setting) for setting in settings]
    lined = len(points) >= 4 and None not in lengths and len(set(lengths)) == len(points)
    panels: list[tuple[str, dict[str, list[Value | None]]]] = []
    theories = lined and any(reading.at(p, "ways", way, "theory_s") for p in points for way in ways)
    for key, title, unit in (
        ("seconds", "Time (s)", 1.0),
        *([("grew_by", "Memory over what was held before (MB)", 1e6)] if theories else []),
        ("peak_bytes", "Peak memory (MB)", 1e6),
        *((rate, said[0].upper() + said[1:], 1.0) for rate, said in RATES.items()),
    ):
        values = {
            name: [_scaled(reading.value(p, "ways", way, key), unit) for p in points] for way, name in names.items()
        }
        if theories and key in THEORY:
            of_theory = {
                f"{name}{plots.THEORY}": [_scaled(reading.value(p, "ways", way, THEORY[key]), unit) for p in points]
                for way, name in names.items()
            }
            values |= {name: series for name, series in of_theory.items() if any(series)}
            colour |= {f"{name}{plots.THEORY}": colour[name] for name in names.values()}
        if any(value for series in values.values() for value in series):
            panels.append((title, values))
    panels = panels[:2]  # tokens/s says what the time says; it is drawn where time or memory is missing
    if lined:
        drawn = [(title, _unit_of(settings[0]), {
            name: [(x, v) for x, v in zip(lengths, series, strict=True) if x is not None and v]
            for name, series in ways_values.items()}) for title, ways_values in panels]  # fmt: skip
        drawing = plots.lines(drawn, colour)
    else:
        drawing = plots.grouped_bars(panels, settings, colour)
    alt = f"{title_of(technique)}. " + " ".join(
        f"{title}, {name}: {_said(dict(zip(settings, series, strict=True)), '')}."
        for title, values in panels
        for name, series in values.items()
    )
    return (drawing, f"{title_of(technique)}.", alt) if drawing else None


def _last_number(setting: str) -> float | None:
    found = re.search(r"(\d+)\D*$", setting)
    return float(found[1]) if found else None


def _unit_of(setting: str) -> str:
    return " ".join(re.sub(r"\d+", " ", setting).split()) or "length"
