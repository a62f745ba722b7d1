"""Prefill and decode beside llama.cpp, in turns: same weights, threads and lengths; ceilings measured in the same run.

    python bench/vs_llama_cpp.py [--models smollm2-135m random-1.1b] [--formats q8 int8 q4 bf16 Q4_K_M ...]
                                 [--threads 2] [--isa avx2]

Each side is a process of its own that waits while the other works. pronk is timed from outside, through `LLM.stream`
and `LLM.generate`: sampling, scheduler and text included. llama.cpp is its own `llama_decode` in a loop, with nothing
around it but a search for the largest logit. Both read files that llama.cpp's quantizer made; `int8`, which is no type
of GGUF's, is quantized by pronk from what Q8_0 was quantized from; formats named as llama.cpp names its files run as
they are stored. `--engine torch` runs pronk's other engine instead. With `--isa` results are kept under that name: give
it where a processor has no more, too. Rows that are not run again are kept, where they are of the same machine.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import bandwidth
import harness
import models
import tasks
from sides.pipe import Side

PEER = "llama.cpp"


@dataclass(frozen=True)
class Format:
    """A format of pronk's: the file it loads (None: the origin), llama.cpp's type beside it, and what is compared."""

    ours: str | None
    theirs: str
    tasks: tuple[str, ...] = ("prefill", "decode")
    quantize: str | None = None  # None: its own name


FORMATS = {
    "q8": Format("Q8_0", "Q8_0"),
    "int8": Format(None, "Q8_0", tasks.TASKS),
    "q4": Format("Q4_0", "Q4_0"),
    "bf16": Format("BF16", "BF16"),
} | {name: Format(name, name, quantize="auto") for name in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q3_K_M", "Q2_K")}
STORED = {
    "Q4_K_M": {"prefill": 2.2, "decode": 1.35},
    "Q5_K_M": {"prefill": 2.2, "decode": 1.3},
    "Q6_K": {"prefill": 2.2, "decode": 1.3},
    "Q3_K_M": {"prefill": 2.2, "decode": 1.25},
    "Q2_K": {"prefill": 2.2, "decode": 1.25},
}
# The ratios that were set as a goal before the work began.
GOALS = {
    models.SMOLLM2: {
        "q8": {"prefill": 2.6, "decode": 1.5},
        "int8": {"prefill": 3.5, "decode": 1.8, "batch": 3.0, "long": 2.0},
        "q4": {"prefill": 2.2, "decode": 1.35},
        "bf16": {"prefill": 1.85, "decode": 1.05},
    }
    | STORED,
    models.RANDOM: {
        "q8": {"prefill": 2.2, "decode": 1.45},
        "int8": {"prefill": 3.0, "decode": 1.6},
        "q4": {"prefill": 2.2, "decode": 1.6},
        "bf16": {"prefill": 1.3, "decode": 1.05},
    }
    | {name: {"prefill": 2.0, "decode": 1.2} for name in STORED},
}
# Where there is no AVX-512: of prefill they were set apart.
AVX2 = {"int8": 3.2, "q8": 2.4, "q4": 2.2, "bf16": 1.6} | dict.fromkeys(STORED, 2.0)
GOALS_AVX2 = {
    model: {
        name: goals | {"prefill": AVX2[name]} | ({"long": 2.5} if "long" in goals else {}) for name, goals in of.items()
    }
    for model, of in GOALS.items()
}


def compare(
    model: str, name: str, wanted: list[str] | None, options: argparse.Namespace, ceiling: Any
) -> dict[str, Any]:
    form, sizes = FORMATS[name], tasks.QUICK if options.quick else tasks.Sizes()
    files = {"pronk": models.gguf(model, form.ours or models.ORIGIN[model]), PEER: models.gguf(model, form.theirs)}
    goals = (GOALS_AVX2 if options.isa == "avx2" else GOALS)[model][name]
    harness.say(f"{model} {name} beside {form.theirs}, tokens/s:")
    measured: dict[str, Any] = {"theirs": form.theirs, "files": {side: path.name for side, path in files.items()}}
    before, stolen = bandwidth.reading(ceiling, options.quick), harness.steal_s()
    with Side("pronk_side") as ours, Side("llama_cpp_side", models.PEERS_PYTHON) as theirs:
        stored = {side: ours.stored_bytes(path=str(path)) for side, path in files.items()}
        loaded = ours.load(
            path=str(files["pronk"]), engine=options.engine, quantize=form.quantize or name, threads=options.threads
        )
        measured["loaded"] = {"pronk": loaded, PEER: theirs.load(path=str(files[PEER]), threads=options.threads)}
        theirs.prepare(ctx=256, sequences=1)
        theirs.check_last_only(ids=list(range(tasks.FIRST_PLAIN_ID, tasks.FIRST_PLAIN_ID + 32)))
        measured["tasks"] = {}
        # Those of the table for every model; a batch and a long prompt where a goal was set.
        for task in wanted or [t for t in form.tasks if t in goals]:
            taken = tasks.measure(task, ours, theirs, PEER, loaded["vocab_size"], sizes, options.rounds)
            measured["tasks"][task] = taken | {"goal": goals.get(task)}
    measured["read_ceiling_gb_s"] = {"before": before, "after": bandwidth.reading(ceiling, options.quick)}
    measured["steal_s"] = harness.steal_s() - stolen
    if "decode" in measured["tasks"]:
        per_token = {"pronk": _int8_bytes(stored["pronk"]) if name == "int8" else stored["pronk"]["read_bytes"]}
        per_token[PEER] = stored[PEER]["read_bytes"]
        kv = 2 * loaded["kv_elements_a_token"] * (sizes.prompt + sizes.new / 2)  # 16 bits, half of the new tokens
        highest = max(measured["read_ceiling_gb_s"].values())
        for side, nbytes in per_token.items():
            rate = measured["tasks"]["decode"]["tok_s"][side]["median"] * (nbytes + kv) / 1e9
            read = measured["tasks"]["decode"].setdefault("read", {})
            read[side] = {"bytes_a_token": nbytes + kv, "gb_s": rate, "share_of_ceiling": rate / highest}
    return measured


def _int8_bytes(stored: dict[str, int]) -> int:
    """A byte a weight and a float32 scale a row."""
    return stored["weights"] + 4 * stored["rows"]


def report(results: dict[str, Any]) -> str:
    rows = []
    for model, formats in results["measured"].items():
        for name, measured in formats.items():
            for task, taken in measured["tasks"].items():
                rates, memory, share = taken["tok_s"], taken["peak_rss_mb"], taken.get("read", {}).get("pronk")
                rows.append(
                    [
                        f"{model} {task}, {name} vs {measured['theirs']}",
                        *(tasks.with_spread(rates[side]) for side in ("pronk", PEER)),
                        tasks.with_spread(taken["ratio"], 2),
                        f"{taken['goal']}" if taken["goal"] else "",
                        f"{share['share_of_ceiling']:.0%}" if share else "",
                        f"{memory['pronk']:.0f} / {memory[PEER]:.0f}",
                    ]
                )
    header = ("tok/s: median (min-max)", "pronk", PEER, "ratio", "goal", "of read ceiling", "peak RSS, MB")
    return harness.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--tasks", nargs="+", choices=tasks.TASKS, help="default: those that a goal was set for")
    parser.add_argument("--isa", help="take these kernels, as PRONK_ISA does")
    tasks.add_options(parser)
    options = parser.parse_args()
    if options.isa:
        os.environ["PRONK_ISA"] = options.isa
    if options.quick:
        options.rounds = 2

    harness.warn_if_busy()
    for model in options.models:  # made before anything is timed
        for name in options.formats:
            for dtype in (FORMATS[name].ours or models.ORIGIN[model], FORMATS[name].theirs):
                models.gguf(model, dtype)
    machine = harness.machine("numpy")
    ceilings = {threads: bandwidth.ceilings(threads, options.quick) for threads in sorted({1, options.threads})}
    results: dict[str, Any] = {
        "machine": machine,
        "settings": {
            "engine": options.engine,
            "threads": options.threads,
            "isa": options.isa,
            "rounds": options.rounds,
            "warmup_rounds": 1,
            "sizes": (tasks.QUICK if options.quick else tasks.Sizes()).to_dict(),
            "llama.cpp": "llama_decode, greedy, its defaults: n_ubatch 512, f16 KV, flash attention auto, split KV",
        },
        "ceilings": list(ceilings.values()),
    }
    folder = models.FOLDER if options.quick else harness.RESULTS
    program = "vs_llama_cpp" + (f"-{options.isa}" if options.isa else "")
    results["measured"] = harness.before(program, results, folder).get("measured", {})  # rows that are not run again
    for model in options.models:
        for name in options.formats:
            measured = compare(model, name, options.tasks, options, ceilings[options.threads])
            kept = results["measured"].setdefault(model, {}).get(name, {}).get("tasks", {})
            measured |= {"tasks": kept | measured["tasks"], "commit": harness.commit()}
            results["measured"][model][name] = measured
            path = harness.save(program, results, folder)  # what has been measured stays if the rest fails
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
