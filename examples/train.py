"""Training from Python: a run that is watched, stopped, resumed and used, and a loop of one's own. Needs torch.

python examples/train.py [MODEL] [--out FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import pronk

RECORDS = [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}."} for a in range(5) for b in range(5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--out", type=Path, default=Path("sums"))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    data = arguments.out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")

    for resume in (False, True):
        run = pronk.finetune(
            arguments.model, data, arguments.out, max_steps=arguments.steps, lora_rank=4, samples=1, resume=resume
        )
        for metrics in run:
            if "loss" in metrics:
                print(f"step {metrics['step']}: loss {metrics['loss']:.3f}")
            if not resume and metrics["step"] == arguments.steps // 2:
                print(f"stopped after step {metrics['step']}, and goes on")
                break
    print(f"its adapter: {run.result.adapter}")

    llm = pronk.load(arguments.model, adapter=run.result.adapter)
    module = llm.to_torch()  # called as transformers' models are
    ids = torch.tensor([llm.tokenizer.encode("3 plus 4 is 7.")])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):
        loss = module(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"a loop of one's own: loss {losses[0]:.3f} and {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
