"""What the training verbs do with a run of pronk.train.runs: show it, train it to its end, report it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, training_masks, training_options, training_plan, training_report, training_rollouts
from pronk.cli.training_progress import Watch

if TYPE_CHECKING:
    from pronk.train.distributed import Group
    from pronk.train.runs.run import Run


def perform(make: Callable[..., Run], given: Mapping[str, Any]) -> None:
    """`make`: the function that takes the verb's options, by their names."""
    views = {name: given.get(name, False) for name in training_options.VIEWS}
    looks = [name for name, asked in views.items() if asked and name != "as_json"]
    if len(looks) > 1:
        several = " and ".join("--" + name.replace("_", "-") for name in looks)
        raise click.UsageError(f"{several} print different things; give one of them")
    with training_options.refused():
        run = make(**{name: value for name, value in given.items() if name not in views})
    if run.how.out is None and not looks:
        raise click.UsageError("name a folder for what comes out: --out FOLDER")
    run.watcher = watch = Watch(run)
    with _joined(run.how.device) as group:
        if looks:
            _look(run, group, looks[0], views["as_json"])
            return
        for metrics in run.steps(group):
            watch.tell(metrics)
        if not (run.finished or (run.out_of_time and not watch.code)):  # 0: another process was told to stop
            raise click.exceptions.Exit(watch.code or 128 + signal.SIGTERM)
        if group.first:
            report = run.result.to_dict()
            console.write_json(report) if views["as_json"] else console.write(training_report.as_text(report) + "\n")


def _look(run: Run, group: Group, what: str, as_json: bool) -> None:
    if what == "plan":
        training_plan.show(run.plan(group.device), run.settings, as_json=as_json)
    elif what == "show_rollouts":
        training_rollouts.show(run.rollouts(), as_json=as_json)  # type: ignore[attr-defined]
    else:
        for loss in run.data.losses():
            console.note(loss)
        training_masks.show(run.data, run.settings, run.prepared.tokenizer)


@contextmanager
def _joined(device: str | None) -> Iterator[Group]:
    """The group of processes that this one shares its work with; without torchrun it is alone. The first speaks, the
    others are silent, and one of all says what went wrong."""
    from pronk.train import distributed

    try:
        with distributed.joined(device) as group, ExitStack() as silence:
            if not group.first:
                nowhere = silence.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield group
    except distributed.SaidAlready:
        raise click.exceptions.Exit(1) from None
