"""What 4 bits and fewer cost in quality: calibrated and plainly rounded by pronk, and by llama.cpp's quantizer.

    python bench/calibrated.py [--models smollm2-135m smollm2-135m-rotated] [--types q4_0 q4_k q3_k q2_k] [--quick]

Mean KL divergence from the model in float32 by quality.py's protocol: windows of WikiText-2's test split, the second
half of each counts. Every file, ours too, is run by llama.cpp: what differs is what stands in it. pronk calibrates on
the text that comes with it, which has no part of WikiText. The reference is pronk's CPU engine in f32, of the model as
it is: its rotated twin is the same function, with weights that lie on no grid. A type is called here as `pronk quantize
--to` calls it; beside it stands llama.cpp's of that name, with its defaults. Results are kept row by row.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
from quality import TEXT, WINDOW, Floats, Tally, log_softmax, windows
from sides.pipe import Side

from pronk import checkpoint, tokenizer
from pronk.calibrate import own_text
from pronk.calibrate.calibrated import calibrated, rounded, types
from pronk.checkpoint.writers import write

PEERS = {"q4_0": "Q4_0", "q4_k": "Q4_K_M", "q3_k": "Q3_K_M", "q2_k": "Q2_K"}
ROWS = [WINDOW // 2, WINDOW]


def predictions(side: Side, texts: list[list[int]], folder: Path) -> Iterator[Floats]:
    out = folder / "logits.npy"
    for ids in texts:
        side.logits(ids=ids[:WINDOW], rows=ROWS, out=str(out))
        yield log_softmax(np.load(out))


def of_file(path: Path, texts: list[list[int]], reference: list[Path], folder: Path, threads: int) -> dict[str, Any]:
    tally = Tally()
    with Side("llama_cpp_side", models.PEERS_PYTHON) as side:
        side.load(path=str(path), threads=threads)
        side.prepare(ctx=WINDOW, sequences=1)
        for own, true, ids in zip(predictions(side, texts, folder), reference, texts, strict=True):
            tally.add(np.load(true).astype(np.float64), own, ids[ROWS[0] + 1 : ROWS[1] + 1])
    opened = checkpoint.open(path)
    matrices = [tensor for tensor in opened.tensors.values() if len(tensor.shape) == 2]
    bits = 8 * sum(tensor.nbytes for tensor in matrices) / sum(int(np.prod(tensor.shape)) for tensor in matrices)
    return {**tally.summary(), "bytes": path.stat().st_size, "bits": bits, "types": opened.quantization}


def made(model: str, name: str, kind: str, folder: Path) -> tuple[Path, float | None]:
    """A file, and what making it took of the processor's time in seconds; llama.cpp's is made once, and not timed."""
    if name == "llama.cpp":
        return models.gguf(model, PEERS[kind]), None
    source = checkpoint.open(models.gguf(model, models.ORIGIN[model]))
    assert source.tokenizer
    own = tokenizer.load(source.tokenizer)
    path, begun = folder / "made.gguf", time.process_time()
    path.unlink(missing_ok=True)
    kinds = types(source, kind)
    of_fewer = calibrated(source, kinds, own.encode(own_text())) if name == "calibrated" else rounded(source, kinds)
    write.save(of_fewer, path, to="gguf", dtype={}, vocabulary=own.vocabulary())
    return path, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[models.SMOLLM2, models.TWIN])
    parser.add_argument("--types", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one window, one type; nothing is kept in results/")
    options = parser.parse_args()
    count, asked = (1, ["q4_0"]) if options.quick else (options.windows, options.types)
    machine, measured = harness.machine("numpy"), {}
    models.FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models.FOLDER) as scratch:
        folder = Path(scratch)
        origin = models.gguf(models.SMOLLM2, models.ORIGIN[models.SMOLLM2])
        with Side("pronk_side") as side:
            ids = side.encode(path=str(origin), text=TEXT.read_text(encoding="utf-8"))
            texts = windows(ids, count)
            side.load(path=str(origin), engine="cpu", quantize="f32", threads=options.threads)
            reference = [folder / f"{number}.npy" for number in range(len(texts))]
            for path, true in zip(reference, predictions(side, texts, folder), strict=True):
                np.save(path, true.astype(np.float32))
        settings = {"text": TEXT.name, "windows": len(texts), "window_tokens": WINDOW, "run by": "llama.cpp"}
        rows = []
        for model in options.models:
            for kind in asked:
                for name in ("calibrated", "plain", "llama.cpp"):
                    path, seconds = made(model, name, kind, folder)
                    found = of_file(path, texts, reference, folder, options.threads) | {"processor_s": seconds}
                    called = PEERS[kind] if name == "llama.cpp" else kind
                    measured[f"{model} {called} {name}"] = found
                    kld = f"{found['mean_kld']:.4f} ± {found['standard_error']:.4f}"
                    rows.append([model, name, called, f"{found['bits']:.2f}", kld, f"{found['top1']:.1%}"])
                    harness.say(" ".join(rows[-1]))
                    results = {"machine": machine, "settings": settings, "measured": measured}
                    harness.save("calibrated", results, models.FOLDER if options.quick else harness.RESULTS)
    print(harness.table(("model", "rounded", "type", "bits a weight", "mean KLD", "top-1"), rows))


if __name__ == "__main__":
    main()
