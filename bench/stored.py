"""What running a file as it is stored costs: pronk and llama.cpp, each held against the file's own weights in float32.

    python bench/stored.py [--models smollm2-135m pretrained-16m] [--types Q4_K_M Q5_K_M Q6_K Q3_K_M Q2_K Q4_0 Q8_0]

Both run the same file of llama.cpp's quantizer; the reference is pronk's torch engine in f32, of the weights that stand
in it. So what differs is what each rounds besides: activations, keys and values. quality.py's protocol: windows of
WikiText-2, the second half of each counts. Beside it stands the memory of the packed weights, as a share of the bytes
of the file's matrices. Rows of the default model do not fill blocks of 256, and llama.cpp then takes blocks of 32;
those of the pretrained model do.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import harness
import models
from quality import WINDOW, measure, windows
from sides.pipe import Side
from vs_llama_cpp import STORED

from pronk import checkpoint

TYPES = (*STORED, "Q4_0", "Q8_0")


def of_file(model: str, dtype: str, texts: list[list[int]], threads: int) -> dict[str, Any]:
    path = models.gguf(model, dtype)
    with contextlib.ExitStack() as stack:
        reference, ours = (stack.enter_context(Side("pronk_side")) for _ in range(2))
        reference.load(path=str(path), engine="torch", quantize="f32", threads=threads)
        loaded = ours.load(path=str(path), engine="cpu", quantize="auto", threads=threads)
        theirs = stack.enter_context(Side("llama_cpp_side", models.PEERS_PYTHON))
        theirs.load(path=str(path), threads=threads)
        theirs.prepare(ctx=WINDOW, sequences=1)
        found: dict[str, Any] = measure(reference, {"pronk": ours, "llama.cpp": theirs}, texts)
    opened = checkpoint.open(path)
    stored = sum(tensor.nbytes for tensor in opened.tensors.values())
    return found | {"types": opened.quantization, "memory_of_file": 1e6 * loaded["weights_mb"] / stored}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[models.SMOLLM2, models.PRETRAINED])
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one window, one type; nothing is kept in results/")
    options = parser.parse_args()
    count, asked = (1, ["Q4_0"]) if options.quick else (options.windows, options.types)
    settings = {"text": models.TEXT.name, "windows": count, "window_tokens": WINDOW, "reference": "torch engine, f32"}
    results: dict[str, Any] = {"machine": harness.machine("numpy"), "settings": settings, "measured": {}}
    folder = models.FOLDER if options.quick else harness.RESULTS
    results["measured"] = harness.before("stored", results, folder).get("measured", {})  # rows that are not run again
    rows = []
    for model in options.models:
        text = models.learned_and_unseen()[1] if model == models.PRETRAINED else models.TEXT.read_text(encoding="utf-8")
        with Side("pronk_side") as side:
            texts = windows(side.encode(path=str(models.gguf(model, models.ORIGIN[model])), text=text), count)
        for dtype in asked:
            found = of_file(model, dtype, texts, options.threads)
            results["measured"].setdefault(model, {})[dtype] = found
            path = harness.save("stored", results, folder)
            klds = (
                f"{found[side]['mean_kld']:.5f} ± {found[side]['standard_error']:.5f}"
                for side in ("pronk", "llama.cpp")
            )
            rows.append([model, dtype, *klds, f"{found['memory_of_file']:.3f}"])
            harness.say(" ".join(rows[-1]))
    print(harness.table(("model", "file", "pronk, mean KLD", "llama.cpp", "memory of the file's"), rows))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
