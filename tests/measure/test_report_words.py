"""A report's words: ratios, digits, shares, first differences, and Markdown that shows what it was given."""

from __future__ import annotations

from typing import Any

import pytest

from pronk.measure import formatting
from pronk.measure.figures import Value, ratio
from pronk.measure.report.content import split
from pronk.measure.report.pages import escaped


def summary(*rounds: float) -> dict[str, Any]:
    return {"median": sorted(rounds)[len(rounds) // 2], "min": min(rounds), "max": max(rounds), "rounds": list(rounds)}


def test_rounds_are_compared_with_each_other() -> None:
    """A machine that slows down from round to round slows both; the ratio stays."""
    times = ratio(summary(20, 10, 5), summary(10, 5, 2.5))
    assert times == Value(2.0, 2.0, 2.0)
    assert formatting.faster(times) == "2.0× faster"
    assert formatting.faster(ratio(summary(20, 10, 5), summary(19, 11, 5))).startswith("no clear difference")
    assert formatting.faster(ratio(summary(8, 9, 9.5), summary(10, 10, 10))) == "11% slower"
    # A rate is the inverse of a time: with four rounds, medians of one and the other once said two things.
    times, rates = summary(1.0, 1.1, 1.3, 1.5), summary(*(1 / t for t in (1.0, 1.1, 1.3, 1.5)))
    base = summary(1.0, 1.0, 1.0, 1.0)
    slower, as_rates = ratio(base, times), ratio(rates, base)
    assert slower
    assert as_rates
    assert slower.value == pytest.approx(as_rates.value)
    assert formatting.faster(slower) == formatting.faster(as_rates) == "no clear difference"
    assert ratio(None, summary(1, 2)) is None
    assert ratio(3, 2) == Value(1.5)


@pytest.mark.parametrize(("value", "said"), [
    (0, "0"), (1234.5, "1,234"), (45.64, "45.6"), (0.00289, "0.00289"), (2.7e-6, "0.00000270"),
    (1.2e-9, "1.20e-09"), (-3.0, "-3.00"),
])  # fmt: skip
def test_digits(value: float, said: str) -> None:
    assert formatting.digits(value) == said


def test_sizes_and_shares() -> None:
    assert formatting.smaller(47, 100) == "53% smaller"
    assert formatting.smaller(110, 100) == "10% larger"
    assert formatting.smaller(210, 100) == "2.1× larger"
    assert formatting.smaller(100.1, 100) == "the same"
    assert formatting.percent(0.99996) == "99.996%"  # not 100.0%
    assert formatting.percent(1.0) == "100.0%"
    assert formatting.listed(["a"]) == "a"
    assert formatting.listed(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(("base", "text", "parts"), [
    ("one two three", "one two three", ("one two three", "", "")),
    ("one two three", "one twelve three", ("one ", "twelve", " three")),
    ("one two", "one two three", ("one two", " three", "")),
    ("one two three", "one two", ("one two", "", "")),
    ("", "new text", ("", "new", " text")),
    ("abc", "", ("", "", "")),
])  # fmt: skip
def test_the_first_difference_is_found(base: str, text: str, parts: tuple[str, str, str]) -> None:
    assert split(base, text) == parts
    assert "".join(split(base, text)) == text


def test_markdown_shows_what_it_was_given() -> None:
    assert escaped("a|b *c* <d> _e_\nf") == r"a\|b \*c\* &lt;d&gt; \_e\_ f"
