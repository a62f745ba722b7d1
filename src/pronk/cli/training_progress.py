"""A training run, watched: a bar on a terminal, a line now and then elsewhere; one for each look at held-out data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pronk.cli import console, progress

if TYPE_CHECKING:
    from pronk.train.loop import Evaluation, Step
    from pronk.train.trainer import Trainer


def train(run: Trainer, stop: Callable[[], bool]) -> bool:
    """`run.train`, and what it returns."""
    first, steps = run.loop.position.step, run.loop.schedule.steps
    begun, tokens, seconds, state = time.monotonic(), 0, 0.0, ""  # of the steps of this process

    def unit(done: int, total: int) -> str:
        return f"step {first + done} of {steps}{state}"

    with (
        progress.shown("training", unit, patience=0, logged=True) as advance,
        progress.shown("", lambda done, total: f"{done} of {total} examples", logged=True) as look,
    ):
        advance("", 0, max(1, steps - first))

        def watch(step: Step) -> None:
            nonlocal tokens, seconds, state
            tokens, seconds = tokens + step.tokens, seconds + step.seconds
            speed, memory = f"{tokens / seconds:.0f} tokens/s", console.size(peak_bytes(run))
            state = f", loss {step.loss:.3f}{_words(step.seen)}, {speed}, {memory}"
            advance("", step.step - first, steps - first)

        def evaluated(step: int, found: Evaluation) -> None:
            look("", 1, 1)  # takes the bar away
            best = " (the best so far)" if step and run.loop.position.waited == 0 else ""
            left = ""
            if first < step < steps:
                each = (time.monotonic() - begun) / (step - first)
                left = f", {progress.duration(each * (steps - step))} left"
            loss = f"held-out loss {found.loss:.4f}{_words(found.seen)}"
            console.note(f"step {step} of {steps}: {loss}{best}{state if step else ''}{left}")

        def looking(done: int, total: int) -> None:
            advance("", 1, 1)
            look(f"held-out data after step {run.loop.position.step}", done, total)

        return run.train(watch, evaluated, stop, looking)


def peak_bytes(run: Trainer) -> int:
    """The most that was in use so far: of the GPU's memory, or else of the process's."""
    from pronk.system import peak_memory
    from pronk.torch_engine import device_memory

    on_gpu = device_memory.of(run.loop.device)
    return on_gpu.peak() if on_gpu else peak_memory() or 0


def _words(seen: Mapping[str, float]) -> str:
    """What preference tuning shows besides its loss."""
    if "rewards/accuracies" not in seen:
        return ""
    return f", margin {seen['rewards/margins']:.3f} ({seen['rewards/accuracies']:.0%} right)"
