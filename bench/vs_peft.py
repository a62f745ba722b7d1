"""LoRA beside transformers with PEFT: tokens a second, memory, and the losses, which must agree.

    python bench/vs_peft.py [--cases "f32 1x8" ...] [--threads 2] [--rounds 5] [--steps 2]

Both sides load one folder of Hugging Face's in f32, begin from the same adapter, and read the same Alpaca examples in
the same order, 8 a step: `1x8` is micro-batches of one, accumulated, `8x1` one of eight. Tokens are those of the
examples; what the peer pads is work, but no tokens. Each side is a process of its own that waits while the other works.

In bf16 both compute in bfloat16 (autocast). The peer is run twice, its frozen weights in float32 as the file has them
and in bfloat16 as LoRA's recipes load them; each counts, and pronk keeps its own as `--precision bf16` does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import models
import tasks
from sides.pipe import Side

DATA = harness.ROOT.parent / "shared" / "data" / "alpaca" / "alpaca_data_200.json"
MODEL, PEER = models.SMOLLM2, "PEFT"
RANK, ALPHA, RATE, BETAS, SEED = 16, 32.0, 2e-4, (0.9, 0.95), 0
STEP = 8  # examples
GOALS = {"tok_s": 1.5, "memory": 0.7}


@dataclass(frozen=True)
class Case:
    """`base`: the type of the peer's frozen weights."""

    precision: str
    base: str
    batch_size: int
    dropout: float = 0.05
    checkpointing: bool = False


CASES = {
    "f32 1x8": Case("f32", "float32", 1),
    "f32 8x1": Case("f32", "float32", 8),
    "f32 1x8, no dropout": Case("f32", "float32", 1, dropout=0.0),
    "f32 8x1, no dropout": Case("f32", "float32", 8, dropout=0.0),
    "f32 8x1, checkpointing": Case("f32", "float32", 8, checkpointing=True),
    "bf16 1x8": Case("bf16", "float32", 1),
    "bf16 8x1": Case("bf16", "float32", 8),
    "bf16 1x8, PEFT's base in bf16": Case("bf16", "bfloat16", 1),
    "bf16 8x1, PEFT's base in bf16": Case("bf16", "bfloat16", 8),
    "bf16 8x1, checkpointing, PEFT's base in bf16": Case("bf16", "bfloat16", 8, checkpointing=True),
}


