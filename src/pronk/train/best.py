"""The best of a run in its folder, and whether it is still there when the run goes on.

It is written at once, and the position that knows of it with the next checkpoint. A run that died between the two has
left the best of steps that are to come again, perhaps by another reward; and a hand may have put anything there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.checkpoint.adapter import WEIGHTS
from pronk.checkpoint.digest import digest
from pronk.errors import BadRequest
from pronk.strict_json import finite
from pronk.train.folder import MODEL
from pronk.train.kept import Kept

if TYPE_CHECKING:
    from pronk.train.trainer import Trainer


def written(run: Trainer, line: Mapping[str, Any]) -> Kept:
    """What has just been written, after the look of that line of metrics."""
    found = run.group.lead(lambda _: _digest(run))
    return Kept(finite(line), found or "")  # the first process, which has one, saves it


def know_again(run: Trainer) -> list[str]:
    """Where the best is not what a resumed run takes it for, it is sought anew: what there is to say of that.

    Raises BadRequest where it is gone, or is another and there will be no look that finds one.
    """
    position, made = run.loop.position, _place(run)
    if position.best is None:
        return []
    if not made.exists():  # it would come back only if it were surpassed
        raise BadRequest(f"{made}, the best so far, is gone; bring it back, or begin in another folder")
    if run.changed and not run.finished:
        why = "what held-out data gave until now does not compare with what it will give"
    elif run.group.any(bool(run.group.lead(lambda _: _is_another(run)))):
        why = f"{made} is not what was the best when step {position.step} was saved"
        if run.finished:
            raise BadRequest(f"{why}; bring that back, or begin in another folder")
        why += ", but of a later step, which comes again, or damaged"
    else:
        return []
    position.best, position.kept, position.waited = None, None, 0
    return [f"{why}: the best is sought anew"]


def _is_another(run: Trainer) -> bool:
    known = run.loop.position.kept
    return known is not None and _digest(run) != known.digest


def _digest(run: Trainer) -> str:
    """As of what a run begins from: of large files it reads pieces. Raises BadFile."""
    made = _place(run)
    files = (made,) if run.settings.lora else tuple(sorted(made.glob("*.safetensors")))
    return digest(replace(run.checkpoint, tensors={}, files=files))


def _place(run: Trainer) -> Path:
    return run.folder / (WEIGHTS if run.settings.lora else MODEL)
