"""LLM.int8() beside transformers with bitsandbytes' `load_in_8bit`: prefill, decode, memory, and what 8 bits cost.

    python bench/vs_bitsandbytes.py [--dtypes float32 bfloat16 float16] [--threads 2] [--rounds 7] [--windows 6]

Both sides load one folder of Hugging Face's, in f32, and quantize it as they do; `--dtypes` are bitsandbytes' types for
everything that is not in 8 bits, each measured beside pronk. Each side is a process of its own that waits while the
other works; pronk is timed through `LLM.stream`, transformers in a bare loop over its module. What 8 bits cost is the
mean KL divergence from f32 on WikiText-2, as in quality.py.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import harness
import models
import quality
import tasks
from sides.pipe import Side

GOALS = {"decode": 10.0}
MOST_KLD = 0.0035
MODEL = models.SMOLLM2
SCHEME = "llm-int8"
DTYPES = ("float32", "bfloat16", "float16")
PEER = "bitsandbytes"


def ours(stack: contextlib.ExitStack, engine: str, quantize: str, threads: int) -> tuple[Side, dict[str, Any]]:
    side = stack.enter_context(Side("pronk_side"))
    path = str(models.huggingface(MODEL))
    return side, side.load(path=path, engine=engine, quantize=quantize, threads=threads)


def theirs(stack: contextlib.ExitStack, dtype: str, threads: int) -> tuple[Side, dict[str, Any]]:
    side = stack.enter_context(Side("bitsandbytes_side", models.PEERS_PYTHON))
    return side, side.load(path=str(models.huggingface(MODEL)), dtype=dtype, threads=threads)


def speed(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes = tasks.QUICK if options.quick else tasks.Sizes()
    harness.say(f"{SCHEME} beside {PEER} in {dtype}, tokens/s:")
    stolen = harness.steal_s()
    with contextlib.ExitStack() as stack:
        own, loaded = ours(stack, options.engine, SCHEME, options.threads)
        other, theirs_loaded = theirs(stack, dtype, options.threads)
        measured: dict[str, Any] = {"loaded": {"pronk": loaded, PEER: theirs_loaded}, "tasks": {}}
        for task in ("prefill", "decode"):
            taken = tasks.measure(task, own, other, PEER, loaded["vocab_size"], sizes, options.rounds)
            now = {"pronk": own.memory()["now"], PEER: other.memory()["now"]}
            measured["tasks"][task] = taken | {"rss_mb": now, "goal": GOALS.get(task)}
    return measured | {"steal_s": harness.steal_s() - stolen}


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Mean KL divergence and the rest, of both sides against pronk's torch engine in f32."""
    with contextlib.ExitStack() as stack:
        reference, _ = ours(stack, "torch", "f32", options.threads)
        sides = {f"pronk {SCHEME}": ours(stack, options.engine, SCHEME, options.threads)[0]}
        sides |= {f"{PEER} {dtype}": theirs(stack, dtype, options.threads)[0] for dtype in options.dtypes}
        text = options.text.read_text(encoding="utf-8")
        ids = reference.encode(path=str(models.huggingface(MODEL)), text=text)
        return quality.measure(reference, sides, quality.windows(ids, options.windows))


def report(results: dict[str, Any]) -> str:
    rows = []
    for dtype, measured in results["measured"].items():
        for task, taken in measured["tasks"].items():
            rates, peak, now = taken["tok_s"], taken["peak_rss_mb"], taken["rss_mb"]
            rows.append(
                [
                    f"{task}, {SCHEME} vs {PEER} in {dtype}",
                    *(tasks.with_spread(rates[side]) for side in ("pronk", PEER)),
                    tasks.with_spread(taken["ratio"], 2),
                    f"{taken['goal']:g}" if taken["goal"] else "",
                    *(f"{memory['pronk']:.0f} / {memory[PEER]:.0f}" for memory in (now, peak)),
                ]
            )
    header = ("tok/s: median (min-max)", "pronk", PEER, "ratio", "goal", "RSS, MB", "peak, MB")
    costs = [
        [name, f"{found['mean_kld']:.6f} ± {found['standard_error']:.6f}", f"{found['top1']:.1%}"]
        for name, found in results["quality"].items()
        if name != "reference"
    ]
    return harness.table(header, rows) + "\n\n" + harness.table(("against f32", "mean KLD", "top-1"), costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--text", type=Path, default=quality.TEXT)
    tasks.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.windows = 2, 1

    harness.warn_if_busy()
    models.huggingface(MODEL)  # made before anything is timed
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "settings": {
            "model": MODEL,
            "engine": options.engine,
            "quantize": SCHEME,
            "threads": options.threads,
            "rounds": options.rounds,
            "warmup_rounds": 1,
            "sizes": (tasks.QUICK if options.quick else tasks.Sizes()).to_dict(),
            "text": options.text.name,
            "windows": options.windows,
            "window_tokens": quality.WINDOW,
            "most_kld": MOST_KLD,
        },
        "measured": {dtype: speed(dtype, options) for dtype in options.dtypes},
        "quality": cost(options),
    }
    path = harness.save("vs_bitsandbytes", results, models.FOLDER if options.quick else harness.RESULTS)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
