"""Plots: a colour for each name, as many marks as there are values, outliers that none loses, a knee that is named."""

from __future__ import annotations

import math
import random
import re
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from pictures import SVG, box, contained, drawn

from pronk.drawing.svg import Drawing
from pronk.measure import plots, plots_outliers
from pronk.measure.figures import Value

NAMES = ["bf16", "llm-int8", "q8", "q4"]
COLOUR = plots.colours(NAMES, "bf16")


def root_of(drawing: Drawing | None) -> Element:
    assert drawing is not None
    assert drawing.element("s").count("<") == drawing.element("s").count(">")
    return contained(drawing.file("title", "said"))


def count(drawing: Drawing | None, kind: str) -> int:
    return len(drawn(root_of(drawing), kind))


def texts(root: Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "text")]


def test_colours_are_one_for_a_name() -> None:
    colour = plots.colours(["b", "a", "c", "b"], "a")
    assert colour["a"] == plots.ORIGINAL
    assert len(set(colour.values())) == 3
    assert plots.colours(["b", "a", "c"], "a") == colour
    assert len(plots.colours([str(n) for n in range(20)])) == 20


def test_a_name_that_has_no_colour_yet_gets_one_that_no_other_has() -> None:
    """Of seven formats in one plot two were blue and two orange: each list was given the palette from its beginning."""
    known = plots.colours(["bf16", "llm-int8", "q8", "q4"], "bf16")
    colour = plots.colours(["f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4"], known=known)
    assert len(set(colour.values())) == 7
    assert {name: colour[name] for name in known} == known


def test_a_bar_for_each_value_as_long_as_it() -> None:
    first = {"bf16": Value(4.0, 3.0, 8.0), "llm-int8": None, "q8": Value(2.0), "q4": Value(1.0, 1.0, 1.0)}
    root = root_of(plots.bars([("Time (ms)", "", {"": first}), ("None", "", {"": dict.fromkeys(NAMES)})], COLOUR))
    widths = [float(bar.get("width", "nan")) for bar in drawn(root, "bar")]
    assert widths == pytest.approx([4 * widths[2], 2 * widths[2], widths[2]], abs=0.2)
    assert len(drawn(root, "error")) == 3  # a line and two caps, of the one that has a spread
    assert {"4", "2", "1", *NAMES, "Time (ms)"} <= set(texts(root))
    assert "None" not in texts(root)
    both = root_of(plots.bars([("MB", "", {"predicted": first, "measured": first})], COLOUR))
    assert len(drawn(both, "bar")) == 6
    assert ["opacity" in bar.get("style", "") for bar in drawn(both, "bar")] == [True] * 3 + [False] * 3
    assert {"predicted", "measured"} <= set(texts(both))


def test_without_values_there_is_no_plot() -> None:
    nothing = dict.fromkeys(NAMES)
    assert plots.bars([("a", "", {"": nothing})], COLOUR) is None
    assert plots.bars([("a", "", {"b": nothing, "c": nothing})], COLOUR) is None
    assert plots.lines([("a", "b", {"q8": {}})], COLOUR) is None
    assert plots.bars([("a", "", {"q8": {"one": None}})], COLOUR, by_series=True) is None
    assert plots.scatter({"q8": (1.0, Value(0.0))}, COLOUR, x="x", y="y") is None
    assert plots.histogram({"q8": ([0.0, 1.0], [1.0])}, {}, COLOUR, label="x") is None


def test_lines_have_a_point_a_value_and_theory_has_none() -> None:
    points = {length: Value(length / 10, length / 20, length / 5) for length in (32.0, 128.0, 2048.0)}
    series = {"q8": points, "q4": points | {2048.0: None}, f"q8{plots.THEORY}": points}
    root = root_of(plots.lines([("Time (s)", "tokens", series)], COLOUR | {f"q8{plots.THEORY}": COLOUR["q8"]}))
    assert len(drawn(root, "point")) == 5
    assert len(drawn(root, "error")) == 3 * 5
    assert ["dasharray" in line.get("style", "") for line in drawn(root, "line")] == [False, False, True]
    assert {"32", "128", "2,048", "tokens", "q8", "q4", "theory"} <= set(texts(root))
    assert "theory" not in texts(root_of(plots.lines([("Time (s)", "tokens", {"q8": points})], COLOUR)))


def test_bars_of_ways_leave_a_gap_where_a_value_is_missing() -> None:
    ways = {
        "q8": {"prefill": Value(1.0, 0.9, 1.1), "decode": None},
        "q4": {"prefill": Value(2.0), "decode": Value(3.0)},
    }
    root = root_of(plots.bars([("Time (s)", "", ways), ("MB", "", ways)], COLOUR, by_series=True))
    assert len(drawn(root, "bar")) == 2 * 3
    widths = [float(bar.get("width", "nan")) for bar in drawn(root, "bar")[:3]]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 3 * widths[0]], abs=0.2)
    tops = [float(bar.get("y", "nan")) for bar in drawn(root, "bar")[:3]]
    assert tops[2] - tops[1] > 2 * (tops[1] - tops[0]) > 0  # the gap, where decoding of q8 would be


