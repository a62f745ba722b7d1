"""Durations: what people write for how long a run may take."""

from __future__ import annotations

import pytest

from pronk.train.runs.duration import seconds


@pytest.mark.parametrize(
    ("said", "meant"),
    [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1h 30m", 5400), ("1d2h3m4s", 93784), ("45", 45), ("0.5", 0.5),
     ("1.5H", 5400), (90, 90), (0.25, 0.25)],
)  # fmt: skip
def test_what_they_mean(said: str | float, meant: float) -> None:
    assert seconds(said) == meant


@pytest.mark.parametrize(
    "said",
    [
        "",
        " ",
        "m",
        "30m1h",
        "1h1h",
        "h1",
        "1,5h",
        "٣h",
        "-1",
        "+5",
        "1e3",
        0,
        -1,
        True,
        float("nan"),
        float("inf"),
        1e300,
    ],
)
def test_what_means_nothing(said: str | float) -> None:
    with pytest.raises(ValueError):
        seconds(said)
