"""Runs for test_distributed.py, in whatever group this process is part of.

A plan is a list of {"folder", "settings"}, and of these where wanted: "resume"; "stop", the steps after which the last
process is told to; "data", that of the last process alone. Of each run one line of JSON is printed: what came of it,
and how many numbers of the model's parameters this process held; at the end another, the names of the threads that are
left where the interpreter begins to end. Arguments: the folder of all runs, the plan's file.
"""

from __future__ import annotations

import atexit
import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import PronkError
from pronk.train.data.sources import prepare
from pronk.train.distributed import Group, joined
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.grpo import GRPO
from pronk.train.objectives.kto import KTO
from pronk.train.objectives.reward import Reward
from pronk.train.reward import with_score
from pronk.train.runs.options import How
from pronk.train.runs.reinforcing import Reinforcing
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer


def perform(root: Path, work: dict[str, Any], group: Group) -> dict[str, Any]:
    settings = _settings(work["settings"])
    if isinstance(settings.objective, GRPO):
        return _reinforced(settings, root / work["folder"], group)
    last = group.rank == group.size - 1
    read = replace(settings, data=work["data"]) if last and "data" in work else settings
    opened = checkpoint.open(settings.model)
    assert opened.tokenizer
    codec = tokenizer.load(opened.tokenizer)
    data = prepare(read, codec, opened.config.max_position_embeddings)
    if isinstance(settings.objective, Reward):
        opened = with_score(opened, codec, settings.seed)
    (root / work["folder"]).mkdir(exist_ok=True)
    steps, stop = count(), work.get("stop")
    try:
        with mock.patch("pronk.train.trainer.plan"):  # of memory, which is foretold for seconds, and is others' to test
            run = Trainer(opened, data, settings, root / work["folder"], device="cpu", group=group)
        if work.get("resume"):
            run.resume()
        ended = run.train(stop=lambda: last and next(steps) == stop)
    except PronkError as error:
        return {"came": str(error)}
    return {"came": "ended" if ended else "stopped", "held": sum(_local(p).numel() for p in run.model.parameters())}


def _reinforced(settings: Settings, folder: Path, group: Group) -> dict[str, Any]:
    """By the run itself, which puts together what writes."""
    try:
        with mock.patch("pronk.train.trainer.plan"):
            for _ in Reinforcing(settings, How(folder, "cpu", threads=1, resume=False, samples=0, log_to=())).steps(
                group
            ):
                pass
    except PronkError as error:
        return {"came": str(error)}
    return {"came": "ended"}


def _settings(given: dict[str, Any]) -> Settings:
    of_data = {"margins": Reward, "judged": KTO, "prompts": GRPO}
    objective = of_data.get(Path(given["data"]).stem, DPO)
    kinds = {"lora": LoraConfig, "objective": objective}
    return Settings(**{name: kinds[name](**v) if name in kinds and v is not None else v for name, v in given.items()})


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _tell_threads() -> None:
    print(json.dumps([file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(_tell_threads)
    root, plan = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    with joined("cpu") as group:
        for work in plan:
            print(json.dumps(perform(root, work, group)), flush=True)


if __name__ == "__main__":
    main()