def test_a_histogram_has_an_outline_and_a_mean_for_each() -> None:
    edges = [10.0**n for n in range(-6, 1)]
    counts = {"q8": (edges, [0, 1, 5, 9, 2, 0]), "q4": (edges, [0, 0, 1, 3, 9, 4])}
    root = root_of(plots.histogram(counts, {"q8": 1e-3, "q4": None}, COLOUR, label="KLD"))
    assert [len(drawn(root, kind)) for kind in ("area", "line", "rule")] == [2, 2, 1]
    assert len(drawn(root, "line")[0].get("points", "").split()) == 2 + 2 * 4  # two corners a bin, and both feet


def test_points_are_named_where_no_name_meets_another() -> None:
    """llm-int8 and q8 of the default model lie close to each other."""
    points = {"bf16": (272.0, 1.3e-4), "llm-int8": (140.0, 3.4e-3), "q8": (146.0, 2.9e-3), "q4": (100.0, 1.8e-3)}
    with_errors = {name: (x, Value(y, 0.8 * y, 1.2 * y)) for name, (x, y) in points.items()}
    root = root_of(plots.scatter(with_errors, COLOUR, x="MB", y="KLD", floor=1.3e-4, floor_label="noise floor"))
    assert len(drawn(root, "point")) == 4
    assert len(drawn(root, "rule")) == 1
    names = [box(element) for element in root.iter(SVG + "text") if element.text in points]
    assert len(names) == 4
    for n, (left, top, right, bottom) in enumerate(names):
        assert not any(left < r and a < right and top < b and t < bottom for a, t, r, b in names[n + 1 :])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_values_all_stays_inside(seed: int) -> None:
    """Names too long for any plot, numbers over thirty decades; `contained` looks at each text and each shape."""
    chance = random.Random(seed)
    names = [chance.choice(["q8", "W" * 60, "a name of several words, " * 3, "汉字" * 20]) + str(n) for n in range(9)]
    colour = plots.colours(names)

    def value() -> Value:
        middle = chance.choice([0.0, 1.0, 10 ** chance.uniform(-15, 15), chance.uniform(0, 5000)])
        return Value(middle, *chance.choice([(None, None), (middle / 2, middle * 3), (-1.0, 1e15)]))

    series = {name: chance.choice([None, value()]) for name in names} | {names[0]: value()}
    root_of(plots.bars([("Each (ms)", "", {"": series}), ("T" * 200, "", {"": series})], colour))
    root_of(plots.bars([("MB", "", {"predicted": series, "measured": series})] * 2, colour))
    lengths = sorted({chance.choice([0.0, 1.0, 2.0 ** chance.randint(0, 40), 1e15]) for _ in range(30)})
    root_of(plots.lines([("s", "tokens", {name: {x: value() for x in lengths} for name in names})], colour))
    ways = {name: {other: chance.choice([None, value()]) for other in names[:6]} for name in names}
    root_of(plots.bars([("s", "", ways | {names[0]: series})] * 2, colour, by_series=True))
    points = {name: (value().value, Value(10 ** chance.uniform(-100, 15), -1.0, 1e15)) for name in names}
    root_of(plots.scatter(points, colour, x="MB", y="KLD", floor=1e-100, floor_label="noise floor"))


def cells(root: Element) -> int:
    return sum(int(n) for path in drawn(root, "cells") for n in re.findall(r"h(\d+)", path.get("d", "")))


def test_outliers_are_drawn_so_that_none_is_lost() -> None:
    counts = np.zeros((4, 5000))
    counts[2, 4321] = 7
    root = root_of(plots_outliers.heat_map(counts, "columns over 6.0"))
    assert {"4321", "columns over 6.0"} <= set(texts(root))
    assert cells(root) == 1  # one cell is coloured, of fewer than 5000
    place = drawn(root, "cells")[0].get("d")
    assert place == f"M{4321 // 11} 2.5h1"
    assert "no column passed" in texts(root_of(plots_outliers.heat_map(np.zeros((2, 3)), "none")))


def test_each_cell_of_a_heat_map_has_a_colour_by_its_count() -> None:
    counts = np.random.default_rng(0).integers(0, 1000, (30, 480))
    drawing = plots_outliers.heat_map(counts, "t")
    assert cells(root_of(drawing)) == (counts > 0).sum()
    counts = np.array([[0, 1, 1, 10, 100, 100, 0]])
    paths = [path.get("d") for path in drawn(root_of(plots_outliers.heat_map(counts, "t")), "cells")]
    assert paths == ["M1 0.5h2", "M3 0.5h1", "M4 0.5h2"]  # neighbours of one colour are one stroke
    dearest = np.random.default_rng(0).integers(0, 10**6, (100, 20_000))
    assert len(plots_outliers.heat_map(dearest, "t").file("t", "s")) < 600_000


def test_a_sweep_names_its_knee() -> None:
    def points(*of: tuple[float, float | None, Any]) -> list[dict[str, Any]]:
        return [dict(zip(("threshold", "kld", "prefill_tok_s"), one, strict=True)) for one in of]

    three = points((0, 0.001, {"median": 9, "min": 8, "max": 10}), (6, 0.002, 20), (math.inf, 0.03, None))
    root = root_of(plots_outliers.sweep(three, 6))
    assert {"knee: 6", "∞"} <= set(texts(root))
    assert [len(drawn(root, kind)) for kind in ("point", "rule", "error")] == [3 + 2, 2, 3]
    assert count(plots_outliers.sweep(points((0, None, None), (6, None, None))), "point") == 0
