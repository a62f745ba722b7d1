"""Teach a model to write facts as JSON by rewards alone: it is told which of its own answers are right. Needs torch.

python examples/reinforce.py [MODEL] [--out FOLDER] [--steps N] [--seed N]

It is asked to write sentences such as `Karim is 37 years old and lives in Kyoto.` as JSON with three keys. A fifth
of the sentences is held out. Of its answers to these every tenth or so is right at first; after 20 steps, some minutes
on two cores, most are. No right answer is ever shown. facts/rollouts.html has what it wrote.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

NAMES = "Alice Bruno Chen Dora Emil Fatima Goran Hana Ivan Julia Karim Lena Omar Paula Rosa Sven Tara Viktor".split()
CITIES = "Oslo Paris Cairo Lima Quito Berlin Rome Delhi Seoul Dakar Hanoi Lagos Milan Perth Kyoto Zagreb".split()


def right(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """1 where the completion is JSON of the record's facts and nothing else."""
    try:
        return float(json.loads(completion) == record["facts"])
    except (ValueError, RecursionError):
        return 0.0


def records(count: int = 120) -> list[dict[str, Any]]:
    drawn = random.Random(0)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        facts = {"name": drawn.choice(NAMES), "age": drawn.randint(18, 90), "city": drawn.choice(CITIES)}
        sentence = "{name} is {age} years old and lives in {city}.".format(**facts)
        question = f"{sentence} Write this as JSON with the keys name, age and city."
        made[sentence] = {"prompt": [{"role": "user", "content": question}], "facts": facts}
    return list(made.values())


def options(steps: int, seed: int) -> dict[str, Any]:
    """Of the run. Eight sentences a step, eight answers each."""
    return {
        "num_generations": 8, "max_new_tokens": 40, "batch_size": 2, "accumulate": 4, "lora_rank": 16, "lr": 2e-4,
        "max_steps": steps, "eval_share": 0.2, "eval_every": 5, "samples": 0, "device": "cpu", "seed": seed,
    }  # fmt: skip


def main() -> None:
    import pronk

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--out", type=Path, default=Path("facts"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = arguments.out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(record) + "\n" for record in records()), encoding="utf-8")

    run = pronk.grpo(arguments.model, data, arguments.out, reward=right, **options(arguments.steps, arguments.seed))
    for line in run:
        if "held_out_reward" in line:
            print(f"step {line['step']}: of the answers held out {line['held_out_reward']:.0%} are right", flush=True)
    print(f"its adapter: {run.result.adapter}; what it wrote: {arguments.out / 'rollouts.html'}")


if __name__ == "__main__":
    main()
