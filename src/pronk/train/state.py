"""A run's checkpoints: all that it takes to go on as if nothing had happened.

Each is a folder `step-000123`. What is trained, the optimizer's state and random states are a checkpoint of
torch.distributed: each process writes its own shares, and any number of processes can read them. How far the run had
come is JSON beside it. All is written under another name and renamed when it is whole and on the disk, so that one that
is there is complete, whenever the machine died.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shares
from torch.distributed.checkpoint.state_dict_saver import save as save_shares

from pronk import strict_json
from pronk.errors import BadFile, BadRequest, PronkError, os_problem
from pronk.train.distributed import is_loss
from pronk.train.loop import Loop, Position
from pronk.train.state_reader import Reader

_NAME = re.compile(r"step-(\d{6,})")
_POSITION = "position.json"
DIGEST = "the SHA-256 of its "  # a setting whose name begins so stands for what a file holds
_TRAINED, _OPTIMIZER, _RANDOM = "trained.", "optimizer.", "random."  # how names of tensors begin
_PADDING = 256  # numbers that an optimizer's state may have more of than its parameter


def save(loop: Loop, folder: Path, settings: Mapping[str, Any], keep: int = 2) -> Path:
    """A checkpoint in `folder`; of those there, the newest `keep` stay. Raises PronkError where the disk refuses."""
    destination = folder / f"step-{loop.position.step:06d}"
    partial = folder / f".{destination.name}.part"  # one run has the folder for itself
    position = {
        "position": loop.position.to_dict(),
        "scaler": loop.scaler.state_dict(),
        "settings": dict(settings),
    }

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
        loop.group.lead(finish)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch turns a full disk into one of the latter
        if is_loss(_cause(error)):
            raise
        raise PronkError(f"{destination}: the checkpoint cannot be written: {_problem(error)}") from None
    finally:
        if loop.group.first:
            shutil.rmtree(partial, ignore_errors=True)
    return destination


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, the newest last."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load(loop: Loop, checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Put `loop` where the checkpoint was taken. Raises BadRequest where that run had other settings, and BadFile.

    Random states are left as they are where more or fewer processes wrote them: dropout draws anew.
    """
    raw = strict_json.read(checkpoint / _POSITION, paths=True)
    before = raw.get("settings")
    if not isinstance(before, dict):
        raise BadFile(checkpoint / _POSITION, "required and absent", field="settings")
    for key in dict.fromkeys([*settings, *before]):  # what is settled by others comes after them
        if (old := before.get(key)) != (new := json.loads(json.dumps(settings.get(key)))):
            if key.startswith(DIGEST):
                raise BadRequest(
                    f"{checkpoint} was made with other {key.removeprefix(DIGEST)}: what their name stands for has "
                    "changed since; bring it back, or begin in another folder"
                )
            raise BadRequest(
                f"{checkpoint} was made with {key}={old!r}, and now it is {new!r}; resume with the same, or begin in "
                "another folder"
            )
    try:
        loop.position = _position(raw["position"], loop, checkpoint)
        loop.scaler.load_state_dict(raw["scaler"])
        reader = Reader(checkpoint)
        stored = reader.tensors()
        _make_room(loop, stored)
        tensors = _tensors(loop)
        if len([name for name in stored if name.startswith(f"{_RANDOM}cpu.")]) != loop.group.size:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_RANDOM)}
        with _unwarned():
            load_shares(tensors, storage_reader=reader, no_dist=loop.group.size == 1)
        _set_random(loop, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, OSError, UnpicklingError) as error:
        raise BadFile(checkpoint, f"no checkpoint of this run: {_problem(error)}") from None
    except CheckpointException as error:
        raise BadFile(checkpoint, f"no checkpoint of this run: {_problem(error)}") from None


def _position(raw: Mapping[str, Any], loop: Loop, checkpoint: Path) -> Position:
    """Raises ValueError or TypeError where it is none, or of another step than its folder."""
    position = Position(**raw)
    numbers = position.step, position.epoch, position.at, position.waited
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("its position is no number of steps")
    if position.at > len(loop.batches.epoch(position.epoch)):
        raise ValueError(f"an epoch has no micro-batch {position.at}")
    if not isinstance(position.losses, list):
        raise ValueError("its losses are no list")
    if not all(type(loss) in (int, float) for loss in (*position.losses, position.best or 0)):
        raise ValueError("a loss of it is no number")
    if (match := _NAME.fullmatch(checkpoint.name)) and int(match[1]) != position.step:
        raise ValueError(f"it is of step {position.step}, which is not what it is called")
    return position


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


def _make_room(loop: Loop, stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """For the optimizer's state, as it was; what has its parameter's shape is cut among processes as that is."""
    trained = _trained(loop)
    for name, (shape, dtype) in stored.items():
        if not name.startswith(_OPTIMIZER):
            continue
        of, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
        parameter = trained[of].detach()
        if shape == parameter.shape:
            room = torch.zeros_like(parameter, dtype=dtype)
        elif math.prod(shape) <= parameter.numel() + _PADDING:
            room = torch.zeros(shape, dtype=dtype, device=parameter.device if shape else "cpu")
        else:
            raise ValueError(f"{name} has the shape {tuple(shape)}")
        loop.optimizer.state[trained[of]][key] = room


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
    if "weights_only" in str(error):  # torch goes on to say how to let a file run code
        return "a file of it is damaged, or holds more than tensors"
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _unwarned() -> Iterator[None]:
    """torch warns where one process writes a checkpoint alone, as it was told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
