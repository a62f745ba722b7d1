"""What tests of training share: records of sums, runs of a tiny model, and a signal in the midst of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from pronk.train.loop import Loop
    from pronk.train.settings import Settings
    from pronk.train.trainer import Trainer


# Options of a run of a few seconds.
QUICK = (
    "--lora-rank 4 --lr 0.02 --max-steps 6 --accumulate 2 --batch-size 2 --eval-every 3 --samples 1 --device cpu"
).split()


def write_sums(path: Path, answers: Callable[[int, int], dict[str, str]]) -> Path:
    """20 records, each a sum asked for and its answers, as JSON lines."""
    records = [{"prompt": f"{a} plus {b} is", **answers(a, b)} for a in range(4) for b in range(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_of(chosen: Settings, folder: Path, **options: Any) -> Trainer:
    from pronk import checkpoint, tokenizer
    from pronk.train.data.sources import prepare
    from pronk.train.trainer import Trainer

    opened = checkpoint.open(chosen.model)
    assert opened.tokenizer
    ready = prepare(chosen, tokenizer.load(opened.tokenizer), opened.config.max_position_embeddings)
    folder.mkdir(exist_ok=True)
    return Trainer(opened, ready, chosen, folder, device="cpu", **options)


def timeless(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, but for the clock."""
    from pronk.train.folder import read_metrics

    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_metrics(folder)]


def gradients(loop: Loop) -> dict[str, Tensor]:
    """Those of one step, caught before the optimizer takes them."""
    found: dict[str, Tensor] = {}

    def catch(*_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None})

    loop.optimizer.register_step_pre_hook(catch)
    loop.clip = 0.0
    loop.step()
    return found


@contextmanager
def signalled(number: int, at: int) -> Iterator[None]:
    """This process gets a signal when `at` steps are done and the next begins."""
    from pronk.train.loop import Loop

    real = Loop.step

    def step(loop: Loop) -> Any:
        if loop.position.step == at:
            os.kill(os.getpid(), number)
        return real(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", step)
        yield
