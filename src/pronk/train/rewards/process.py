"""Rewards that may take any time: functions of one's own and regular expressions, in a process of their own."""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronk.errors import BadRequest, PronkError, one_line, short
from pronk.limited.process import LimitedProcess
from pronk.train.rewards.scorer import Text

_WORK = Path(__file__).with_name("work.py")
MODULE = "__pronk_reward__"  # what a file is called while its process has it: no name of anybody's own
_MEMORY = 16 << 30  # bytes of addresses, of which libraries of numbers take many


def refuse_in_reward_process() -> None:
    """Raises BadRequest in a reward's process: its file begins something of its own when it is imported, which would
    begin another such process, and so on."""
    if file := getattr(sys.modules.get(MODULE), "__file__", None):
        raise BadRequest(
            f"{Path(file).name} begins a run when it is imported, as it is again for its reward: put what begins "
            'the run under if __name__ == "__main__":'
        )


class InProcess:
    """One call for each completion, within so many seconds, by the clock and of the processor; a first call's loading
    of the file is part of it."""

    def __init__(self, label: str, how: dict[str, Any], seconds: float) -> None:
        self._label, self._how = label, how
        self._process = LimitedProcess(_WORK, f"the reward {short(label)}", "rewards", seconds, _MEMORY, clock=seconds)
        weakref.finalize(self, self._process.close)

    @classmethod
    def function(cls, label: str, file: str, name: str, seconds: float) -> InProcess:
        """`(prompt, completion, record) -> float`. Raises BadRequest where there is no such file, or function."""
        path = Path(file).expanduser().resolve()
        refuse_in_reward_process()
        if not path.is_file():
            raise BadRequest(f"{file}: there is no such file, in which the reward {name} is to be")
        made = cls(label, {"file": str(path), "name": name, "module": MODULE}, seconds)
        if problem := made._answer({})[1]:
            raise BadRequest(f"the reward {short(label)} {one_line(problem, 400)}")
        return made

    @classmethod
    def pattern(cls, label: str, pattern: str, seconds: float) -> InProcess:
        """1 where the pattern is found in the completion, as Python's re.search has it; else 0."""
        return cls(label, {"pattern": pattern}, seconds)

    def of(self, texts: Sequence[Text]) -> list[float]:
        return [self._one(text) for text in texts]

    def _one(self, one: Text) -> float:
        asked = {"prompt": one.prompt.said, "completion": one.text, "record": one.prompt.record}
        value, problem = self._answer(asked)
        if problem is None:
            return value
        raise PronkError(
            f"the reward {short(self._label)} {one_line(problem, 300)}, on the completion {one_line(one.text, 60)!r}"
        )

    def _answer(self, asked: dict[str, Any]) -> tuple[float, str | None]:
        """A number; or what is wrong."""
        answer = self._process.request(json.dumps(self._how | asked))
        problem, value = answer.get("problem") or answer.get("broken"), answer.get("value")
        if problem is None and isinstance(value, float) and math.isfinite(value):
            return value, None
        problem = problem or f"gave {value!r}, which is no number to learn from"
        return 0.0, problem.removeprefix(f"the reward {short(self._label)} ")
