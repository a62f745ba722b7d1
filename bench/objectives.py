"""What short runs of each objective and optimizer come to: held-out loss and accuracy, time and memory.

    python bench/objectives.py [--cases dpo simpo ...] [--threads 2] [--alpaca FILE]

The default model with LoRA of rank 16, or with --full. Preferences are made of short Alpaca records: the record's own
answer is chosen, and rejected is the same answer that goes on with another record's. Each case is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness

MODEL = "smollm2:135m"
ALPACA = harness.ROOT.parent / "shared" / "data" / "alpaca" / "alpaca_data_200.json"
PAIRS = "--data PAIRS --eval-share 0.2 --epochs 2 --eval-every 4"
RECORDS = "--data ALPACA --instructions alpaca --eval-share 0.1 --max-steps 12 --eval-every 6"
CASES = {
    "dpo": f"dpo {PAIRS}",
    "simpo": f"dpo {PAIRS} --loss simpo --beta 2 --simpo-gamma 1",
    "orpo": f"dpo {PAIRS} --loss orpo",
    "kto": f"kto {PAIRS}",
    "adamw": f"finetune {RECORDS}",
    "adafactor": f"finetune {RECORDS} --optimizer adafactor",
    "muon": f"finetune {RECORDS} --optimizer muon",
    "full adamw": f"finetune {RECORDS} --full",
    "full adafactor": f"finetune {RECORDS} --full --optimizer adafactor",
    "full muon": f"finetune {RECORDS} --full --optimizer muon",
}


def pairs(alpaca: Path, count: int = 40) -> list[dict[str, str]]:
    records = json.loads(alpaca.read_text(encoding="utf-8"))
    short = [one for one in records if not one["input"] and 20 <= len(one["output"]) <= 400][: count + 1]
    return [
        {
            "prompt": f"### Instruction:\n{one['instruction']}\n\n### Response:\n",
            "chosen": one["output"],
            "rejected": f"{one['output']}\n\n### Explanation:\n{other['output']}",
        }
        for one, other in pairwise(short)
    ]


def measure(words: str, files: dict[str, Path], threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        verb, *given = [str(files.get(word, word)) for word in words.split()]
        out = ["--out", f"{name}/out", "--samples", "0", "--device", "cpu", "--threads", str(threads), "--json"]
        command = [sys.executable, "-m", "pronk", verb, MODEL, *given, *out]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        report = json.loads(done.stdout)
        lines = [json.loads(line) for line in (Path(name) / "out" / "metrics.jsonl").read_text().splitlines()]
    looks = [
        {key: value for key, value in line.items() if key.startswith("held_out")}
        for line in lines
        if "loss" not in line
    ]
    kept = ("steps", "examples", "seconds", "tokens", "tokens_a_second", "peak_bytes", "trained_share")
    steps = [line for line in lines if "loss" in line]
    return {"looks": looks, "lr": max(line["lr"] for line in steps), **{name: report[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alpaca", type=Path, default=ALPACA)
    options = parser.parse_args()
    harness.warn_if_busy()
    results: dict[str, Any] = {"machine": harness.machine("numpy", "torch"), "settings": {"threads": options.threads}}
    results["measured"] = harness.before("objectives", results).get("measured", {})
    with tempfile.TemporaryDirectory() as name:
        files = {"ALPACA": options.alpaca, "PAIRS": Path(name) / "pairs.jsonl"}
        made = pairs(options.alpaca)
        files["PAIRS"].write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
        for case in options.cases:
            found = measure(CASES[case], files, options.threads)
            results["measured"][case] = {"words": CASES[case], "load_1min": harness.machine()["load_1min"], **found}
            path = harness.save("objectives", results)
            first, last = found["looks"][0], found["looks"][-1]
            rate = found["seconds"] / found["steps"]
            harness.say(
                f"{case}: held-out loss {first['held_out_loss']:.4f} to {last['held_out_loss']:.4f}, right "
                f"{first.get('held_out_rewards/accuracies', float('nan')):.0%} to "
                f"{last.get('held_out_rewards/accuracies', float('nan')):.0%}; {rate:.1f} s a step, "
                f"{found['peak_bytes'] / 1e9:.2f} GB"
            )
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
