"""Under torchrun: the first process speaks, the others are silent, and one of all says what went wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pronk.train.distributed import Group


@contextmanager
def joined(device: str | None) -> Iterator[Group]:
    """The group of processes that this one shares its work with; without torchrun it is alone."""
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
