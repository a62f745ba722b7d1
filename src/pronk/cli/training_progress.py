"""A training run, watched: a bar on a terminal, a line now and then elsewhere; one for each look at held-out data."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pronk.cli import console, progress
from pronk.system import human_size
from pronk.train.runs.watcher import Advance, Of, Watcher, Work

if TYPE_CHECKING:
    from pronk.train.runs.run import Run
    from pronk.train.trainer import Trainer

_UNITS: dict[Of, progress.Unit] = {
    "bytes": progress.of_bytes,
    "tokens": progress.of_tokens,
    "records": lambda done, total: f"{done} of {total} records",
    "examples": lambda done, total: f"{done} of {total} examples",
    "characters": lambda done, total: f"{done / 1e6:.1f} of {total / 1e6:.1f} million characters",
}
_LOGGED = ("characters", "examples")  # of which there may be so many that a file or a pipe is told, too


def _at_first(folder: Path | None) -> float:
    """The held-out loss at step 0 of a run that goes on; infinity where nobody looked."""
    from pronk.train.folder import read_metrics

    lines = read_metrics(folder) if folder else []
    return next((line["held_out_loss"] for line in lines if line["step"] == 0 and "held_out_loss" in line), math.inf)


class Watch(Watcher):
    """Ctrl-C and SIGTERM stop the run: the step is finished and saved; a second one ends the program at once."""

    def __init__(self, run: Run) -> None:
        self.code = 0  # the exit code that says why it was stopped
        self._run = run
        self._ends = time.monotonic() + (math.inf if run.how.max_time is None else run.how.max_time)
        self.tell: Callable[[Mapping[str, Any]], None] = lambda metrics: None

    def note(self, text: str) -> None:
        console.note(text)

    def progress(self, work: Work, of: Of = "bytes") -> AbstractContextManager[Advance]:
        if work == "planning":
            unit: progress.Unit = lambda done, total: "what memory it will take"  # noqa: E731
        else:
            unit = _UNITS[of]
        patience = 0.0 if work in ("planning", "loading") else progress.PATIENCE
        return progress.shown(work, unit, patience, logged=of in _LOGGED)

    @contextmanager
    def training(self, run: Trainer) -> Iterator[None]:
        first, steps = run.loop.position.step, run.loop.schedule.steps
        begun, tokens, seconds, state = time.monotonic(), 0, 0.0, ""  # of the steps of this process
        before = _at_first(self._run.how.out) if first else math.inf  # held-out loss of what is not trained yet

        def unit(done: int, total: int) -> str:
            return f"step {first + done} of {steps}{state}"

        with (
            self._stopping(),
            progress.shown("training", unit, patience=0, logged=True, ends=self._ends) as advance,
            progress.shown("", _UNITS["examples"], logged=True) as look,
        ):
            advance("", 0, max(1, steps - first))

            def tell(metrics: Mapping[str, Any]) -> None:
                nonlocal tokens, seconds, state, before
                step = metrics["step"]
                if "loss" in metrics:
                    tokens, seconds = tokens + metrics["tokens"], seconds + metrics["seconds"]
                    speed, memory = f"{tokens / seconds:.0f} tokens/s", human_size(peak_bytes(run))
                    state = f", loss {metrics['loss']:.3f}{_words(metrics)}, {speed}, {memory}"
                    advance("", step - first, steps - first)
                    return
                look("", 1, 1)  # takes the bar away
                best = ""
                if step == 0:
                    before = metrics["held_out_loss"]
                elif run.loop.position.waited == 0:
                    worse = "held_out_task" not in metrics and metrics["held_out_loss"] > before
                    best = f" (the best so far{', but worse than at step 0' if worse else ''})"
                left = ""
                if first < step < steps:
                    now = time.monotonic()
                    each = (now - begun) / (step - first)
                    left = f", {progress.duration(min(each * (steps - step), self._ends - now))} left"
                loss = f"held-out loss {metrics['held_out_loss']:.4f}{_words(metrics, 'held_out_')}"
                console.note(f"step {step} of {steps}: {loss}{best}{state if step else ''}{left}")

            def looking(done: int, total: int) -> None:
                advance("", 1, 1)
                look(f"held-out data after step {run.loop.position.step}", done, total)

            from pronk.train.runs.result import peak_bytes

            self.tell, self.looking = tell, looking  # type: ignore[method-assign]
            yield
            self.tell = lambda metrics: None  # and holds the run no longer
            self.looking = lambda done, total: None  # type: ignore[method-assign]
        if first == steps:
            console.note(f"the run was finished already, with step {steps}: a larger --epochs or --max-steps goes on")
        if not run.finished:
            late = self._run.out_of_time and not self.code
            why = ", for --max-time is over," if late else ","
            console.note(
                f"stopped after step {run.loop.position.step} of {steps}{why} and saved; go on with the same command "
                "and --resume"
            )

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        def noted(number: int, frame: FrameType | None) -> None:
            if self.code:
                os._exit(self.code)
            self.code = 128 + number
            self._run.stop()
            with suppress(OSError):  # a stderr that is closed; and not by click, which may be at work just now
                os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")

        before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _words(metrics: Mapping[str, Any], which: str = "") -> str:
    """What there is to see besides a loss."""
    if f"{which}task" in metrics:
        return f", task {metrics[f'{which}task']:.3f}"
    if f"{which}reward" in metrics:
        return f", reward {metrics[f'{which}reward']:.3f}"
    if f"{which}rewards/accuracies" not in metrics:
        return ""
    right = metrics[f"{which}rewards/accuracies"]
    if (margin := metrics.get(f"{which}rewards/margins")) is None:  # kto's answers have no other beside them
        return f", {right:.0%} right"
    return f", margin {margin:.3f} ({right:.0%} right)"
