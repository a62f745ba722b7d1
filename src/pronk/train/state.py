"""A run's checkpoints: all that it takes to go on as if nothing had happened.

Each is a folder `step-000123`. What is trained, the optimizer's state and random states are a checkpoint of
torch.distributed: each process writes its own shares, and any number of processes can read them. How far the run had
come is JSON beside it. All is written under another name and renamed when it is whole and on the disk, so that one that
is there is complete, whenever the machine died.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shares
from torch.distributed.checkpoint.state_dict_saver import save as save_shares

from pronk import strict_json
from pronk.errors import BadFile, PronkError, os_problem, out_of_memory, short
from pronk.train import kept, optimizers, saved_settings
from pronk.train.distributed import Whole, is_loss
from pronk.train.loop import REMEMBERED, Loop, Position
from pronk.train.state_reader import Reader

_NAME = re.compile(r"step-(\d{6,})")
_POSITION = "position.json"
_TRAINED, _OPTIMIZER, _RANDOM = "trained.", "optimizer.", "random."  # how names of tensors begin
_RANDOM_NAME = re.compile(rf"{re.escape(_RANDOM)}(cpu|cuda)\.\d{{1,6}}")


def save(
    loop: Loop,
    folder: Path,
    settings: Mapping[str, Any],
    keep: int = 2,
    beside: Callable[[Path, Whole], None] | None = None,
    loose: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint in `folder`; of those there, the newest `keep` stay. `beside` puts more into it. `loose`: digests of
    what may change between two starts (`changed`). Raises PronkError where the disk refuses."""
    destination = folder / name_of(loop.position.step)
    partial = folder / f".{destination.name}.part"  # one run has the folder for itself
    position: dict[str, Any] = {
        "position": asdict(loop.position),
        "scaler": loop.scaler.state_dict(),
        "version": saved_settings.VERSION,
        "settings": dict(settings),
    } | ({"loose": dict(loose)} if loose else {})

    def begin(_: Any) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish(_: Any) -> None:
        with (partial / _POSITION).open("x", encoding="utf-8") as file:
            file.write(json.dumps(position, indent=2))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(destination, ignore_errors=True)
        partial.rename(destination)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        loop.group.lead(begin)
        with _unwarned():
            save_shares(_tensors(loop), storage_writer=FileSystemWriter(partial), no_dist=loop.group.size == 1)
        if beside:
            loop.group.lead(lambda whole: beside(partial, whole), loop.model)
        loop.group.lead(finish)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a full disk into one of the latter
        if is_loss(_cause(error)):
            raise
        raise PronkError(f"{destination}: the checkpoint cannot be written: {_problem(error)}") from None
    finally:
        if loop.group.first:
            shutil.rmtree(partial, ignore_errors=True)
    return destination


def name_of(step: int) -> str:
    """A checkpoint's."""
    return f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, the newest last."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load(
    loop: Loop,
    checkpoint: Path,
    settings: Mapping[str, Any],
    usual: Mapping[str, Any] | None = None,
    lasted: Callable[[Mapping[str, Any]], None] = lambda length: None,
) -> None:
    """Put `loop` where the checkpoint was taken. Raises BadRequest where that run had other settings, and BadFile.

    `usual`: defaults of `settings`, which hold where it is older than they are. `lasted` hears how long that run was to
    be (saved_settings.LENGTH). Random states are left as they are where more or fewer processes wrote them: dropout
    draws anew.
    """
    try:
        raw = strict_json.read(checkpoint / _POSITION, paths=True)
        lasted(saved_settings.check(raw, checkpoint, settings, usual or {}))
        position = _position(raw["position"], loop, checkpoint)
        _set_scaler(loop, raw["scaler"])
        reader = Reader(checkpoint)
        _make_room(loop, reader, position)
        tensors = _tensors(loop)
        if len([name for name in reader.shapes if name.startswith(f"{_RANDOM}cpu.")]) != loop.group.size:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_RANDOM)}
        with _unwarned():
            load_shares(tensors, storage_reader=reader, no_dist=loop.group.size == 1)
        _check_steps(loop, position)
        _set_random(loop, tensors)
        loop.position = position
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, PronkError) or not isinstance(cause, Exception) or is_loss(cause) or out_of_memory(cause):
            raise cause from None
        raise BadFile(checkpoint, f"no checkpoint of this run: {_problem(error)}") from None


def changed(checkpoint: Path, loose: Mapping[str, str]) -> list[str]:
    """What of `loose` was another when the checkpoint was written, by its keys; an older one does not say."""
    before = strict_json.read(checkpoint / _POSITION, paths=True).get("loose")
    return [key for key, now in loose.items() if isinstance(before, dict) and before.get(key, now) != now]


def _position(raw: Mapping[str, Any], loop: Loop, checkpoint: Path) -> Position:
    """Raises ValueError or TypeError where it is none, or of another step than its folder."""
    position = Position(**raw)
    if asdict(position).keys() - raw.keys() - {"kept"}:  # which came after 0.1
        raise ValueError("its position is not whole")
    step, losses = position.step, position.losses
    read = loop.accumulate + (loop.writer.spare if loop.writer else 0)  # micro-batches a step, at most
    bounds = {"step": loop.schedule.steps, "epoch": step * read, "waited": step}
    if any(not _is_count(raw[name], most) for name, most in bounds.items()):
        raise ValueError("its position is no number of steps of this run")
    if not _is_count(position.at, len(loop.batches.epoch(position.epoch))):
        raise ValueError(f"an epoch has no micro-batch {short(position.at)}")
    if not isinstance(losses, list) or len(losses) > min(step, REMEMBERED):
        raise ValueError("its losses are no list of its newest")
    if not all(type(loss) in (int, float) for loss in (*losses, position.best or 0)):
        raise ValueError("a loss of it is no number")
    if (match := _NAME.fullmatch(checkpoint.name)) and int(match[1]) != step:
        raise ValueError(f"it is of step {step}, which is not what it is called")
    position.kept = kept.read(raw.get("kept"), step)
    return position


