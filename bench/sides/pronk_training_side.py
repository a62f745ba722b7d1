"""pronk's training: `Trainer`, as `pronk finetune` makes it, told to take one step after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipe import forget_peak, memory_mb, serve

import pronk
from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.train import adapter
from pronk.train.data.examples import Example
from pronk.train.data.sources import Data
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer


class PronkTraining:
    def load(
        self, path: str, work: str, threads: int, precision: str, batch_size: int, accumulate: int, checkpointing: bool,
        quantize: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """`work`: a file with examples, LoRA's settings, seed and rate. Leaves beside it what LoRA begins from."""
        given = json.loads(Path(work).read_text(encoding="utf-8"))
        examples = [
            Example(np.array(ids, np.int32), np.array(learned, np.bool_))
            for ids, learned in zip(given["ids"], given["learned"], strict=True)
        ]
        lora = LoraConfig(given["rank"], given["alpha"], given["dropout"])
        settings = Settings(
            path, work, lora=lora, batch_size=batch_size, accumulate=accumulate, precision=precision,
            recompute=int(checkpointing), lr=given["rate"], warmup=0.0, schedule="constant", seed=given["seed"],
            quantize=quantize,
        )  # fmt: skip
        folder = Path(work).parent
        self.run = Trainer(checkpoint.open(path), Data(examples), settings, folder, device="cpu", threads=threads)
        adapter.save(self.run.model, lora, path, folder)
        memory = memory_mb()
        forget_peak()
        return {"name": f"pronk {pronk.__version__}, torch {torch.__version__}", "memory_mb": memory}

    def train(self, steps: int) -> dict[str, Any]:
        """Seconds of the next steps, and what each found."""
        taken = [self.run.loop.step() for _ in range(steps)]
        return {
            "seconds": sum(step.seconds for step in taken),
            "losses": [step.loss for step in taken],
            "grad_norms": [step.grad_norm for step in taken],
        }

    def memory(self) -> dict[str, float]:
        return memory_mb()


if __name__ == "__main__":
    serve(PronkTraining())
