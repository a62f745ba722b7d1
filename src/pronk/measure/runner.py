"""Runner: steps, each measured once by a worker and kept in a journal, so that one can go on after an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.measure.journal import Journal
from pronk.measure.worker import Worker

_TICKS = 100  # a unit of cost: progress counts in whole numbers


@dataclass(frozen=True)
class Step:
    """What a worker is asked. Steps of one process share it: it begins with their first and ends with their last."""

    name: str  # under which the journal keeps what it gives
    what: str  # for people
    cost: float  # about, in any unit
    who: str  # is measured, as errors say it
    process: str
    measure: Callable[[Worker, Progress], Any]


def run(
    steps: Sequence[Step], journal: Journal, operations: Callable[[Progress], Any], progress: Progress | None = None
) -> None:
    """Do the steps that the journal has not. Whatever ends this early (an error, Ctrl-C) ends all workers at once.

    `progress`: what is being done, and how much of all costs is; how long the rest takes nobody knows beforehand.
    """
    todo = [step for step in steps if step.name not in journal.steps]
    last = {step.process: step for step in todo}
    total, done = max(1, round(_TICKS * sum(step.cost for step in todo))), 0.0
    workers: dict[str, Worker] = {}
    try:
        for step in todo:

            def tell(_: str, part: int, whole: int, step: Step = step, done: float = done) -> None:
                so_far = round(_TICKS * (done + step.cost * part / max(whole, 1)))
                if progress:
                    progress(step.what, min(so_far, total - 1), total)

            tell("", 0, 1)
            if step.process not in workers:
                workers[step.process] = Worker(step.who, operations)
            journal.record(step.name, step.measure(workers[step.process], tell))
            done += step.cost
            if last[step.process] is step:
                workers.pop(step.process).close()
    finally:
        for worker in workers.values():
            worker.kill()
