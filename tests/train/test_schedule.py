"""Learning rates, step by step, against curves by hand."""

from __future__ import annotations

import math

import pytest

from pronk.errors import BadRequest
from pronk.train.schedule import Schedule


def rates(schedule: Schedule) -> list[float]:
    return [schedule.at(step) for step in range(schedule.steps)]


def test_no_step_of_the_warm_up_is_wasted_on_zero() -> None:
    assert rates(Schedule(8.0, 6, 4, "constant")) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_line_falls_by_the_same_each_step() -> None:
    assert rates(Schedule(8.0, 6, 2, "linear")) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]
    assert rates(Schedule(8.0, 4, 0, "linear", floor=0.5)) == [8.0, 7.0, 6.0, 5.0]


def test_a_cosine_is_slow_at_both_ends() -> None:
    quarter = (1 + math.sqrt(0.5)) / 2
    assert rates(Schedule(1.0, 5, 1)) == pytest.approx([1.0, 1.0, quarter, 0.5, 1 - quarter])
    assert Schedule(1.0, 5, 1).at(5) == Schedule(1.0, 5, 1).at(9) == 0.0  # where more is asked for than there are
    assert Schedule(2.0, 4, floor=0.1).at(2) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"peak": 0.0}, "learning rate must be a positive number"),
        ({"peak": math.inf}, "learning rate must be a positive number"),
        ({"steps": 0}, "a warm-up of 0 steps does not fit into 0"),
        ({"warmup": 5}, "a warm-up of 5 steps does not fit into 4"),
        ({"shape": "square"}, "must be one of cosine, linear, constant, not 'square'"),
        ({"floor": 1.5}, "from 0 to 1, not 1.5"),
    ],
)
def test_what_is_no_schedule(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        Schedule(**{"peak": 1.0, "steps": 4, **given})  # type: ignore[arg-type]
