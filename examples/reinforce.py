"""Teach a model to add by rewards alone: it is told which of its own answers are right. Needs torch.

python examples/reinforce.py [MODEL] [--out FOLDER] [--steps N] [--seed N]

Sums are asked as texts, `7 + 5 =`; a fifth of them is held out. Answers to these are right now and then; after 40
steps, some minutes on two cores, far more often. No right answer is ever shown. sums/rollouts.html has what it wrote.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

LARGEST = 9


def right(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """1 where the first number of the completion is the sum."""
    found = re.match(r"\s*(\d{1,9})(?!\d)", completion)
    return float(found is not None and int(found[1]) == record["sum"])


def records() -> list[dict[str, Any]]:
    numbers = range(LARGEST + 1)
    return [{"prompt": f"{a} + {b} =", "sum": a + b} for a in numbers for b in numbers]


def options(steps: int, seed: int) -> dict[str, Any]:
    """Of the run. Eight sums a step, eight answers each, all in one pass."""
    return {
        "num_generations": 8, "max_new_tokens": 6, "batch_size": 4, "accumulate": 2, "lora_rank": 16, "lr": 5e-4,
        "max_steps": steps, "eval_share": 0.2, "eval_every": 5, "samples": 0, "device": "cpu", "seed": seed,
        "dynamic_sampling": True,  # at first most groups have no right answer, and teach nothing
    }  # fmt: skip


def main() -> None:
    import pronk

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--out", type=Path, default=Path("sums"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = arguments.out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(record) + "\n" for record in records()), encoding="utf-8")

    run = pronk.grpo(arguments.model, data, arguments.out, reward=right, **options(arguments.steps, arguments.seed))
    for line in run:
        if "held_out_reward" in line:
            print(f"step {line['step']}: of the sums held out {line['held_out_reward']:.0%} are right", flush=True)
    print(f"its adapter: {run.result.adapter}; what it wrote: {arguments.out / 'rollouts.html'}")


if __name__ == "__main__":
    main()