def measure(case: Case, examples: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from pronk.train.data.batches import Batches

    lengths = [len(ids) for ids in examples["ids"]]
    accumulate = STEP // case.batch_size
    plan = Batches(lengths, case.batch_size, seed=SEED)
    epochs = -(-(options.rounds + 1) * options.steps * STEP // len(lengths))
    order = [batch for number in range(epochs) for batch in plan.epoch(number)]
    stolen = harness.steal_s()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work.json"
        given = {"rank": RANK, "alpha": ALPHA, "dropout": case.dropout, "rate": RATE, "betas": BETAS, "seed": SEED}
        work.write_text(json.dumps(examples | given))
        ours = stack.enter_context(Side("pronk_training_side"))
        theirs = stack.enter_context(Side("peft_side", models.PEERS_PYTHON))
        common = {
            "path": str(models.huggingface(MODEL)),
            "work": str(work),
            "threads": options.threads,
            "precision": case.precision,
            "accumulate": accumulate,
            "checkpointing": case.checkpointing,
        }
        loaded = {"pronk": ours.load(**common, batch_size=case.batch_size)}
        loaded[PEER] = theirs.load(**common, base=case.base, order=order)
        tokens = [sum(lengths[i] for batch in order[at : at + accumulate] for i in batch)
                  for at in range(0, len(order) - accumulate + 1, accumulate)]  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {"pronk": [], PEER: []}
        sides = {"pronk": ours, PEER: theirs}
        runs = {name: _rate_of(side, tokens, options.steps, found[name]) for name, side in sides.items()}
        rates = harness.interleave(runs, options.rounds, note=lambda line: harness.say(f"  {line}"))
        peaks = {name: side.memory()["peak"] for name, side in sides.items()}
    losses = {name: [loss for one in rounds for loss in one["losses"]] for name, rounds in found.items()}
    differences = [abs(a - b) for a, b in zip(losses["pronk"], losses[PEER], strict=True)]
    return {
        "case": asdict(case),
        "loaded": loaded,
        "tok_s": {name: harness.spread(values) | {"rounds": values} for name, values in rates.items()},
        "ratio": harness.ratios(rates["pronk"], rates[PEER]),
        "peak_rss_mb": {name: max(peaks[name], loaded[name]["memory_mb"]["peak"]) for name in sides},
        "peak_while_training_mb": peaks,
        "losses": losses,
        "grad_norms": {name: [norm for one in rounds for norm in one["grad_norms"]] for name, rounds in found.items()},
        "loss_difference": {
            "worst": max(differences),
            "mean": abs(sum(losses["pronk"]) - sum(losses[PEER])) / len(differences),
        },
        "steal_s": harness.steal_s() - stolen,
    }


def _rate_of(side: Side, tokens: list[int], steps: int, found: list[dict[str, Any]]) -> Callable[[], float]:
    at = itertools.count(0, steps)

    def run() -> float:
        first = next(at)
        found.append(side.train(steps=steps))
        return sum(tokens[first : first + steps]) / float(found[-1]["seconds"])

    return run


def encoded(path: Path) -> dict[str, Any]:
    """The examples as both sides get them: tokens, and which are learned."""
    from pronk import checkpoint, tokenizer
    from pronk.train.data import records
    from pronk.train.data.examples import Encoder
    from pronk.train.objectives.sft import SFT

    source = checkpoint.open(models.huggingface(MODEL)).tokenizer
    assert source
    encoder = Encoder(tokenizer.load(source), 8192)
    alpaca = SFT(instructions="alpaca")
    examples = [one for record in records.read(str(path)).items for one in alpaca.encode(record, encoder)]
    return {"ids": [one.ids.tolist() for one in examples], "learned": [one.loss_mask.tolist() for one in examples]}


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, measured in results["measured"].items():
        rates, peak, training = measured["tok_s"], measured["peak_rss_mb"], measured["peak_while_training_mb"]
        rows.append(
            [
                name,
                *(tasks.with_spread(rates[side]) for side in ("pronk", PEER)),
                tasks.with_spread(measured["ratio"], 2),
                *(f"{memory['pronk']:.0f} / {memory[PEER]:.0f}" for memory in (peak, training)),
                f"{peak['pronk'] / peak[PEER] - 1:+.0%}",
                f"{measured['loss_difference']['worst']:.1g} / {measured['loss_difference']['mean']:.1g}",
            ]
        )
    header = ("tok/s: median (min-max)", "pronk", PEER, "ratio", "peak, MB", "in training", "", "losses: worst / mean")
    return harness.table(header, rows)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """With what all measurements of these steps are told."""
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of the optimizer, a round")
    parser.add_argument("--quick", action="store_true", help="two rounds of one step; nothing is kept in results/")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 1
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    options = parsed(parser)

    harness.warn_if_busy()
    examples = encoded(options.data)
    results: dict[str, Any] = {
        "machine": harness.machine("numpy", "torch"),
        "settings": {
            "model": MODEL, "data": options.data.name, "examples_a_step": STEP, "rank": RANK, "alpha": ALPHA,
            "targets": "all linear", "rate": RATE, "threads": options.threads, "rounds": options.rounds,
            "warmup_rounds": 1, "steps_a_round": options.steps, "goals": GOALS,
        },
        "measured": {},
    }  # fmt: skip
    for name in options.cases:
        harness.say(f"{name}, tokens/s:")
        results["measured"][name] = measure(CASES[name], examples, options)
    path = harness.save("vs_peft", results, models.FOLDER if options.quick else harness.RESULTS)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
