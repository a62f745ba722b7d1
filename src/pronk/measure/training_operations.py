"""Training's operations: what a worker does to measure a setting: foretell, load, take steps, look inside of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronk import system
from pronk.checkpoint.tensors import Progress


class TrainingOperations:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def plan(
        self,
        model: str,
        settings: dict[str, Any],
        lora: dict[str, Any] | None,
        examples: Sequence[tuple[list[int], list[bool]]],
        device: str | None,
    ) -> dict[str, Any]:
        """train.memory's. `settings`: fields of train.settings.Settings; `examples`: token ids, what is learned."""
        import numpy as np

        from pronk import checkpoint
        from pronk.checkpoint.adapter import LoraConfig
        from pronk.checkpoint.hub import resolve as hub
        from pronk.torch_engine.backend import pick_device
        from pronk.train.data.examples import Example
        from pronk.train.data.sources import Data
        from pronk.train.memory import plan
        from pronk.train.settings import Settings

        every = [Example(np.array(ids, np.int32), np.array(learned, np.bool_)) for ids, learned in examples]
        self._data = Data(every)
        self._settings = Settings(model, "", lora=LoraConfig(**lora) if lora else None, **settings)
        self._checkpoint = checkpoint.open(hub.resolve(model, progress=False))
        self._device = pick_device(device)
        found = plan(self._checkpoint, self._settings, every, self._device)
        return {**found.to_dict(), "name": model}  # as it was asked for: a path says where somebody's files lie

    def load(self, threads: int | None) -> dict[str, Any]:
        """Nothing of it is ever written."""
        from pronk.train.trainer import Trainer

        how: dict[str, Any] = {"device": str(self._device), "threads": threads, "progress": self._progress}
        self._run = Trainer(self._checkpoint, self._data, self._settings, Path(), **how)
        torch = sys.modules["torch"]
        return {
            "trained_share": self._run.trained_share,
            "device": str(self._run.loop.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Of each step: seconds, tokens read, loss; and the peak of memory since the process began."""
        from pronk.torch_engine import device_memory

        taken = []
        for number in range(count):
            taken.append(self._run.loop.step())
            self._progress("", number + 1, count)
        on_gpu = device_memory.of(self._run.loop.device)
        return {
            "seconds": [step.seconds for step in taken],
            "tokens": [step.tokens for step in taken],
            "loss": [step.loss for step in taken],
            "peak_bytes": on_gpu.peak() if on_gpu else system.peak_memory(),
        }

    def account(self) -> dict[str, Any]:
        """Two steps more, looked at from inside, which takes its time: the most bytes of each kind, and operations."""
        from pronk.train.ledger import KINDS, Ledger, operations

        loop, vocabulary = self._run.loop, self._checkpoint.config.vocab_size
        with Ledger(loop.model, loop.optimizer, vocabulary) as ledger:
            loop.step()
        flops, step = operations(loop.step)  # apart, for counting holds on to what the ledger would see go
        return {
            "bytes": {kind: ledger.most[kind] for kind in KINDS},
            "at_peak": {kind: ledger.at_peak[kind] for kind in KINDS},
            "flops": flops,
            "tokens": step.tokens,
        }
