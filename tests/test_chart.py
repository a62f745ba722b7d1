"""Charts: ticks that people would choose, texts that stay inside, and a file that parses whatever it is told."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pictures import contained

from pronk.drawing import chart, svg
from pronk.drawing.chart import Axis, Key

VALUES = st.floats(-1e15, 1e15, allow_subnormal=False) | st.floats(-1e-3, 1e-3)
POSITIVE = st.floats(1e-280, 1e280)


@example([-3.583824983858879e-05], False, 2)  # between two ticks, it had none
@given(st.lists(VALUES, max_size=5), st.booleans(), st.integers(2, 9))
def test_ticks_of_a_linear_axis(values: list[float], zero: bool, most: int) -> None:
    axis = chart.linear(values or [0.0], zero=zero, most=most)
    assert axis.low < axis.high
    assert all(axis.low <= value <= axis.high for value in values)
    assert 1 <= len(axis.ticks) <= most + 1
    ticks = list(axis.ticks)
    assert ticks == sorted(ticks)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1) if len(ticks) > 1 else 0.0
    if step > 1e-6 * max(map(abs, ticks)):  # otherwise rounding hides it
        leading = float(f"{step:.6e}".split("e")[0])
        assert min(abs(leading - nice) for nice in (1, 2, 5, 10)) < 1e-4
        if step >= 1e-3:
            assert len(set(axis.ticks.values())) == len(ticks)
            for tick, said in axis.ticks.items():
                if "×" not in said and "10" + said[2:] != said:
                    assert float(said.replace(",", "")) == pytest.approx(tick, abs=1e-3 * step)


@given(POSITIVE, POSITIVE)
def test_ticks_of_a_logarithmic_axis(one: float, other: float) -> None:
    low, high = sorted((one, other))
    axis = chart.logarithmic(low, high)
    assert axis.low < axis.high
    assert axis.low <= low <= high <= axis.high
    assert 1 <= len(axis.ticks) <= 13
    assert all(0 <= axis.part(tick) <= 1 for tick in axis.ticks)
    if high > 1e3 * low:
        assert len(axis.ticks) >= 2
        for tick in axis.ticks:  # powers of ten, at one distance
            assert math.log10(tick) == pytest.approx(round(math.log10(tick)), abs=1e-9)
        exponents = [round(math.log10(tick)) for tick in axis.ticks]
        assert len({b - a for a, b in pairwise(exponents)}) == 1


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_axis_that_counts_has_whole_numbers(low: int, span: int) -> None:
    assert all(tick == int(tick) for tick in chart.whole(low, low + span))


def test_what_ticks_look_like() -> None:
    assert list(chart.linear([44.2]).ticks.values()) == ["0", "10", "20", "30", "40"]
    assert list(chart.linear([0.97]).ticks.values()) == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert list(chart.linear([1553.0], most=4).ticks.values()) == ["0", "500", "1,000", "1,500"]
    assert list(chart.logarithmic(4e-5, 0.012).ticks.values()) == ["10⁻⁴", "10⁻³", "10⁻²"]
    assert list(chart.logarithmic(9e-4, 1.1).ticks.values()) == ["0.001", "0.01", "0.1", "1"]
    assert list(chart.logarithmic(1, 60).ticks.values()) == ["1", "2", "5", "10", "20", "50"]


@pytest.mark.parametrize(("value", "said"), [
    (0, "0"), (1234.5, "1,234"), (45.61, "45.6"), (0.00289, "0.00289"), (0.0001, "0.0001"), (2.1e-6, "2.1×10⁻⁶"),
    (1e-9, "10⁻⁹"), (-3.5, "-3.5"), (1e15, "10¹⁵"), (99.96, "100"), (15.0, "15"),
])  # fmt: skip
def test_numbers(value: float, said: str) -> None:
    assert svg.number(value) == said


@given(st.text(max_size=80), st.floats(20, 400))
def test_a_text_is_cut_where_it_is_too_long(text: str, width: float) -> None:
    short = svg.fitted(text.replace("\n", " "), width)
    assert svg.width_of(short) <= width
    assert short == text.replace("\n", " ") or short.endswith("…")


def test_widths_are_those_of_a_wide_font_or_more() -> None:
    """DejaVu Sans, as a desktop has it: its own widths, in thousandths of an em."""
    widths = {"Each token: ITL p50 (ms)": 12.48, "llm-int8": 3.83, "0.0001": 3.5, "WWWMMM": 5.55, "2.13×10⁻⁶": 5.27}
    for text, ems in widths.items():
        assert ems < svg.width_of(text, 1) < 1.3 * ems, text


@given(st.text(max_size=40))
def test_whatever_is_written_the_file_parses(text: str) -> None:
    panels = [(text, Axis(0, 1, {0.5: text[:9]}, "x"), chart.named([text, "\x00\ud800<&\"'>]]>"]))]
    drawing, (panel,) = chart.chart(panels, 100, [Key(text, svg.INK), Key("\x1b", svg.SOFT, "line", marker=3)])
    panel.bar((0, 0.7), (-0.3, 0.3), svg.INK)
    root = contained(drawing.file(f"title {text}", f"said {text}"))
    assert root.find("{*}script") is None


def test_the_check_of_what_is_inside_can_fail() -> None:
    drawing, _ = chart.chart([("", Axis(0, 1), Axis(0, 1))], 100)
    contained(drawing.file("t", "s"))
    drawing.text(svg.WIDTH - 20, 50, "beyond the edge", "start")
    with pytest.raises(AssertionError, match="beyond the edge"):
        contained(drawing.file("t", "s"))
    drawing.parts[-1] = '<circle class="point" cx="nan" cy="1" r="2"/>'
    with pytest.raises(AssertionError, match="nan"):
        contained(drawing.file("t", "s"))


def test_colours_are_those_of_the_page_in_light_and_dark() -> None:
    """An element of a page takes the page's; a file brings its own, which are the same."""
    drawing, _ = chart.chart([("", Axis(0, 1, {0: "0"}), Axis(0, 1))], 100)
    file, element = drawing.file("t", "s"), drawing.element("s")
    assert "prefers-color-scheme: dark" in file
    assert "<style" not in element
    assert not [colour for colour in svg.LIGHT.values() if colour in element]
    page = (Path(svg.__file__).parents[1] / "measure/report/report.html.jinja").read_text("utf-8")
    for theme in (svg.LIGHT, svg.DARK):
        for name, colour in theme.items():
            assert f"--{name}: {colour};" in page
            assert f"--{name}: {colour}" in file


def test_what_float32_rounds_is_no_rise() -> None:
    """0.8 and float32's 0.8 lie side by side, between ticks that can be told apart."""
    axis = chart.linear([0.8, 0.800000011920929], zero=False)
    assert axis.part(0.800000011920929) - axis.part(0.8) < 1e-3
    assert len({*axis.ticks.values()}) == len(axis.ticks) > 2
