"""What test_distributed.py compares with one process: runs of each kind, in this process's group.

Arguments: the folder for all runs, and a JSON file with their settings: {"name": {"settings", "stop", "resume"}}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import PronkError
from pronk.train.data import prepare
from pronk.train.distributed import Group, joined
from pronk.train.run import Run
from pronk.train.settings import Preference, Settings


def settings(given: dict[str, Any]) -> Settings:
    made = Settings(**given)
    lora, preference = made.lora and LoraConfig(**made.lora), made.preference and Preference(**made.preference)
    return replace(made, lora=lora, preference=preference)


def perform(folder: Path, work: dict[str, Any], group: Group) -> str:
    """What came of it, in a word or in an error's line."""
    chosen = settings(work["settings"])
    opened = checkpoint.open(chosen.model)
    assert opened.tokenizer
    data = prepare(chosen, tokenizer.load(opened.tokenizer), opened.config.max_position_embeddings)
    folder.mkdir(exist_ok=True)
    try:
        run = Run(opened, data, chosen, folder, device="cpu", group=group)
        if work.get("resume"):
            run.resume()
        steps, stop = count(), work.get("stop")
        return "done" if run.train(stop=lambda: stop is not None and next(steps) == stop) else "stopped"
    except PronkError as error:
        return str(error)


def main() -> None:
    torch.set_num_threads(1)
    root, plan = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    with joined("cpu") as group:
        for number, work in enumerate(plan):
            came = perform(root / work["folder"], work, group)
            print(json.dumps([number, group.rank, came]), flush=True)


if __name__ == "__main__":
    main()
