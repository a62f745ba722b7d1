"""Journal: report.json on disk, rewritten as a whole after every step of a comparison, so that none is done twice.

A step is measured once, by a worker, and what it gave is kept under "steps", by its name; all else in the file is made
of that. So a comparison can go on after an interrupt. training.json, of techniques of training, is another.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk import __version__, strict_json
from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest, PronkError, os_problem
from pronk.measure import schema
from pronk.measure.machine import now
from pronk.measure.worker import Worker
from pronk.system import replacing

NAME = "report.json"
ANEW = "begin anew (--overwrite), or elsewhere (--out)"

# What a report was begun with, and what steps gave -> the rest of the report.
Compose = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
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


class Journal:
    """What `steps` gave so far, in `steps` by name; `compose` makes the report of it, whenever the file is written."""

    def __init__(
        self,
        path: Path,
        steps: Sequence[Step],
        compose: Compose,
        origin: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """`origin`: the provenance of now; `saved`: the report that is gone on with, whose own it is then. Raises
        BadFile where what its steps gave is not what a report is made of.
        """
        self.path, self._asked, self._compose = path, steps, compose
        self._begun = saved or {**origin, "provenance": origin, "steps": {}}
        self.steps: dict[str, Any] = dict(self._begun["steps"])
        self._left = _digest(path)  # as it was left by us: where it changes, another writes there, too
        try:
            self.report()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
            raise BadFile(path, f"is damaged; {ANEW}", field="steps") from None

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Do the steps that are not kept yet; gives the report. Whatever ends this early (an error, Ctrl-C) ends all
        workers at once, and leaves on disk what was finished.

        `progress`: what is being done, and how much of all costs is; how long the rest takes nobody knows beforehand.
        """
        todo = [step for step in self._asked if step.name not in self.steps]
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
                    workers[step.process] = Worker(step.who)
                self.record(step.name, step.measure(workers[step.process], tell))
                done += step.cost
                if last[step.process] is step:
                    workers.pop(step.process).close()
        finally:
            for worker in workers.values():
                worker.kill()
        return self.write()

    def record(self, step: str, result: Any) -> None:
        """Keep what a step gave, on disk. Raises PronkError, and does not keep it, where the file cannot be written."""
        self.steps[step] = result
        try:
            self.write()
        except PronkError:
            self.steps.pop(step, None)
            raise

    def report(self) -> dict[str, Any]:
        return {
            "schema": schema.SCHEMA,
            "pronk": __version__,
            "made": now(),
            "command": self._begun["command"],
            "finished": all(step.name in self.steps for step in self._asked),
            **self._compose(self._begun, self.steps),
            "steps": self.steps,
        }

    def write(self) -> dict[str, Any]:
        """The report, beside its place first: a reader never finds half of it. Raises PronkError where it cannot be
        written, or another process has written there.
        """
        report = self.report()
        text = json.dumps(strict_json.finite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        data = text.encode(errors="backslashreplace")  # surrogates stand for the bytes of paths that are not UTF-8
        if (found := _digest(self.path)) and found != self._left:
            self.steps.clear()  # none of them is kept
            raise PronkError(f"{self.path}: another process writes here, too; give each a folder of its own (--out)")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as fresh:
                fresh.write_bytes(data)
        except OSError as error:
            raise PronkError(f"{self.path}: cannot be written: {os_problem(error)}") from None
        self._left = hashlib.sha256(data).digest()
        return report


def _digest(path: Path) -> bytes | None:
    """Of what the file holds; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None


def opened(path: Path, shape: Any = schema.REPORT, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """The report that is gone on with; None where one begins. Raises BadRequest where there is none to go on with,
    where none could be written, or one is there and may not be overwritten; BadFile where it is not as `shape` has it.
    """
    if resume and not path.is_file():
        raise BadRequest(f"{path} is absent: there is nothing to go on with; begin without --resume")
    if resume:
        return schema.read(path, shape, anew=ANEW)
    if path.exists() and not overwrite:
        raise BadRequest(
            f"{path} exists; go on with it (--resume), replace it (--overwrite), or write elsewhere (--out)"
        )
    place = next(folder for folder in (path.parent, *path.parent.absolute().parents) if folder.exists())
    try:
        if not place.is_dir():
            raise NotADirectoryError(None, f"{place}: is no folder")
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:  # which names a file that nobody knows of
        raise BadRequest(f"{path.parent}: a report cannot be written there: {error.strerror or error}") from None


def check_same(
    path: Path, origin: Mapping[str, Any], saved: Mapping[str, Any], facts: Sequence[tuple[str, Any, Any]]
) -> None:
    """Raises BadRequest where what lies behind the same words has changed since a report was begun. `facts`: in words
    what it was begun with, if it is another one now; what there is now; what there was."""
    then_model = (saved["provenance"] or {}).get("model_sha256")
    always = [
        ("by another version of pronk", __version__, saved["pronk"]),
        ("with another model", origin["model_sha256"], then_model),
    ]
    for what, ours, theirs in [*facts, *always]:
        if ours != theirs:
            raise BadRequest(f"{path} was begun {what}; {ANEW}")


def check_said(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Raises BadRequest where an option is not None now and was another one when a report was begun."""
    for name, value in now.items():
        if value is not None and value != then.get(name):
            option = "the model" if name == "model" else "--" + name.replace("_", "-")
            before = "none" if name == "tasks" and then[name] is None else _shown(then.get(name))
            raise BadRequest(
                f"{option} is {_shown(value)} now, but the report was begun with {before}; leave it out to go on"
            )


def _shown(value: object) -> str:
    if value is None:
        return "the default"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
