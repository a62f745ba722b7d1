"""What a LoRA adapter costs that is kept beside the weights, in turns with the same model without one.

    python bench/adapters.py [--adapter FOLDER --ask QUESTION --says TEXT] [--formats auto q4 q8 int8 llm-int8 bf16 f32]
                             [--isa avx2]

The default model on the CPU engine, in each format: prefill 512, decode 128, 16 texts at once; loading, five times; and
what the weights take with the adapter, counted, beside its own numbers in 16 bits. Where no adapter is named, one of
random numbers is made, of rank 16 on all linear layers. With --ask, what each answers, and what a merged adapter does.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np
import tasks
from sides.pipe import Side

from pronk import checkpoint
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint.containers import safetensors
from pronk.checkpoint.hub import resolve as hub

FORMATS = ["auto", "q4", "q8", "int8", "llm-int8", "bf16", "f32"]
RANK, LOADS = 16, 5


def random_adapter(folder: Path, model: Path) -> Path:
    """As large in effect as a trained one; on all linear layers."""
    draw, numbers = np.random.default_rng(0), {}
    for name, shape in checkpoint.open(model).config.tensor_shapes().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in adapters.TARGETS:
            rows, columns = shape
            a, b = draw.uniform(-1, 1, (RANK, columns)) * (3 / columns) ** 0.5, draw.normal(0, 0.02, (rows, RANK))
            numbers[adapters.key(module, "lora_A")] = a.astype(np.float32)
            numbers[adapters.key(module, "lora_B")] = b.astype(np.float32)
    safetensors.write(folder / adapters.WEIGHTS, numbers)
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(adapters.TARGETS)}
    (folder / adapters.CONFIG).write_text(json.dumps(told))
    return folder


def measured(quantize: str, model: Path, adapter: Path, ask: str | None, options: argparse.Namespace) -> dict[str, Any]:
    sizes, rounds = (tasks.QUICK, 2) if options.quick else (tasks.Sizes(), options.rounds)
    of = {"path": str(model), "engine": options.engine, "quantize": quantize, "threads": options.threads}
    found: dict[str, Any] = {}
    with Side("pronk_side") as ours, Side("pronk_side") as plain:
        loads = harness.interleave(
            {
                "pronk": lambda: ours.load(**of, adapter=str(adapter))["load_s"],
                "plain": lambda: plain.load(**of)["load_s"],
            },
            LOADS,
        )
        found["load_s"] = {name: harness.spread(values) for name, values in loads.items()}
        with_it, without = ours.load(**of, adapter=str(adapter)), plain.load(**of)
        found["weights_mb"] = {"pronk": with_it["weights_mb"], "plain": without["weights_mb"]}
        for task in ("prefill", "decode", "batch"):
            harness.say(quantize)
            found[task] = tasks.measure(task, ours, plain, "plain", with_it["vocab_size"], sizes, rounds)
        if ask:
            found["answers"] = {"apart": ours.answer(question=ask), "without": plain.answer(question=ask)}
            plain.load(**of, adapter=str(adapter), merge=True)
            found["answers"]["merged"] = plain.answer(question=ask)
    return found


def report(results: dict[str, Any], says: str | None) -> str:
    rows = []
    for name, found in results["measured"].items():
        load, weights = found["load_s"], found["weights_mb"]
        row = [name]
        row += [f"{found[task]['ratio']['median']:.3f}" for task in ("prefill", "decode", "batch")]
        row += [f"{found['decode']['tok_s'][side]['median']:.1f}" for side in ("pronk", "plain")]
        row.append(f"{1e3 * (load['pronk']['median'] - load['plain']['median']):+.0f}")
        row.append(f"{weights['plain']:.1f} {weights['pronk'] - weights['plain']:+.1f}")
        if says:
            row += ["yes" if says in found["answers"][how] else "no" for how in ("apart", "merged", "without")]
        rows.append(row)
    header = ["", "prefill 512", "decode", "16 texts", "tok/s", "without", "load, ms", "weights, MB"]
    header += ["says it", "merged", "without"] if says else []
    return harness.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tasks.add_options(parser)
    parser.add_argument("--adapter", type=Path, help="an adapter of the default model  [default: random numbers]")
    parser.add_argument("--ask", help="what to ask through the chat template")
    parser.add_argument("--says", help="what stands in the answer of who knows it")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--isa", help="take these kernels, as PRONK_ISA does")
    options = parser.parse_args()
    if options.isa:
        os.environ["PRONK_ISA"] = options.isa
    harness.warn_if_busy()
    model = hub.resolve(hub.DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as folder:
        adapter = options.adapter or random_adapter(Path(folder), model)
        opened = adapters.open(adapter, checkpoint.open(model))
        results: dict[str, Any] = {
            "machine": harness.machine("numpy"),
            "commit": harness.commit(),
            "settings": {"threads": options.threads, "rounds": options.rounds, "isa": options.isa, "loads": LOADS},
            "adapter": {
                "name": options.adapter.name if options.adapter else "random",
                "mb_in_16_bits": opened.nbytes / 1e6,
            },
            "asked": options.ask,
            "measured": {},
        }
        for quantize in options.formats:
            results["measured"][quantize] = measured(quantize, model, adapter, options.ask, options)
            if not options.quick:  # what was measured stays where the next is interrupted
                path = harness.save("adapters" + (f"-{options.isa}" if options.isa else ""), results)
                harness.say(f"written to {path}")
    print(f"the adapter: {results['adapter']['mb_in_16_bits']:.1f} MB in 16 bits; ratios to the model without it")
    print(report(results, options.says))


if __name__ == "__main__":
    main()
