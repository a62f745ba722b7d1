"""Noise: one rule for what cannot be told apart, and both that judge by it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pronk.cli import divergence
from pronk.measure.noise import LOWER, RULE, TIMES, Mean, standing
from pronk.measure.report import content, pages, verdict

FLOOR = Mean(1e-4, 0.0)


@pytest.mark.parametrize(("mean", "error", "expected"), [
    (0.0, 0.0, "within"), (2e-4, 1e-5, "within"), (2.79e-4, 1e-5, "within"), (2.9e-4, 1e-5, "unclear"),
    (3.1e-4, 1e-5, "unclear"), (3.21e-4, 1e-5, "above"), (0.02, 1e-3, "above"), (1e-5, None, "unknown"),
])  # fmt: skip
def test_three_times_the_floor_and_two_errors(mean: float, error: float | None, expected: str) -> None:
    assert standing(Mean(mean, error), [FLOOR]) == expected


def test_the_floors_own_error_counts_as_often_as_the_floor() -> None:
    found = Mean(2.5e-4, 1e-6)
    assert standing(found, [FLOOR]) == "within"
    assert standing(found, [Mean(1e-4, 1e-5)]) == "unclear"  # 2.5 + 2 * 0.3 reaches over 3
    assert standing(found, [Mean(1e-4, None)]) == "within"


def test_the_lower_floor_decides() -> None:
    assert standing(Mean(0.01, 1e-4), [Mean(0.02, 1e-4), FLOOR]) == "above"
    assert standing(Mean(0.01, 1e-4), [Mean(0.02, 1e-4)]) == "within"


def test_what_lies_nowhere_cannot_be_told_from_itself() -> None:
    assert standing(Mean(0.0, 0.0), [Mean(0.0, 0.0)]) == "within"


@pytest.mark.parametrize("mean", [1e-5, 2e-4, 2.9e-4, 3.1e-4, 3.5e-4, 0.002, 0.1])
@pytest.mark.parametrize("error", [0.0, 1e-5, 1e-3, None])
def test_the_command_and_the_report_say_the_same(mean: float, error: float | None) -> None:
    """Of A's floor at 1e-4 and a larger one of B's."""

    def figures(mean: float, error: float | None) -> dict[str, Any]:
        return {"mean": mean, "standard_error": error, "top1": 0.9}

    found = figures(mean, error)
    floors = figures(1e-4, 1e-6), figures(5e-4, 1e-6)
    said = divergence._verdict({"divergence": found, "reference_floor": floors[0], "own_floor": floors[1]})
    original = {"name": "A", "quality": {"noise_floor": floors[0]}}
    badge = verdict.verdict({"quality": {"divergence": found, "noise_floor": floors[1]}}, original, [], "f32").badge
    assert (said == "same") == (badge == "indistinguishable")
    if said in ("noisy", "noisy or different", "different"):
        assert "indistinguishable" not in badge


def test_the_rule_is_said_as_it_is_computed() -> None:
    assert f"{TIMES:g} times" in RULE
    sample = json.loads(Path(__file__).with_name("report_sample.json").read_text("utf-8"))
    page = pages.filled("REPORT.md.jinja", content.of(sample))
    assert f"{RULE} {LOWER}" in page
    assert all(f"under {border:g} “{name}”" in page for border, name, _ in verdict.LEVELS[:-1])
    shares = [100 * math.sqrt(border / 2) for border, _, _ in verdict.LEVELS[:-1]]
    assert "at most {:.0f}, {:.0f} and {:.0f}% of sampled tokens".format(*shares) in page
    assert all(f"{TIMES:g} times" in divergence._IN_WORDS[said] for said in divergence._IN_WORDS if said != "unknown")
