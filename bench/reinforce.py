"""Whether a reward rises: examples/reinforce.py with several seeds, and its curve.

    python bench/reinforce.py [--seeds 0 1 2] [--steps 20] [--threads 2]

Held-out rewards at each look, of all seeds, and seconds; `docs/training/reinforce.svg` is drawn of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT / "examples"))
import reinforce

MODEL = "smollm2:135m"
PICTURE = harness.ROOT / "docs" / "training" / "reinforce.svg"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito's


def measure(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    import pronk

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "facts.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in reinforce.records()), encoding="utf-8")
        how = reinforce.options(options.steps, seed) | {"threads": options.threads}
        lines = []
        for line in pronk.grpo(MODEL, data, Path(name) / "out", reward=reinforce.right, **how):
            lines.append(line)
            if "held_out_reward" in line:
                harness.say(f"  step {line['step']}: {line['held_out_reward']:.3f}")
    looks = [line for line in lines if "held_out_reward" in line]
    steps = [line for line in lines if "loss" in line]
    return {
        "steps": [line["step"] for line in looks],
        "held_out_reward": [line["held_out_reward"] for line in looks],
        "reward": [line["reward"] for line in steps],
        "mismatch_kl": max(line["mismatch/kl"] for line in steps),
        "seconds": time.perf_counter() - begun,
    }


def draw(measured: dict[str, Any]) -> None:
    from pronk.drawing import chart
    from pronk.drawing.chart import Axis, Key

    lines = {name: list(zip(one["steps"], one["held_out_reward"], strict=True)) for name, one in measured.items()}
    last = max(step for line in lines.values() for step, _ in line)
    across = Axis(-0.03 * last, 1.03 * last, chart.whole(0, last), label="step")
    up = chart.linear([value for line in lines.values() for _, value in line], "held-out answers that are right")
    keys = [Key(f"seed {name}", colour, "line", marker=0) for name, colour in zip(lines, COLOURS, strict=False)]
    drawing, (panel,) = chart.chart([("", across, up)], 260, keys)
    for line, colour in zip(lines.values(), COLOURS, strict=False):
        drawing.line(panel.at(line), colour)
        for point in panel.at(line):
            drawing.marker(*point, colour)
    said = "; ".join(
        f"seed {name}: {line[0][1]:.2f} at first, {line[-1][1]:.2f} at last" for name, line in lines.items()
    )
    PICTURE.write_text(drawing.file("Held-out reward of three runs", said), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("numpy", "torch"),
        "settings": {"model": MODEL, "threads": options.threads, **reinforce.options(options.steps, 0)},
        "measured": {},
    }
    for seed in options.seeds:
        harness.say(f"seed {seed}, held-out reward:")
        results["measured"][str(seed)] = measure(seed, options)
        path = harness.save("reinforce", results)
    draw(results["measured"])
    harness.say(f"written to {path} and {PICTURE}")


if __name__ == "__main__":
    main()
