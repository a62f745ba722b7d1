"""GRPO beside TRL's GRPOTrainer: tokens a second of whole steps, memory, and what was written.

    python bench/grpo.py [--cases f32 ...] [--threads 2] [--rounds 3] [--steps 1]

A step is all of it: completions are written, rewarded and learned from. Both sides train LoRA beside one folder of
Hugging Face's, ask the same prompts in the same order, and write groups of eight, of at most so many tokens, at
temperature of 1; tokens are those of completions, as each side counts its own. Each is a process of its own that waits
while the other works. In bf16 both train in bfloat16 (autocast), and TRL's frozen weights are bfloat16 as well, but for
TRL as it comes, which keeps them in float32, computes activations again and writes at most 256 tokens. `mismatch` is
the divergence of what pronk's completions are written with from what is trained, for which the loss makes up.

Instructions are prompts of some 15 tokens; where a case says "articles", a paragraph of some 300 is to be summed up, as
is common where people's preferences are learned from (arXiv 2009.01325: summaries of 24 to 48 tokens).
"""

from __future__ import annotations

import argparse
import contextlib
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

SHARED = harness.ROOT.parent / "shared" / "data"
DATA = SHARED / "alpaca" / "alpaca_data_200.json"
ARTICLES = SHARED / "wikitext-2" / "test.txt"
MODEL, PEER = models.SMOLLM2, "TRL"
GOAL = 4.0
OPTIONS: dict[str, Any] = {
    "num_generations": 8, "batch_size": 1, "accumulate": 2, "lora_rank": 16, "lora_alpha": 32,
    "lr": 1e-4, "schedule": "constant", "warmup": 0.0, "seed": 0, "eval_share": 0.0, "samples": 0, "device": "cpu",
    "max_steps": 1000,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`base`: the type of the peer's frozen weights. `rollout_quantize`: of those that pronk writes with."""

    precision: str
    base: str
    rollout_quantize: str
    new_tokens: int = 64
    checkpointing: bool = False  # the peer's, which it switches on
    articles: bool = False


CASES = {
    "f32": Case("f32", "float32", "auto"),
    "f32, written in int8": Case("f32", "float32", "int8"),
    "f32, written in int8, 256 tokens": Case("f32", "float32", "int8", 256),
    "f32, written in int8, articles": Case("f32", "float32", "int8", articles=True),
    "bf16": Case("bf16", "bfloat16", "bf16"),
    "bf16, written in int8": Case("bf16", "bfloat16", "int8"),
    "bf16, written in int8, TRL as it comes": Case("bf16", "float32", "int8", 256, checkpointing=True),
}


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    tokens = 8 if options.quick else case.new_tokens
    asked = OPTIONS | {"max_new_tokens": tokens, "accumulate": options.prompts}
    path = str(models.huggingface(MODEL))
    stolen = harness.steal_s()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data, work = folder / "prompts.jsonl", folder / "work.json"
        prompts = articles() if case.articles else instructions(options.data)
        data.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts), encoding="utf-8")
        work.write_text(json.dumps({"data": str(data), "options": asked}), encoding="utf-8")
        ours = stack.enter_context(Side("pronk_grpo_side"))
        theirs = stack.enter_context(Side("trl_side", models.PEERS_PYTHON))
        common = {"path": path, "work": str(work), "threads": options.threads, "precision": case.precision}
        loaded = {"pronk": ours.load(**common, rollout_quantize=case.rollout_quantize)}
        in_order = ordered(path, data, asked, prompts, folder)
        loaded[PEER] = theirs.load(
            **common, base=case.base, prompts=in_order, loaded=options.micro_batch, checkpointing=case.checkpointing
        )
        sides = {"pronk": ours, PEER: theirs}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        runs = {name: _rate_of(side, options.steps, found[name]) for name, side in sides.items()}
        rates = harness.interleave(runs, options.rounds, note=lambda line: harness.say(f"  {line}"))
        peaks = {name: side.memory()["peak"] for name, side in sides.items()}
    return {
        "case": asdict(case),
        "loaded": loaded,
        "tok_s": {name: harness.spread(values) | {"rounds": values} for name, values in rates.items()},
        "ratio": harness.ratios(rates["pronk"], rates[PEER]),
        "parts_s": {name: _parts(rounds[1:]) for name, rounds in found.items()},
        "peak_rss_mb": peaks,
        "steps": {name: [step for one in rounds for step in one["steps"]] for name, rounds in found.items()},
        "steal_s": harness.steal_s() - stolen,
    }


