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
from collections.abc import Iterator, Mapping, Sequence
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
_OF_A_STEP = ("loss", "epoch", "tokens", "seconds")  # which a report is made of
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
            with suppress(OSError):  # as where nothing may be written, which is told of soon
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
    """The lines of a run's metrics but those that are none: a last one that the run died over, and damaged ones.

    Raises PronkError where the file cannot be read.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """And how many lines are damaged; whatever run died over the last, its step comes again."""
    path = folder / METRICS
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise PronkError(f"{path}: cannot be read: {error.strerror or error}") from None
    found, damaged = [], 0
    for number, raw in enumerate(lines, 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and type(line.get("step")) is int and all(map(_is_metric, line.values())):
            found.append({"lr" if name == "rate" else name: value for name, value in line.items()})  # so 0.1 called it
        else:
            damaged += number < len(lines)
    return found, damaged


def _is_metric(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _LARGEST)


def is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics has what each step's has, or each look's."""
    names = _OF_A_STEP if "loss" in line else ("held_out_loss",)
    return line["step"] >= ("loss" in line) and all(line.get(name) is not None for name in names)


def forget_metrics(folder: Path, after: int, *, looked: bool = False) -> list[str]:
    """Take away those of the steps after a checkpoint, which will come again, and what is damaged.

    Gives what there is to say of damage. `looked`: there was a look at held-out data before the first step.
    """
    found, damaged = _read(folder)
    kept: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in found:
        key = line["step"], "loss" in line
        if line["step"] > after:
            continue
        if is_whole(line) and key not in kept:
            kept[key] = line
        else:
            damaged += 1
    try:
        with replacing(folder / METRICS) as fresh:
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept.values()), encoding="utf-8")
    except OSError as error:
        raise PronkError(f"{folder / METRICS}: cannot be written: {error.strerror or error}") from None
    lost = after - sum(of_step for _, of_step in kept)
    first = "the look before the first step is lost" if looked and (0, False) not in kept else ""
    return told(folder / METRICS, damaged, f"{lost} of {after} steps are lost" if lost else "", first)


def told(file: Path, damaged: int, *lost: str) -> list[str]:
    """What there is to say of a file that a run goes on with, where so many lines were left out of it."""
    left_out = f"{damaged} {'line is' if damaged == 1 else 'lines are'} left out" if damaged else ""
    found = ", ".join(filter(None, (left_out, *lost)))
    return [f"{file} is damaged: {found}; what is told of the run is of the others"] if found else []