def _set_scaler(loop: Loop, raw: Mapping[str, Any]) -> None:
    """Raises ValueError: GradScaler takes everything."""
    now = loop.scaler.state_dict()
    moving = {"scale", "_growth_tracker"} & now.keys()
    if not isinstance(raw, dict) or {**raw, **{name: now[name] for name in moving & raw.keys()}} != now:
        raise ValueError("its scaler of gradients is another")
    if moving:
        scale = raw["scale"]
        if type(scale) not in (int, float) or not 0 < scale <= torch.finfo(torch.float32).max:
            raise ValueError("its scale of gradients is none")
        if not _is_count(raw["_growth_tracker"], now["growth_interval"]):
            raise ValueError("its number of steps since the scale of gradients changed is none")
    loop.scaler.load_state_dict(raw)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _tensors(loop: Loop) -> dict[str, Tensor]:
    """All of a checkpoint, by name: to be written, or to be read into."""
    tensors = {}
    for name, parameter in _trained(loop).items():
        tensors[_TRAINED + name] = parameter.detach()
        for key, value in loop.optimizer.state[parameter].items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    rank = loop.group.rank
    tensors[f"{_RANDOM}cpu.{rank}"] = torch.get_rng_state()
    if loop.device.type == "cuda":
        tensors[f"{_RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state(loop.device)
    return tensors


def _make_room(loop: Loop, reader: Reader, position: Position) -> None:
    """For the optimizer's state, where all that is stored has the names, shapes and types that this run's would have.

    What has its parameter's shape is cut among processes as that is. Raises ValueError.
    """
    trained, stored = _trained(loop), reader.shapes
    expected = {_TRAINED + name: (parameter.shape, parameter.dtype) for name, parameter in trained.items()}
    begun = any(name.startswith(_OPTIMIZER) for name in stored)
    if not begun and position.step and not loop.scaler.is_enabled():  # whoever has that may leave the first steps out
        raise ValueError("the optimizer's state is absent")
    states = optimizers.states_of(loop.optimizer) if begun else {}
    for name, parameter in trained.items() if begun else ():
        for key, value in states[parameter].items():
            expected[f"{_OPTIMIZER}{name}.{key}"] = value.shape, value.dtype
    for name, (shape, dtype) in expected.items():
        if name not in stored:
            raise ValueError(f"{name} is absent")
        if stored[name] != (shape, dtype):
            (was, kind) = stored[name]
            raise ValueError(f"{name} is {kind} of shape {tuple(was)}, and in this run {dtype} of {tuple(shape)}")
    for name, (_, dtype) in stored.items():
        if name not in expected and not (_RANDOM_NAME.fullmatch(name) and dtype == torch.uint8):
            raise ValueError(f"{short(name)} is no part of this run")
    reader.unsigned = frozenset(
        name for name in expected if name.startswith(_OPTIMIZER) and name.rpartition(".")[2] in optimizers.UNSIGNED
    )
    loop.optimizer.state.clear()
    for parameter in trained.values() if begun else ():
        for key, value in states[parameter].items():
            if value.shape == parameter.shape:
                room = torch.zeros_like(parameter.detach(), dtype=value.dtype)
            else:
                device = parameter.device if value.ndim or value.is_meta else "cpu"
                room = torch.zeros(value.shape, dtype=value.dtype, device=device)
            loop.optimizer.state[parameter][key] = room


def _check_steps(loop: Loop, position: Position) -> None:
    """Those that the optimizer counts: its corrections divide by what follows from them. Raises ValueError."""
    for state in loop.optimizer.state.values():
        steps = float(state.get("step", 0.0))
        if steps > position.step * loop.objective.updates or not steps.is_integer():
            raise ValueError(f"the optimizer has made {steps:g} steps of {position.step}")


def _set_random(loop: Loop, tensors: Mapping[str, Tensor]) -> None:
    rank = loop.group.rank
    if (state := tensors.get(f"{_RANDOM}cpu.{rank}")) is not None:
        torch.set_rng_state(state)
    if (state := tensors.get(f"{_RANDOM}cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(state, loop.device)


def _trained(loop: Loop) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in loop.model.named_parameters() if parameter.requires_grad}


def _cause(error: BaseException) -> BaseException:
    """Of a checkpoint's failure, what the first process met that met anything."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _problem(error: BaseException) -> str:
    """In one line."""
    error = _cause(error)
    if isinstance(error.__context__, OSError):  # torch finds, after a write that failed, a file too short for it
        error = error.__context__
    if isinstance(error, OSError):
        return os_problem(error)
    if "unexpected pos" in str(error):  # the same of another process, from which the context does not come along
        return "a write failed; is the disk full?"
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _unwarned() -> Iterator[None]:
    """torch warns where one process writes a checkpoint alone, as it was told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
