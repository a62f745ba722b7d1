"""A run's metrics to TensorBoard or Weights & Biases as they come, besides metrics.jsonl, which has them all.

Names are those of transformers' Trainer (train/loss, train/learning_rate, eval/loss), so that runs of both can be laid
over each other. A log that fails is told of once and left out from then on; it never ends a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from pronk.errors import PronkError, one_line

_NAMES = {"lr": "learning_rate"}
_HELD_OUT = "held_out_"


class Log(NamedTuple):
    write: Callable[[int, Mapping[str, float]], None]  # a step, and numbers by their names
    close: Callable[[], None]


def _tensorboard(folder: Path, settings: Mapping[str, Any], after: int) -> Log:
    """Event files in the run's folder, under tensorboard/."""
    from torch.utils.tensorboard import SummaryWriter

    # Steps after the checkpoint that a run goes on from come again: those there are not to be shown.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else None)
    if not after:
        writer.add_text("settings", f"```\n{json.dumps(settings, indent=2)}\n```")

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    return Log(write, writer.close)


def _weights_and_biases(folder: Path, settings: Mapping[str, Any], after: int) -> Log:
    """One run there for the run here, however often it is resumed. Its project and mode are those of its environment
    variables (WANDB_PROJECT, WANDB_MODE=offline, ...); the project is "pronk" where none is named."""
    known = folder / "wandb" / "id"
    known.parent.mkdir(exist_ok=True)
    if not known.exists():
        known.write_text(uuid4().hex[:12], encoding="utf-8")
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", "pronk"),
        dir=str(folder),
        name=folder.resolve().name,
        id=known.read_text(encoding="utf-8"),
        resume="allow",
        config=dict(settings),
    )
    return Log(lambda step, numbers: run.log(dict(numbers), step=step), run.finish)


_KINDS: dict[str, tuple[Callable[[Path, Mapping[str, Any], int], Log], str, str]] = {
    "tensorboard": (_tensorboard, "torch.utils.tensorboard", "SummaryWriter"),
    "wandb": (_weights_and_biases, "wandb", "init"),
}


def check(kinds: Sequence[str]) -> None:
    """Raise PronkError where what a kind takes is not installed."""
    for kind in kinds:
        _, module, what = _KINDS[kind]
        try:
            getattr(import_module(module), what)
        except (ImportError, AttributeError) as error:  # a folder named like a library can be imported, too
            if isinstance(error, ImportError) and error.name == "torch":
                continue  # without which nothing is trained, and that is said elsewhere
            raise PronkError(f"--log-to {kind} needs {kind}; install it with: pip install {kind}") from None


class Logs:
    """All that a run logs to, each opened by the first line. `after`: the step that it goes on from, or 0."""

    def __init__(
        self, kinds: Sequence[str], folder: Path, settings: Mapping[str, Any], after: int, warn: Callable[[str], None]
    ) -> None:
        self._open: dict[str, Log | None] = dict.fromkeys(kinds)
        self._of, self._warn = (folder, settings, after), warn

    def __call__(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        numbers = dict(named(line))
        for kind in [*self._open]:
            with self._attempt(kind):
                log = self._open[kind] = self._open[kind] or _KINDS[kind][0](*self._of)
                log.write(line["step"], numbers)

    def close(self) -> None:
        for kind, log in [*self._open.items()]:
            with self._attempt(kind):
                if log:
                    log.close()
        self._open = {}

    @contextmanager
    def _attempt(self, kind: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever is the matter with it, training is not
            del self._open[kind]
            problem = one_line(f"{type(error).__name__}: {error}", 300)
            self._warn(f"{kind} failed, and the run goes on without it ({problem})")


def named(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a line of metrics by the names they have in a log."""
    if "tokens" in line and line.get("seconds"):
        yield "train/tokens_per_second", line["tokens"] / line["seconds"]
    for name, number in line.items():
        if name == "step" or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        held_out = name.startswith(_HELD_OUT)
        name = name.removeprefix(_HELD_OUT)
        yield f"{'eval' if held_out else 'train'}/{_NAMES.get(name, name)}", number
