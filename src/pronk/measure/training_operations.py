"""Training's operations: what a worker does to measure a setting: foretell, load, take steps, look inside of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import checkpoint, system
from pronk.checkpoint.hub import resolve as hub
from pronk.measure.worker import Held

if TYPE_CHECKING:
    from pronk.train.data.examples import Example
    from pronk.train.loop import Loop
    from pronk.train.settings import Settings


def plan(held: Held, settings: Settings, examples: Sequence[Example], device: str | None) -> dict[str, Any]:
    """train.memory's."""
    from pronk.torch_engine.backend import pick_device
    from pronk.train import memory

    opened = checkpoint.open(hub.resolve(settings.model, progress=False))
    found = memory.plan(opened, settings, examples, pick_device(device))
    return {**found.to_dict(), "name": settings.model}  # as it was asked for: a path says where somebody's files lie


def trained(
    held: Held,
    settings: Settings,
    examples: Sequence[Example],
    device: str | None,
    threads: int | None,
    count: int,
    account: bool,
) -> dict[str, Any]:
    """What was loaded; of each of so many steps seconds, tokens read and loss; and the peak of memory since the process
    began. With `account` the steps are then looked at from inside. Nothing of it is ever written."""
    from pronk.torch_engine import device_memory
    from pronk.train.data.sources import Data
    from pronk.train.trainer import Trainer

    opened = checkpoint.open(hub.resolve(settings.model, progress=False))
    run = Trainer(opened, Data(examples), settings, Path(), device=device, threads=threads)
    torch = sys.modules["torch"]
    taken = [run.loop.step() for _ in range(count)]
    on_gpu = device_memory.of(run.loop.device)
    return {
        "load": {
            "trained_share": run.trained_share,
            "device": str(run.loop.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "steps": {
            "seconds": [step.seconds for step in taken],
            "tokens": [step.tokens for step in taken],
            "loss": [step.loss for step in taken],
            "peak_bytes": on_gpu.peak() if on_gpu else system.peak_memory(),
        },
        **({"account": _account(run.loop, opened.config.vocab_size)} if account else {}),
    }


def _account(loop: Loop, vocabulary: int) -> dict[str, Any]:
    """Two steps more, looked at from inside, which takes its time: the most bytes of each kind, and operations."""
    from pronk.train.ledger import KINDS, Ledger, operations

    with Ledger(loop.model, loop.optimizer, vocabulary) as ledger:
        loop.step()
    flops, step = operations(loop.step)  # apart, for counting holds on to what the ledger would see go
    return {
        "bytes": {kind: ledger.most[kind] for kind in KINDS},
        "at_peak": {kind: ledger.at_peak[kind] for kind in KINDS},
        "flops": flops,
        "tokens": step.tokens,
    }
