"""A task of lm-evaluation-harness, asked of the module in training at each look at held-out data: what does best on it
is kept, and a run that no longer does better ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from pronk.errors import BadRequest
from pronk.train.distributed import Group
from pronk.train.runs import samples
from pronk.train.runs.options import Contradiction
from pronk.train.trainer import Trainer

if TYPE_CHECKING:
    from pronk.train.runs.run import Prepared


def judge(ready: Prepared, group: Group) -> Callable[[Trainer], float]:
    """Raises BadRequest and PronkError, before there is anything to be judged."""
    name = ready.settings.early_stop_task
    assert name
    if group.size > 1:
        raise Contradiction(lambda o: f"{o('early_stop_task')} is for one process; start without torchrun")
    if not ready.data.held_out:
        raise BadRequest("early_stop_task is asked when held-out data is looked at; hold some out (eval_data)")
    from pronk.measure import tasks  # at which the harness is looked for

    tasks.check([name])
    return lambda trainer: score(trainer, ready)


def score(trainer: Trainer, ready: Prepared) -> float:
    """Of its first metric of which more is better. The harness sets seeds: what the run draws is drawn as without it.

    Raises BadRequest for a task that has no such metric, or where it is no number.
    """
    name, limit = trainer.settings.early_stop_task, trainer.settings.early_stop_limit
    assert name
    from pronk.measure import tasks

    with _seeds_kept(trainer.loop.device), samples.answering(trainer, ready) as llm:
        found = tasks.evaluate(llm, [name], limit=limit, progress=lambda title, done, total: None)
    values = [
        float(metric["value"])
        for task in found.values()
        for metric in task["metrics"].values()
        if metric["better"] == "higher"
    ]
    if not values:
        raise BadRequest(f"early_stop_task {name} has no metric of which more is better; name another task")
    if not math.isfinite(values[0]):  # than which nothing would be better
        raise BadRequest(f"early_stop_task {name} gave {values[0]} in the place of a score; name another task")
    return values[0]


@contextmanager
def _seeds_kept(device: torch.device) -> Iterator[None]:
    own, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)
