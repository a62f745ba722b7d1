"""A run's checkpoints: all that it takes to go on as if nothing had happened.

Each is a folder `step-000123` with what is trained, the optimizer's state and random states (tensors), and how far the
run had come (JSON). It is written under another name and renamed when it is whole and on the disk, so that one that is
there is complete, whenever the machine died.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from pronk import strict_json
from pronk.errors import BadFile, BadRequest, PronkError, os_problem
from pronk.train.loop import Loop, Position

_NAME = re.compile(r"step-(\d{6,})")
_TENSORS, _POSITION = "state.pt", "position.json"


def save(loop: Loop, folder: Path, settings: Mapping[str, Any], keep: int = 2) -> Path:
    """A checkpoint in `folder`; of those there, the newest `keep` stay. Raises PronkError where the disk refuses."""
    destination = folder / f"step-{loop.position.step:06d}"
    partial = folder / f".{destination.name}.{os.getpid()}.part"
    tensors = {
        "trained": {name: p.detach() for name, p in loop.model.named_parameters() if p.requires_grad},
        "optimizer": loop.optimizer.state_dict(),
        "scaler": loop.scaler.state_dict(),
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state(loop.device) if loop.device.type == "cuda" else None,
    }
    try:
        partial.mkdir(parents=True)
        with (partial / _TENSORS).open("xb") as file:
            torch.save(tensors, file)
            os.fsync(file.fileno())
        text = json.dumps({"position": loop.position.to_dict(), "settings": dict(settings)}, indent=2)
        with (partial / _POSITION).open("x", encoding="utf-8") as text_file:
            text_file.write(text)
            text_file.flush()
            os.fsync(text_file.fileno())
        shutil.rmtree(destination, ignore_errors=True)
        partial.rename(destination)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into the latter
        problem = os_problem(error) if isinstance(error, OSError) else "writing failed; is the disk full?"
        raise PronkError(f"{destination}: the checkpoint cannot be written: {problem}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return destination


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, the newest last."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load(loop: Loop, checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Put `loop` where the checkpoint was taken. Raises BadRequest where that run had other settings, and BadFile."""
    raw = strict_json.read(checkpoint / _POSITION)
    before = raw.get("settings")
    if not isinstance(before, dict):
        raise BadFile(checkpoint / _POSITION, "required and absent", field="settings")
    for key in before.keys() | settings.keys():
        if (old := before.get(key)) != (new := json.loads(json.dumps(settings.get(key)))):
            raise BadRequest(
                f"{checkpoint} was made with {key}={old!r}, and now it is {new!r}; resume with the same, or begin in "
                "another folder"
            )
    try:
        loop.position = Position(**raw["position"])
        tensors = torch.load(checkpoint / _TENSORS, map_location="cpu", weights_only=True)
        with torch.no_grad():
            trained = {name: p for name, p in loop.model.named_parameters() if p.requires_grad}
            for name, parameter in trained.items():
                parameter.copy_(tensors["trained"][name])
        loop.optimizer.load_state_dict(tensors["optimizer"])
        loop.scaler.load_state_dict(tensors["scaler"])
        torch.set_rng_state(tensors["random"])
        if loop.device.type == "cuda" and tensors["cuda_random"] is not None:
            torch.cuda.set_rng_state(tensors["cuda_random"], loop.device)
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError, OSError, UnpicklingError) as error:
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadFile(checkpoint, f"no checkpoint of this run: {problem}") from None
