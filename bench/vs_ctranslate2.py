"""int8 beside CTranslate2 and OpenVINO GenAI: prefill and decode of the same model, in turns, 2 threads.

    python bench/vs_ctranslate2.py [--peers ctranslate2 openvino] [--threads 2] [--rounds 7]

CTranslate2 converts the model with its own converter, from a folder that pronk writes; OpenVINO GenAI reads the Q8_0
file. Each side is a process of its own that waits while the other works; pronk is timed through `LLM.stream`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import harness
import models
import tasks
from sides.pipe import Side

GOALS = {"ctranslate2": {"prefill": 1.8}, "openvino": {"prefill": 1.35}}
SIDES = {"ctranslate2": "ctranslate2_side", "openvino": "openvino_side"}
MODEL = models.SMOLLM2


def peer_file(peer: str) -> Path:
    if peer == "openvino":
        return models.gguf(MODEL, "Q8_0")
    path = models.FOLDER / f"{MODEL}-ctranslate2-int8"
    if not path.exists():
        source = models.huggingface(MODEL)
        harness.say(f"making {path}")
        with Side(SIDES[peer], models.PEERS_PYTHON) as side:
            side.convert(source=str(source), destination=str(path), quantization="int8")
    return path


def compare(peer: str, options: argparse.Namespace) -> dict[str, Any]:
    sizes = tasks.QUICK if options.quick else tasks.Sizes()
    harness.say(f"int8 beside {peer}, tokens/s:")
    stolen = harness.steal_s()
    with Side("pronk_side") as ours, Side(SIDES[peer], models.PEERS_PYTHON) as theirs:
        source = str(models.gguf(MODEL, models.ORIGIN[MODEL]))
        loaded = ours.load(path=source, engine=options.engine, quantize="int8", threads=options.threads)
        measured: dict[str, Any] = {
            "loaded": {"pronk": loaded, peer: theirs.load(path=str(peer_file(peer)), threads=options.threads)},
            "tasks": {},
        }
        for task in options.tasks:
            taken = tasks.measure(task, ours, theirs, peer, loaded["vocab_size"], sizes, options.rounds)
            measured["tasks"][task] = taken | {"goal": GOALS[peer].get(task)}
    return measured | {"steal_s": harness.steal_s() - stolen}


def report(results: dict[str, Any]) -> str:
    rows = []
    for peer, measured in results["measured"].items():
        for task, taken in measured["tasks"].items():
            rates, memory = taken["tok_s"], taken["peak_rss_mb"]
            rows.append(
                [
                    f"{task}, int8 vs {peer}",
                    *(tasks.with_spread(rates[side]) for side in ("pronk", peer)),
                    tasks.with_spread(taken["ratio"], 2),
                    f"{taken['goal']}" if taken["goal"] else "",
                    f"{memory['pronk']:.0f} / {memory[peer]:.0f}",
                ]
            )
    return harness.table(("tok/s: median (min-max)", "pronk", "peer", "ratio", "goal", "peak RSS, MB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--tasks", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode", "long"])
    tasks.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2

    harness.warn_if_busy()
    for peer in options.peers:
        peer_file(peer)  # made before anything is timed
    results: dict[str, Any] = {
        "machine": harness.machine("numpy"),
        "settings": {
            "model": MODEL,
            "engine": options.engine,
            "threads": options.threads,
            "rounds": options.rounds,
            "warmup_rounds": 1,
            "sizes": (tasks.QUICK if options.quick else tasks.Sizes()).to_dict(),
        },
        "measured": {},
    }
    for peer in options.peers:
        results["measured"][peer] = compare(peer, options)
        path = harness.save("vs_ctranslate2", results, models.FOLDER if options.quick else harness.RESULTS)
    print(report(results))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