def instructions(data: Path) -> list[str]:
    return [f"{one['instruction']}\n\n" for one in json.loads(data.read_text(encoding="utf-8"))]


def articles(characters: int = 1400) -> list[str]:
    """Long paragraphs of WikiText-2, each cut at the end of a sentence, and the question that follows them."""
    lines = [line.strip() for line in ARTICLES.read_text(encoding="utf-8").splitlines()]
    cut = [line[:characters].rpartition(" . ")[0] for line in lines if len(line) > characters]
    return [f"{paragraph} .\n\nSummarize this in one sentence.\n\n" for paragraph in cut if paragraph]


def ordered(path: str, data: Path, asked: dict[str, Any], prompts: list[str], folder: Path) -> list[str]:
    """The prompts as pronk's run takes them, over several epochs."""
    import pronk

    run = pronk.grpo(path, data, folder / "order", reward="length:1", **asked)
    batches = run.settings.batches(run.data.train)
    return [prompts[index] for number in range(8) for indices in batches.epoch(number) for index in indices]


def _rate_of(side: Side, steps: int, found: list[dict[str, Any]]) -> Callable[[], float]:
    def run() -> float:
        found.append(side.train(steps=steps))
        return sum(float(step["tokens"]) for step in found[-1]["steps"]) / float(found[-1]["seconds"])

    return run


def _parts(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds a round: of writing and rewarding, and of all else."""
    return {
        "writing": harness.spread([one["writing"] for one in rounds]),
        "learning": harness.spread([one["seconds"] - one["writing"] for one in rounds]),
    }


def report(results: dict[str, Any]) -> str:
    rows = []
    for name, measured in results["measured"].items():
        parts, steps, peaks = measured["parts_s"], measured["steps"], measured["peak_rss_mb"]
        both = ("pronk", PEER)
        rows.append(
            [
                name,
                *(tasks.with_spread(measured["tok_s"][side]) for side in both),
                tasks.with_spread(measured["ratio"], 2),
                *(
                    " / ".join(f"{parts[side][part]['median']:.1f}" for side in both)
                    for part in ("writing", "learning")
                ),
                " / ".join(f"{sum(one['tokens'] for one in steps[side]) / len(steps[side]):.0f}" for side in both),
                f"{max(step['mismatch_kl'] for step in steps['pronk']):.0e}",
                " / ".join(f"{peaks[side]:.0f}" for side in both),
            ]
        )
    header = (
        "tok/s: median (min-max)",
        "pronk",
        PEER,
        "ratio",
        "writing, s",
        "learning, s",
        "tokens",
        "mismatch",
        "peak, MB",
    )
    return harness.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="a round")
    parser.add_argument("--prompts", type=int, default=OPTIONS["accumulate"], help="a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="completions, of the peer's")
    parser.add_argument("--quick", action="store_true", help="two rounds of few tokens; nothing is kept in results/")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompts = 2, 2

    harness.warn_if_busy()
    folder = models.FOLDER if options.quick else harness.RESULTS
    results: dict[str, Any] = {
        "machine": harness.machine("numpy", "torch"),
        "settings": {
            "model": MODEL, "data": options.data.name, "goal": GOAL, "threads": options.threads,
            "rounds": options.rounds, "warmup_rounds": 1, "steps_a_round": options.steps,
            "peer_micro_batch": options.micro_batch,
            **OPTIONS, "accumulate": options.prompts,
        },
        "measured": {},
    }  # fmt: skip
    results["measured"] = harness.before("grpo", results, folder).get("measured", {})
    for name in options.cases:
        harness.say(f"{name}, tokens/s:")
        load = harness.machine()["load_1min"]
        results["measured"][name] = measure(CASES[name], options) | {"load_1min": load}
    path = harness.save("grpo", results, folder)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
