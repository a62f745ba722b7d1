"""Training beside frozen weights in codes, in turns with the same training beside floats: seconds of a step, memory.

    python bench/frozen_codes.py [--formats q4 q8 int8] [--case "f32 8x1"] [--threads 2] [--rounds 5] [--steps 2]

The default model learns Alpaca's records by LoRA, 8 a step, as in `vs_peft.py`, whose cases these are. Each side is a
process of its own that waits while the others work. The goal is 1.25 of the time beside floats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import models
import tasks
import vs_peft
from sides.pipe import Side

GOAL = 1.25


def measure(formats: list[str], case: vs_peft.Case, options: argparse.Namespace) -> dict[str, Any]:
    examples = vs_peft.encoded(options.data)
    given = {"rank": vs_peft.RANK, "alpha": vs_peft.ALPHA, "dropout": case.dropout, "rate": vs_peft.RATE,
             "seed": vs_peft.SEED}  # fmt: skip
    sides, loaded, losses = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for name in ["floats", *formats]:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.json"
            work.write_text(json.dumps(examples | given))
            sides[name] = stack.enter_context(Side("pronk_training_side"))
            loaded[name] = sides[name].load(
                path=str(models.huggingface(vs_peft.MODEL)), work=str(work), threads=options.threads,
                precision=case.precision, batch_size=case.batch_size, accumulate=vs_peft.STEP // case.batch_size,
                checkpointing=case.checkpointing, quantize=None if name == "floats" else name,
            )  # fmt: skip
            losses[name] = []
        runs = {name: _seconds_of(side, options.steps, losses[name]) for name, side in sides.items()}
        seconds = harness.interleave(runs, options.rounds, note=lambda line: harness.say(f"  {line}"))
        memory = {name: side.memory() for name, side in sides.items()}
    return {
        name: {
            "seconds_a_step": harness.spread(seconds[name]) | {"rounds": seconds[name]},
            "of_floats": harness.ratios(seconds[name], seconds["floats"]),
            "memory_loaded_mb": loaded[name]["memory_mb"],
            "memory_mb": memory[name],
            "losses": losses[name],
        }
        for name in sides
    }


def _seconds_of(side: Side, steps: int, losses: list[float]) -> Callable[[], float]:
    def run() -> float:
        found = side.train(steps=steps)
        losses.extend(found["losses"])
        return float(found["seconds"]) / steps

    return run


def report(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            tasks.with_spread(measured["seconds_a_step"], 2),
            tasks.with_spread(measured["of_floats"], 2),
            f"{measured['memory_mb']['peak']:.0f}",
            f"{measured['losses'][0]:.4f} to {measured['losses'][-1]:.4f}",
        ]
        for name, measured in results["measured"].items()
    ]
    return harness.table(("frozen weights", "s a step: median (min-max)", "of floats", "peak, MB", "loss"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q4", "q8", "int8"])
    parser.add_argument("--case", default="f32 8x1", choices=list(vs_peft.CASES), metavar="CASE")
    options = vs_peft.parsed(parser)

    harness.warn_if_busy()
    results: dict[str, Any] = {
        "machine": harness.machine("numpy", "torch"),
        "settings": {
            "model": vs_peft.MODEL, "data": options.data.name, "case": options.case, "examples_a_step": vs_peft.STEP,
            "threads": options.threads, "rounds": options.rounds, "warmup_rounds": 1, "steps_a_round": options.steps,
            "goal": GOAL,
        },
        "measured": measure(options.formats, vs_peft.CASES[options.case], options),
    }  # fmt: skip
    path = harness.save("frozen_codes", results, models.FOLDER if options.quick else harness.RESULTS)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
