"""The report of a training run, in words: true of a run of one step as of one of hours."""

from __future__ import annotations

from typing import Any

import pytest

from pronk.cli.training_report import as_text


def report(steps: int, some: int, seconds: float) -> dict[str, Any]:
    return {
        "model": "m", "out": "o", "method": "LoRA", "trained_share": 0.035, "examples": {"train": 9, "held_out": 0},
        "steps": steps, "planned_steps": steps, "epochs": 1.0, "loss": {"first": 2.5, "last": 1.5, "steps": some},
        "held_out_loss": None, "seconds": seconds, "tokens_a_second": 70.4, "peak_bytes": 10**9, "curve": None,
        "samples": [],
    }  # fmt: skip


@pytest.mark.parametrize(("steps", "some", "seconds", "loss", "time"), [
    (1, 1, 0.0421, "2.5000, of the only step", "0.042 s"),
    (3, 1, 4.26, "2.5000 and 1.5000, of the first and the last step", "4.3 s"),
    (7, 3, 28.4, "2.5000 and 1.5000: means of the first and last 3 steps", "28 s"),
    (68, 10, 302.2, "2.5000 and 1.5000: means of the first and last 10 steps", "302 s"),
])  # fmt: skip
def test_a_short_run_s_report_is_true(steps: int, some: int, seconds: float, loss: str, time: str) -> None:
    """It said "means of the first and last 3 steps" of three steps, which are the same, and "time 0 s"."""
    rows = dict(line.split("  ", 1) for line in as_text(report(steps, some, seconds)).splitlines())
    assert rows["loss"].strip() == loss
    assert rows["time"].strip() == f"{time} of steps, 70 tokens/s"
