"""A run's folder: for one run alone, with its metrics, its checkpoints and what comes out.

adapter_config.json, adapter_model.safetensors     what comes out, in PEFT's format (with full training: `model/`)
README.md                                          what was trained, on what and how; see card.py
metrics.jsonl                                      a line a step, a line an evaluation
checkpoints/step-000100/                           to go on from; see state.py
run.yaml                                           what it was asked for; see runs/recipe.py
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pronk.errors import BadRequest, PronkError, os_problem, short
from pronk.strict_json import finite
from pronk.system import replacing
from pronk.train import state

METRICS, CHECKPOINTS, MODEL = "metrics.jsonl", "checkpoints", "model"
_LOCK = ".lock"
_LARGEST = 1e39  # metrics are float32's numbers
_LOGS = {"tensorboard", "wandb"}  # logs.py's folders


@contextmanager
def claimed(folder: Path, *, resume: bool) -> Iterator[Path]:
    """The folder for one run alone; an empty one is taken away again if nothing came to be in it.

    Raises PronkError where it cannot be had, or holds another run's work.
    """
    there, locked, foreign = folder.exists(), (folder / _LOCK).exists(), False
    try:
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=0)
        lock.acquire()
    except FileNotFoundError:
        raise PronkError(f"{folder.parent} is no folder; make it first") from None
    except Timeout:
        raise PronkError(f"{folder}: another run is at work here; choose another folder") from None
    except OSError as error:
        raise PronkError(f"{folder}: cannot be written: {error.strerror or error}") from None
    try:
        _clean(folder)
        if resume:
            to_resume(folder)
        held = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
        if not resume and _never_began(folder, held):
            (folder / METRICS).unlink()
            held = []
        shown = f"{folder}{os.sep}"  # or one that is called full would be taken for the option
        if not resume and state.checkpoints(folder / CHECKPOINTS):
            raise BadRequest(f"{shown} holds a run already; go on with it (--resume), or choose another folder")
        if foreign := not resume and bool(held):
            raise BadRequest(f"{shown} holds {short(held[0])}, which is no run's; choose an empty folder, or a new one")
        yield folder
    finally:
        with suppress(OSError):  # it does not matter, and some systems let no open file go
            empty = [path.name for path in folder.iterdir()] == [_LOCK]
            if empty or (foreign and not locked):  # where nothing of a run belongs
                (folder / _LOCK).unlink()
            if empty and not there:
                folder.rmdir()
        lock.release()


def to_resume(folder: Path) -> list[Path]:
    """The run's checkpoints, the newest last. Raises BadRequest where there is none."""
    if found := state.checkpoints(folder / CHECKPOINTS):
        return found
    raise BadRequest(f"{folder}: no checkpoint to resume from; leave --resume out to begin")


def _clean(folder: Path) -> None:
    """Take away what a run that was killed had half written, and bring back what it had half replaced; elsewhere such
    names may be somebody's."""
    if not ((folder / METRICS).exists() or (folder / CHECKPOINTS).exists()):
        return
    for old in folder.glob(f".{MODEL}.*.old"):  # of one that died amid replacing it: there is no other best
        if not (folder / MODEL).exists():
            old.rename(folder / MODEL)
    halves = (".*.part", ".*.*.lock", f".{MODEL}.*.old", f"{CHECKPOINTS}/.step-*.part")
    for pattern in halves:
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    with suppress(OSError):  # died before its first checkpoint
        (folder / CHECKPOINTS).rmdir()


def _never_began(folder: Path, held: Sequence[str]) -> bool:
    """Whether a run died here before its first checkpoint, after its first look at held-out data."""
    return {*held} - _LOGS == {METRICS} and all(line["step"] == 0 for line in read_metrics(folder))


def write_metrics(folder: Path, line: dict[str, Any]) -> None:
    try:
        with (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(line)) + "\n")  # a gradient in f16 may be infinite
    except OSError as error:
        raise PronkError(f"{folder / METRICS}: cannot be written: {os_problem(error)}") from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, up to one that is none: a last one that the run died over, or a damaged one.

    Raises PronkError where the file cannot be read.
    """
    path = folder / METRICS
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise PronkError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = []
    for raw in lines:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or type(line.get("step")) is not int or not all(map(_is_metric, line.values())):
            break
        found.append({"lr" if name == "rate" else name: value for name, value in line.items()})  # so 0.1 called it
    return found


def _is_metric(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _LARGEST)


def forget_metrics(folder: Path, after: int) -> None:
    """Take away those of the steps after a checkpoint, which will come again."""
    kept = [line for line in read_metrics(folder) if line["step"] <= after]
    try:
        with replacing(folder / METRICS) as fresh:
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    except OSError as error:
        raise PronkError(f"{folder / METRICS}: cannot be written: {error.strerror or error}") from None
